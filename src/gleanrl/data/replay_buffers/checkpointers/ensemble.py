"""Storages of an ensemble in checkpoints."""

from __future__ import annotations

import os

from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed


class StorageEnsembleCheckpointer:
    """Writes the storages of a `StorageEnsemble`, each in the form of its own checkpointer, in one commit.

    That is what the ensemble's own `dumps` and `loads` do.

    Examples:
        >>> import tempfile, torch
        >>> from gleanrl.data import LazyTensorStorage, StorageEnsemble
        >>> ensemble, other = (StorageEnsemble(*(LazyTensorStorage(4) for _ in range(2))) for _ in range(2))
        >>> ensemble[1].set(range(3), torch.arange(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     StorageEnsembleCheckpointer().dumps(ensemble, folder)
        ...     StorageEnsembleCheckpointer().loads(other, folder)
        >>> other[1].get(range(3))
        tensor([0, 1, 2])
    """

    def dumps(self, storage: Checkpointed, path: os.PathLike[str] | str, keep: int = 1) -> None:
        """Write a checkpoint of the ensemble's storages; see `ReplayBuffer.dumps`."""
        storage.dumps(path, keep)

    def loads(self, storage: Checkpointed, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Load the newest checkpoint into the ensemble's storages, or into none; see `ReplayBuffer.loads`."""
        storage.loads(path, verify)
