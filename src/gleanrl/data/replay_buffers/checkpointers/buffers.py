"""Whole buffers in checkpoints.

Storages of an ensemble in checkpoints.
"""

from __future__ import annotations

import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from gleanrl._checkpoint.async_dump import Dump
from gleanrl._checkpoint.folder import Folder, expecting
from gleanrl._util import flag, positive
from gleanrl.data.replay_buffers.checkpointers.base import StorageCheckpointerBase
from gleanrl.errors import CorruptCheckpointError


class Checkpointed(ABC):
    """What is saved with `dumps`, and goes on with `loads`."""

    kind: ClassVar[str]
    """What checkpoints of it are called."""
    elsewhere: ClassVar[bool] = False
    """Whether it is in another process, which may be lost: when several parts are to go on, it comes first."""

    @abstractmethod
    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state for `Folder.commit`: records get the form of the storages' checkpointers when it is written.

        It is the state of this moment, whoever writes meanwhile; they are held up a little until it is committed.
        """

    @abstractmethod
    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Return what goes on from what `checkpointed_state` returned, with whatever checkpointers; it can't fail.

        Raises:
            CheckpointError: it returned nothing like it; nothing changed.
            SchemaError: it doesn't fit; nothing changed.
        """

    @abstractmethod
    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last stored step of trajectories that nobody goes on with as truncated, and done.

        Args:
            ids: theirs, as ``("collector", "traj_ids")`` holds them; unknown ones are none.
        """

    def load_checkpointed_state(self, state: dict[str, Any]) -> None:
        """Go on from what `checkpointed_state` returned; see `loading`."""
        self.loading(copy.deepcopy(state))()  # what is loaded keeps the memory that it is given

    def dumps(self, path: os.PathLike[str] | str, keep: int = 1, wait: bool = True) -> Dump | None:
        """Write a checkpoint: once this returns, it is on the disk, and whole.

        It holds what `state_dict` holds: the stored records, all parts with their random numbers, transforms, batches
        drawn ahead. `storage.checkpointer` says in which form records are written. Whatever ends the process or the
        machine meanwhile, the folder holds its earlier checkpoint, or this one, too.

        Args:
            path: a folder, which is made if need be; repeated dumps may go to the same one.
            keep: how many complete checkpoints it is to hold; older ones are removed once this one is complete.
            wait: False for writing in the background: others go on writing and sampling, and the checkpoint is of the
                moment of this call. What is overwritten before it's on the disk takes memory, a quarter of the free at
                most. A dump waits for the one before it, and raises its error if nobody was told.

        Returns:
            None; for ``wait=False`` the dump, to ask it whether it is done, and to wait for it.

        Raises:
            CheckpointError: something can't be saved, which it names; or another process writes there.
            OSError: the disk is full, or fails; nothing is left of the attempt.
        """
        positive("keep", keep)
        flag("wait", wait)
        last = _dumps.pop(self, None)
        if last is not None:
            last.settle()
        if wait:
            Folder(path).commit(self.kind, self.checkpointed_state(), keep)
            return None
        state = self.checkpointed_state()
        dump = _dumps[self] = Dump(Folder(path), self.kind, state, keep)
        return dump

    def loads(self, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Go on from the newest checkpoint that is whole; a warning names those that aren't.

        The buffer, empty or filled, has parts like those of the one that was saved. Nothing that is read is executed.
        A dump of this buffer that is under way is waited for.

        Args:
            path: the folder that `dumps` was given.
            verify: whether checksums are compared; sizes are always.

        Raises:
            CheckpointError: there is none, or it is damaged; it names the file. Nothing changed.
            SchemaError: it doesn't fit. Nothing changed.
        """
        if self in _dumps:
            _dumps[self].end()
        Folder(path).load(verify, expecting(path, self.kind, lambda state: self.loading(state)()))

    def dump(self, *args: Any, **kwargs: Any) -> Dump | None:
        """Do what `dumps` does."""
        return self.dumps(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Dump | None:
        """Do what `dumps` does."""
        return self.dumps(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Do what `loads` does."""
        self.loads(*args, **kwargs)


_dumps: weakref.WeakKeyDictionary[Checkpointed, Dump] = weakref.WeakKeyDictionary()


def with_records(state: Any) -> dict[str, Any]:
    """Return the state of a buffer whose storage's state is in any form.

    Raises:
        CorruptCheckpointError: it isn't one.
    """
    if not isinstance(state, dict) or "_storage" not in state:
        raise CorruptCheckpointError("a buffer without a storage")
    return {**state, "_storage": StorageCheckpointerBase.unpacked(state["_storage"])}


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
