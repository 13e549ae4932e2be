"""Storages that another thread writes at a chosen moment of a fetch."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gleanrl.data import LazyTensorStorage, ListStorage


class OvertakenRows:
    """Part of a storage. During its next fetch, another thread calls `act` once."""

    act: Any = None
    fetched: tuple[int, ...] = ()
    """Number of rows that each call fetched."""

    def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
        found = super().fetch(slots, paths)  # type: ignore[misc]
        self.fetched += (len(slots),)
        if self.act is not None:
            act, self.act = self.act, None
            thread = threading.Thread(target=act)
            thread.start()
            thread.join(timeout=30)
            assert not thread.is_alive(), "a writer waited for a fetch"
        return found


class Overtaken(OvertakenRows, LazyTensorStorage):
    """A tensor storage that is written during a fetch."""


class OvertakenList(OvertakenRows, ListStorage):
    """A list storage that is written during a fetch."""
