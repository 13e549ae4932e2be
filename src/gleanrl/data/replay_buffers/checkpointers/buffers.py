"""Saving and loading whole buffers, and the storages of an ensemble."""

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
    """An object that `dumps` saves and `loads` restores."""

    kind: ClassVar[str]
    """The object's name in checkpoints."""
    elsewhere: ClassVar[bool] = False
    """Whether it is in another process. That process may be lost, so of several objects this one is restored first."""

    @abstractmethod
    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state for `Folder.commit`; records are packed by the storages' checkpointers when it is written.

        The state is that of the present moment, even if records are written before it is committed. Until then, writers
        may have to wait a little.
        """

    @abstractmethod
    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Return a callback that restores what `checkpointed_state` returned; the callback can't fail.

        The state may have been written with any checkpointers.

        Raises:
            CheckpointError: the state isn't one of such an object; nothing changed.
            SchemaError: the state doesn't fit; nothing changed.
        """

    @abstractmethod
    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last stored step of trajectories that no collector will continue as truncated and done.

        Args:
            ids: their ids, as stored in ``("collector", "traj_ids")``; unknown ids are ignored.
        """

    def load_checkpointed_state(self, state: dict[str, Any]) -> None:
        """Restore what `checkpointed_state` returned; see `loading`."""
        self.loading(copy.deepcopy(state))()  # a loaded part keeps the memory of the state, so pass a copy

    def dumps(self, path: os.PathLike[str] | str, keep: int = 1, wait: bool = True) -> Dump | None:
        """Write a checkpoint. With `wait`, it is complete and on the disk when the call returns.

        It holds what `state_dict` holds: the stored records, all parts with their random generators, transforms, and
        batches drawn ahead. `storage.checkpointer` defines the form of the records. If the process or the machine stops
        meanwhile, the folder holds its earlier checkpoint, and this one only if it is complete.

        Args:
            path: a folder, which is created if it doesn't exist; repeated dumps may use the same one.
            keep: number of complete checkpoints to keep; older ones are removed once this one is complete.
            wait: False writes in the background, while writing and sampling continue. The checkpoint holds the state at
                this call. Records that are overwritten before they are on the disk take memory, at most a quarter of
                the free memory. A dump waits for the previous one, and raises its error if the caller hasn't seen that
                yet.

        Returns:
            None; with ``wait=False`` the dump, which tells whether it is done and can be waited for.

        Raises:
            CheckpointError: a value that the message names can't be saved, or another process writes to the folder.
            OSError: the disk is full or fails; the attempt leaves nothing behind.
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
        """Restore the newest complete checkpoint; a warning names newer ones that are damaged.

        The buffer, empty or filled, needs parts of the same kinds as the saved one. Loading executes no code from the
        files. It first waits for a running dump of this buffer, and ignores the error of that dump.

        Args:
            path: the folder given to `dumps`.
            verify: whether checksums are compared; sizes always are.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged; the message names the file. Nothing changed.
            SchemaError: the checkpoint doesn't fit. Nothing changed.
        """
        if self in _dumps:
            _dumps[self].end()
        Folder(path).load(verify, expecting(path, self.kind, lambda state: self.loading(state)()))

    def dump(self, *args: Any, **kwargs: Any) -> Dump | None:
        """Alias of `dumps`."""
        return self.dumps(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Dump | None:
        """Alias of `dumps`."""
        return self.dumps(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> None:
        """Alias of `loads`."""
        self.loads(*args, **kwargs)


_dumps: weakref.WeakKeyDictionary[Checkpointed, Dump] = weakref.WeakKeyDictionary()


def with_records(state: Any) -> dict[str, Any]:
    """Return the state of a buffer, with its storage's state unpacked from any form.

    Raises:
        CorruptCheckpointError: `state` isn't the state of a buffer.
        IncompatibleCheckpointError: no class in this program has registered the storage's form.
    """
    if not isinstance(state, dict) or "_storage" not in state:
        raise CorruptCheckpointError(
            "a buffer's state: expected a dictionary with '_storage', got a state without a storage"
        )
    return {**state, "_storage": StorageCheckpointerBase.unpacked(state["_storage"])}


class StorageEnsembleCheckpointer:
    """Writes the storages of a `StorageEnsemble` in one commit, each in the form that its checkpointer defines.

    The ensemble's `dumps` and `loads` do the same.

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
        """Load the newest checkpoint into all storages of the ensemble, or into none; see `ReplayBuffer.loads`."""
        storage.loads(path, verify)
