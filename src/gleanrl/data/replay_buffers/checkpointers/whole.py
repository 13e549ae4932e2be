"""Records written as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Writes records as they are, the stored ones only: what storages do by themselves.

    Examples:
        >>> import tempfile, torch
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> buffer, other = (ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2) for _ in range(2))
        >>> _ = buffer.extend(torch.arange(4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     buffer.dumps(folder)
        ...     other.loads(folder)
        >>> other[:]
        tensor([0, 1, 2, 3])
    """

    form = "whole"
    takes_segments = True

    def pack(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state as it is."""
        return dict(state)

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state as it is; its columns may be rows that are still in their files."""
        return dict(packed)


class ListStorageCheckpointer(TensorStorageCheckpointer):
    """Writes the objects of lists: tensors, TensorDicts, numbers, strings, and containers of them, no others."""

    form = "list"
