"""Whether somebody who was given tensors has changed or moved them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from gleanrl.exchange import EXCHANGE
from gleanrl.native import TensorMarks


class Marks(Protocol):
    """Where some tensors are, and how often they were changed: asked before and after somebody else gets them.

    Torch counts the changes of a tensor and of all its views together.
    """

    def take(self, tensors: tuple[Any, ...]) -> None:
        """Remember address and number of changes of each; tensors, or things with ``_version`` and ``data_ptr``."""

    def unchanged(self, tensors: tuple[Any, ...]) -> bool:
        """Return whether these are where they were, and as often changed."""

    def taken(self) -> list[tuple[int, int]]:
        """Return what was remembered: the number of changes and the address of each."""


def marks() -> Marks:
    """Return marks of no tensors yet."""
    return _AskedMarks() if EXCHANGE is None else TensorMarks(EXCHANGE, torch.Tensor)


class _AskedMarks:
    """Asks tensors in Python; see `Marks`."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []

    def take(self, tensors: tuple[Any, ...]) -> None:
        self._taken = _marks_of(tensors)

    def unchanged(self, tensors: tuple[Any, ...]) -> bool:
        return self._taken == _marks_of(tensors)

    def taken(self) -> list[tuple[int, int]]:
        return self._taken


def _marks_of(tensors: tuple[Any, ...]) -> list[tuple[int, int]]:
    return [(one._version, one.data_ptr()) for one in tensors]
