"""How torch shows its tensors to the core: by DLPack's exchange interface, as newer releases do."""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import Any, Protocol

import torch

from gleanrl.native import TensorMarks, knows_exchange


def _offered() -> Any:
    offered = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return offered if offered is not None and knows_exchange(offered) else None


EXCHANGE = _offered()
"""The interface's capsule; None if torch offers none, or one that the core doesn't know."""


class Marks(Protocol):
    """Where some tensors are, and how often they were changed: asked before and after somebody else gets them.

    Torch counts the changes of a tensor and of all its views together.
    """

    def take(self, tensors: tuple[Any, ...]) -> None:
        """Remember it of these; they are tensors, or things with ``_version`` and ``data_ptr``."""

    def hold(self, tensors: tuple[Any, ...]) -> bool:
        """Return whether it's the same of these."""

    def taken(self) -> list[tuple[int, int]]:
        """Return what was remembered: the number of changes and the address of each."""


def marks() -> Marks:
    """Return what remembers it."""
    return _AskedMarks() if EXCHANGE is None else TensorMarks(EXCHANGE, torch.Tensor)


class _AskedMarks:
    """Asks tensors in Python; see `Marks`."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []

    def take(self, tensors: tuple[Any, ...]) -> None:
        self._taken = [*zip(map(_version, tensors), map(_address, tensors), strict=True)]

    def hold(self, tensors: tuple[Any, ...]) -> bool:
        return self._taken == [*zip(map(_version, tensors), map(_address, tensors), strict=True)]

    def taken(self) -> list[tuple[int, int]]:
        return self._taken


_version = attrgetter("_version")
_address = methodcaller("data_ptr")
