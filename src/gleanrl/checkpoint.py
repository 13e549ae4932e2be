"""`Checkpoint`: all that a training lives by, saved in one commit and restored in one call."""

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

# The former package of this name: `compat.paths` finds its modules below this one.
__path__: list[str] = []
_KIND = "Checkpoint"
Change = Callable[[], Any]


class Checkpoint:
    """Saves collectors, buffers, models, optimizers and whatever else in one commit, and restores all or none of it.

    The random generators of torch (CUDA's included), NumPy and Python belong to it. Whatever ends the process or the
    machine while it saves, the folder holds its earlier checkpoint, or this one, too. Nothing that is read is executed.

    Args:
        **parts: by names of your choice: collectors, buffers, everything with `state_dict` and `load_state_dict`
            (modules, optimizers, schedulers, scalers), and dictionaries of plain values, which are filled again in
            place. Values are numbers, text, tensors, TensorDicts and containers of them.

    Raises:
        InvalidTypeError: something else was given.
        InvalidArgumentError: two buffers over one storage, which is one buffer's to load.

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
                    f"{name}: expected a collector, a buffer, something with state_dict and load_state_dict, or a "
                    f"dictionary, got {type(part).__name__}"
                )
        _check_storages(parts)
        self.parts = parts
        """What is saved, by name."""
        self._last: Dump | None = None

    def save(self, path: os.PathLike[str] | str, keep: int = 1, wait: bool = True) -> Dump | None:
        """Write a checkpoint; once this returns, it is on the disk, and whole.

        What collectors do in the background rests while the state is taken.

        Args:
            path: a folder, which is made if need be; repeated saves may go to the same one.
            keep: how many complete checkpoints it is to hold; older ones are removed once this one is complete.
            wait: False for writing in the background: the checkpoint is of the moment of this call. A save waits for
                the one before it, and raises its error if nobody was told.

        Returns:
            None; for ``wait=False`` the dump, to ask it whether it is done, and to wait for it.

        Raises:
            CheckpointError: something can't be saved, which it names; or another process writes there.
            OSError: the disk is full, or fails; nothing is left of the attempt.
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
        # Buffers hold their writers up until they are written: they come last.
        names = sorted(self.parts, key=lambda name: isinstance(self.parts[name], Checkpointed))
        state["parts"] = {name: _saved(self.parts[name]) for name in names}
        return state

    def load(self, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Go on from the newest checkpoint that is whole; a warning names those that aren't.

        The parts, new or used, are made like those that were saved, under the same names. Of trajectories that can't go
        on, because their environments' state isn't known, the last step in the buffers is marked as truncated: all
        buffers here are taken to hold what the collectors here have collected. What has ids from elsewhere,
        demonstrations say, is better saved by itself. With buffers among the parts, ids go on as they would have;
        without, a used collector gives other ids to trajectories of which it has handed out other frames since. A save
        that is under way is waited for.

        Args:
            path: the folder that `save` was given.
            verify: whether checksums are compared; sizes are always.

        Raises:
            IncompleteCheckpointError: the folder holds none.
            CheckpointError: it is damaged; it names the file. Nothing changed.
            SchemaError: something doesn't fit, which it names. Nothing changed.
            WorkerError: a collector lost a worker that isn't replaced, and has ended; of the others none changed but
                collectors before it.
        """
        if self._last is not None:
            self._last.end()
        with self._at_rest():
            Folder(path).load(verify, expecting(path, _KIND, self._restore))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore all parts, or none of them."""
        parts = self._parts_in(state)
        checked = self._checked(parts, GENERATORS.parse(state.get("generators")))
        lost: list[WorkerError] = []
        undo: list[Change] = []

        def change() -> None:
            if lost:  # the second time: what it lost ends its collector
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
        """Return the states of the parts by their names, which are those here."""
        parts = state.get("parts")
        if not isinstance(parts, Mapping):
            raise SchemaError("Checkpoint: it holds no parts")
        missing, unexpected = self.parts.keys() - parts.keys(), parts.keys() - self.parts.keys()
        if missing or unexpected:
            raise SchemaError(
                f"Checkpoint: it lacks {sorted(missing)}, and holds {sorted(unexpected)} beside"
            )
        return parts

    def _checked(self, parts: Mapping[str, Any], generators: Any) -> list[Change]:
        """Check all states; return what takes over those of the parts that say beforehand whether they would."""
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
                    cut, kept = cut.union(loading.cut), kept.union(loading.kept)
                    checked.insert(0, loading.change)  # workers may be lost meanwhile: it comes first
                elif isinstance(part, torch.nn.Module):
                    check_loads(part, parts[name], strict=True)
        if buffers and cut & kept:
            warnings.warn(
                f"Checkpoint: trajectories {sorted(cut & kept)[:8]} can't go on in one collector, and go on in another "
                "one: whose the buffers hold isn't known, and their last steps aren't marked as truncated; call "
                "end_trajectories(ids) of the buffer that holds the former's",
                stacklevel=2,
            )
        return checked + [partial(part.end_trajectories, cut - kept) for part in buffers if cut - kept]

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Let collectors that collect in the background rest within a ``with`` block."""
        with ExitStack() as stack:
            for part in self.parts.values():
                if isinstance(part, SourceCollector):
                    stack.enter_context(part.pause())
            yield

    def __repr__(self) -> str:
        """Show what belongs to it."""
        parts = ", ".join(f"{name}={type(part).__name__}" for name, part in self.parts.items())
        return f"{type(self).__name__}({parts})"


def _check_storages(parts: Mapping[str, Any]) -> None:
    """Raise if two buffers have one storage: both would load its records."""
    owners: dict[int, str] = {}
    for name, part in parts.items():
        if not isinstance(part, ReplayBuffer):
            continue
        first = owners.setdefault(id(part.storage), name)
        if first != name:
            raise InvalidArgumentError(
                f"{name}: it has the same storage as {first!r}, which saves the records: give its sampler in its "
                f"place, {name}=buffer.sampler"
            )


def _saved(part: Any) -> Any:
    if isinstance(part, dict):
        return part
    return part.checkpointed_state() if isinstance(part, Checkpointed) else part.state_dict()


def _says_beforehand(part: Any) -> bool:
    """Whether a part says whether it would take a state before it does."""
    return isinstance(part, (dict, Checkpointed, SourceCollector))


def _filling(part: dict[Any, Any], state: Any) -> Change:
    """Return what fills a dictionary with what another one held."""
    if not isinstance(state, dict):
        raise SchemaError(f"expected a dictionary, got {type(state).__name__}")

    def fill() -> None:
        part.clear()
        part.update(copy.deepcopy(state))

    return fill


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say of which part a state doesn't fit."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as cause:
        raise SchemaError(f"Checkpoint: {name!r}: {cause}") from cause
