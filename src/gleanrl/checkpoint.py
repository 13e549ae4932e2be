"""`Checkpoint` saves the whole state of a training run in one commit, and restores it in one call."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from gleanrl._checkpoint.async_dump import Dump
from gleanrl._checkpoint.folder import Folder, expecting
from gleanrl._os.interrupts import to_the_end
from gleanrl._state.rng import GENERATORS, seeds_later
from gleanrl._util import flag, positive
from gleanrl.collectors.base import SourceCollector
from gleanrl.collectors.policy_weights import check_loads
from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.errors import CheckpointError, InvalidArgumentError, InvalidTypeError, SchemaError, WorkerError

# `gleanrl.checkpoint` was a package. With a `__path__`, `compat.paths` can serve the old module paths below it.
__path__: list[str] = []
_KIND = "Checkpoint"
Change = Callable[[], Any]


class Checkpoint:
    """Saves collectors, buffers, models, optimizers and other state in one commit, and restores all of it or nothing.

    A checkpoint includes the random generators of torch (also CUDA's), NumPy and Python. If the process or the machine
    ends during a save, the folder still holds the earlier checkpoint. Loading executes no code from the checkpoint.

    Args:
        **parts: the parts to save, under names of your choice. A part is a collector, a buffer, an object with
            `state_dict` and `load_state_dict` (module, optimizer, scheduler, scaler), or a dictionary of plain values.
            A load refills a dictionary in place. Values are numbers, text, tensors, TensorDicts and containers of them.

    Raises:
        InvalidTypeError: a part has another type.
        InvalidArgumentError: two buffers share a storage; both would load its records.

    Examples:
        >>> import tempfile, torch
        >>> model, progress = torch.nn.Linear(2, 1), {"updates": 7}
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> checkpoint = Checkpoint(model=model, optimizer=optimizer, progress=progress)
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save(folder)
        >>> progress["updates"] = 0
        >>> checkpoint.load(folder)
        >>> progress
        {'updates': 7}
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            methods = [getattr(type(part), method, None) for method in ("state_dict", "load_state_dict")]
            if not isinstance(part, (dict, Checkpointed)) and not all(map(callable, methods)):
                raise InvalidTypeError(
                    f"{name}: expected a collector, a buffer, an object with state_dict and load_state_dict, or a "
                    f"dictionary, got {type(part).__name__}"
                )
        _check_storages(parts)
        self.parts = parts
        """The parts to save, by name."""
        self._last: Dump | None = None

    def save(self, path: os.PathLike[str] | str, keep: int = 1, wait: bool = True) -> Dump | None:
        """Write a checkpoint; when the call returns, the complete checkpoint is on the disk.

        Collectors pause their background collection while the state is read.

        Args:
            path: the folder of the checkpoints, which is created if it doesn't exist. Save repeatedly to the same one.
            keep: how many complete checkpoints the folder holds; older ones are removed once this one is complete.
            wait: False writes in the background. The checkpoint then holds the state at this call. A later save waits
                for an earlier one, and raises its error if `Dump.wait` hasn't raised it.

        Returns:
            None; for ``wait=False`` the dump, whose methods report when it is done and wait for it.

        Raises:
            CheckpointError: a part can't be saved (the message names it), or another process writes to the folder.
            OSError: the disk is full, or fails; the call removes the files that it wrote.
            InvalidArgumentError: `keep` is below 1.

        With ``wait=False``, errors of the write are raised by `Dump.wait` or a later save instead.
        """
        positive("keep", keep)
        flag("wait", wait)
        last, self._last = self._last, None
        if last is not None:
            last.settle()
        with self._at_rest():
            with seeds_later():
                state = self._state()
            if not wait:
                state["parts"] = {
                    name: found if isinstance(self.parts[name], Checkpointed) else copy.deepcopy(found)
                    for name, found in state["parts"].items()
                }
                self._last = Dump(Folder(path), _KIND, state, keep)
                return self._last
            Folder(path).commit(_KIND, state, keep)
        return None

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"generators": GENERATORS.state_dict()}
        # Buffers delay their writers until their records are written. So their state is read last.
        names = sorted(self.parts, key=lambda name: isinstance(self.parts[name], Checkpointed))
        state["parts"] = {name: _saved(self.parts[name]) for name in names}
        return state

    def load(self, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Restore the newest complete checkpoint, including the random generators; a warning names newer damaged ones.

        The parts must have the same names and the same configuration as the saved parts. They may be new or used.

        Some trajectories can't be continued, because the state of their environments isn't known. Their last step in
        the buffers is marked as truncated. This assumes that the buffers hold steps of these collectors only: save a
        buffer whose trajectory ids come from elsewhere, for example from demonstrations, in its own checkpoint.

        With buffers among the parts, the collectors continue the saved numbering of trajectory ids. Without buffers, a
        used collector doesn't reuse an id under which it has delivered other frames since the save.

        The call waits for a save in the background.

        Args:
            path: the folder that `save` wrote to.
            verify: whether to compare checksums; sizes are always compared.

        Raises:
            IncompleteCheckpointError: the folder holds no complete checkpoint.
            CheckpointError: the checkpoint is damaged; the message names the file. Nothing changed.
            SchemaError: a saved part doesn't fit; the message names it. Nothing changed.
            WorkerError: a collector lost a worker, couldn't replace it, and has ended. Collectors restored before it
                have changed; all other parts haven't.
        """
        if self._last is not None:
            self._last.end()
        with self._at_rest():
            Folder(path).load(verify, expecting(path, _KIND, self._restore))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore all parts, or none of them.

        All states are checked before the first change. Parts that can't check a state without loading it, such as
        modules and optimizers, are loaded first and restored from a copy on failure. The other changes can't fail,
        except that a collector can lose a worker. These come last, so that no failure leaves a mix of old and new
        state.
        """
        parts = self._parts_in(state)
        checked = self._checked(parts, GENERATORS.parse(state.get("generators")))
        lost: list[WorkerError] = []
        undo: list[Change] = []

        def change() -> None:
            # `to_the_end` calls this again after an exception. A collector that lost a worker has ended: don't retry
            if lost:
                raise lost[0]
            try:
                for load in checked:
                    load()
            except WorkerError as loss:
                lost.append(loss)
                raise
            undo.clear()

        try:
            for name, part in self.parts.items():
                if not _says_beforehand(part):
                    undo.append(partial(part.load_state_dict, copy.deepcopy(part.state_dict())))
                    with _naming(name):
                        part.load_state_dict(parts[name])
            to_the_end(change)
        except BaseException:
            for back in reversed(undo):
                back()
            raise

    def _parts_in(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the saved states by name; raise `SchemaError` unless they have the names of the parts."""
        parts = state.get("parts")
        if not isinstance(parts, Mapping):
            raise SchemaError(
                f"Checkpoint: expected the parts {sorted(self.parts)}, but the saved state holds no parts; load a "
                "folder that Checkpoint.save wrote"
            )
        missing, unexpected = self.parts.keys() - parts.keys(), parts.keys() - self.parts.keys()
        if missing or unexpected:
            raise SchemaError(
                f"Checkpoint: expected the parts {sorted(self.parts)}, but the saved state lacks {sorted(missing)}, "
                f"and also holds {sorted(unexpected)}; load it into a Checkpoint with the names of its parts"
            )
        return parts

    def _checked(self, parts: Mapping[str, Any], generators: Any) -> list[Change]:
        """Check all states, and return the callbacks that load the parts which can check a state in advance.

        Collectors and buffers in other processes come first in the list, since they can lose their process.
        """
        checked: list[Change] = [partial(GENERATORS.adopt, generators)]
        cut, kept = set[int](), set[int]()
        buffers = [part for part in self.parts.values() if isinstance(part, Checkpointed)]
        for name, part in self.parts.items():
            with _naming(name):
                if isinstance(part, dict):
                    checked.append(_filling(part, parts[name]))
                elif isinstance(part, Checkpointed):
                    checked.insert(0 if part.elsewhere else len(checked), part.loading(parts[name]))
                elif isinstance(part, SourceCollector):
                    loading = part.loading(parts[name], strict=True, keep_ids=bool(buffers))
                    cut, kept = cut.union(loading.cut), kept.union(loading.continued)
                    checked.insert(0, loading.change)  # before parts that can't fail: workers may be lost
                elif isinstance(part, torch.nn.Module):
                    check_loads(part, parts[name], strict=True)
        if buffers and cut & kept:
            warnings.warn(
                f"Checkpoint: two collectors have trajectories with the ids {sorted(cut & kept)[:8]}, and only one of "
                "them continues these. The buffers' steps could be of either, so their last steps aren't marked as "
                "truncated; call end_trajectories(ids) of the buffer with the steps of the other collector",
                stacklevel=2,
            )
        return checked + [partial(part.end_trajectories, cut - kept) for part in buffers if cut - kept]

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Pause the background collection of all collectors within a ``with`` block."""
        with ExitStack() as stack:
            for part in self.parts.values():
                if isinstance(part, SourceCollector):
                    stack.enter_context(part.pause())
            yield

    def __repr__(self) -> str:
        """Return the names and types of the parts."""
        parts = ", ".join(f"{name}={type(part).__name__}" for name, part in self.parts.items())
        return f"{type(self).__name__}({parts})"


def _check_storages(parts: Mapping[str, Any]) -> None:
    """Raise `InvalidArgumentError` if two buffers share a storage, because both would load its records."""
    owners: dict[int, str] = {}
    for name, part in parts.items():
        if not isinstance(part, ReplayBuffer):
            continue
        first = owners.setdefault(id(part.storage), name)
        if first != name:
            raise InvalidArgumentError(
                f"{name}: expected a buffer with its own storage, got one that shares the storage of {first!r}, which "
                f"saves the records; pass the sampler instead: {name}=buffer.sampler"
            )


def _saved(part: Any) -> Any:
    if isinstance(part, dict):
        return part
    return part.checkpointed_state() if isinstance(part, Checkpointed) else part.state_dict()


def _says_beforehand(part: Any) -> bool:
    """Return whether a part can check a state completely before it loads it."""
    return isinstance(part, (dict, Checkpointed, SourceCollector))


def _filling(part: dict[Any, Any], state: Any) -> Change:
    """Return a callback that replaces the content of a dictionary by a copy of a saved one.

    Raises:
        SchemaError: the saved state isn't a dictionary.
    """
    if not isinstance(state, dict):
        raise SchemaError(f"expected a dictionary, got {type(state).__name__}")

    def fill() -> None:
        part.clear()
        part.update(copy.deepcopy(state))

    return fill


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn errors within a ``with`` block into a `SchemaError` that names the part, except a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as cause:
        raise SchemaError(f"Checkpoint: {name!r}: {cause}") from cause
