"""A storage that is written in the middle of a fetch, for tests of what a sample does about it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gleanrl.data.replay_buffers import LazyTensorStorage


class Overtaken(LazyTensorStorage):
    """A storage during whose next fetch another thread calls `act`, once."""

    act: Any = None

    def fetch(self, slots: torch.Tensor, paths: Any = None) -> Any:
        found = super().fetch(slots, paths)
        if self.act is not None:
            act, self.act = self.act, None
            thread = threading.Thread(target=act)
            thread.start()
            thread.join(timeout=30)
            assert not thread.is_alive(), "a writer waited for a fetch"
        return found
