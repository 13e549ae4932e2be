"""An audit that checks whether stored records are consistent with each other, as steps of a rollout must be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from gleanrl._arrays.native import Episodes
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import FLAGS, Path, as_key
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable, locate, runs_of
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.trajectories import STEPS, TRAJ_IDS, same_bits, twins
from gleanrl.errors import MissingKeyError, SchemaError

_CHUNK = 1 << 16  # time steps checked at once


class AuditProblem(NamedTuple):
    """One kind of problem, with the first slot that has it."""

    rule: str
    """``"schema"``, ``"generations"``, ``"flags"``, ``"next observation"`` or ``"ids"``."""
    rows: int
    """Number of rows that violate the rule."""
    slot: int
    """The first such row."""
    message: str
    """The expectation that the rows violate."""


class AuditReport(NamedTuple):
    """The result of `ReplayBuffer.verify`."""

    rows: int
    """Number of transitions checked."""
    trajectories: int | None
    """Number of trajectories and fragments; None if the stored entries don't tell, or nothing is stored."""
    checks: tuple[str, ...]
    """The rules that applied."""
    problems: tuple[AuditProblem, ...]
    """The violations, one entry for each kind."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


def audit(storage: Storage) -> AuditReport:
    """Check every stored record, without changing any.

    - schema: columns have the shapes and dtypes of the first write.
    - generations: every stored row was written.
    - flags: ``done`` is ``terminated`` or ``truncated``, where all three are stored.
    - next observation: within a trajectory, an entry below ``next`` equals the following step's root, bit for bit. Rows
      of n-step data that look further ahead are skipped.
    - ids: no trajectory id continues after an end or occurs in two streams. A truncation isn't an end if the following
      step continues from its next observation (``set_truncated=True`` of a collector).

    Rows where ``("collector", "mask")`` is False are padding and aren't compared. Only the first two rules apply to
    storages other than tensor storages. The last two need records in order, and entries that tell where trajectories
    end.

    Cost: one pass over the columns that the rules need.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
        >>> steps = TensorDict({"observation": torch.arange(3), "done": torch.zeros(3, 1).bool()}, [3])
        >>> steps["next"] = TensorDict({"observation": torch.tensor([1, 7, 3]), "done": steps["done"]}, [3])
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> index = buffer.extend(steps)
        >>> [(problem.rule, problem.slot) for problem in buffer.verify().problems]
        [('next observation', 1)]
    """
    checks, problems = ["schema", "generations"], _check_storage(storage)
    if not isinstance(storage, TensorStorage) or not len(storage):
        return AuditReport(len(storage), None, tuple(checks), tuple(problems))
    found = _Findings()
    if flags := _check_flags(storage, found):
        checks.append(flags)
    try:
        table = EpisodeTable(BoundaryKeys()).of(storage) if storage.ordered else None
    except (MissingKeyError, SchemaError):
        table = None
    trajectories = None
    if table is not None:
        trajectories = table.num_runs(1)
        checks += [*_check_chain(storage, table, found), *_check_ids(storage, table, found)]
    return AuditReport(len(storage), trajectories, tuple(checks), (*problems, *found.problems()))


class _Findings:
    """Problems, counted by kind."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, rule: str, message: str, slots: torch.Tensor) -> None:
        """Record the rows `slots`, ``(n,)`` int64, as violations of a rule."""
        if slots.shape[0]:
            count, first = self._found.get((rule, message), (0, int(slots[0])))
            self._found[rule, message] = count + slots.shape[0], first

    def problems(self) -> tuple[AuditProblem, ...]:
        """Return one problem for each kind."""
        return tuple(
            AuditProblem(rule, count, first, message)
            for (rule, message), (count, first) in self._found.items()
        )


def _check_storage(storage: Storage) -> list[AuditProblem]:
    """Check the storage's own consistency and its generations."""
    try:
        if isinstance(storage, (ListStorage, TensorStorage)):
            storage.check_valid()
    except AssertionError as error:
        return [AuditProblem("schema", 1, 0, f"the storage contradicts itself: {error}")]
    generations = storage.generation(torch.arange(len(storage), device="cpu"))
    never = (generations < 1).nonzero()[:, 0]
    if never.shape[0]:
        return [
            AuditProblem("generations", never.shape[0], int(never[0]), "stored rows that were never written")
        ]
    return []


def _check_flags(storage: TensorStorage, found: _Findings) -> str | None:
    """Check that done equals terminated or truncated; return the rule's name if it applies."""
    schema = storage.format.schema
    groups = {path[:-1] for path in schema.paths if path[-1] in FLAGS}
    complete = [group for group in groups if all((*group, flag) in schema for flag in FLAGS)]
    for group in sorted(complete):
        done, terminated, truncated = (storage.column((*group, flag))[: len(storage)] for flag in FLAGS)
        wrong = _wide(done != (terminated | truncated)).any(1)
        message = f"{as_key((*group, 'done'))!r} isn't terminated or truncated"
        found.add("flags", message, wrong.nonzero()[:, 0].cpu())
    return "flags" if complete else None


def _pairs(storage: TensorStorage, table: Episodes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield slots of consecutive steps of one trajectory, ``(n,)`` int64 each: a step and the following one."""
    streams, slots_in_all = table.num_streams, table.capacity * table.num_streams
    for start in range(0, len(storage), _CHUNK * streams):
        slots = torch.arange(start, min(start + _CHUNK * streams, len(storage)), device="cpu")
        inner = slots[locate(table, slots)[1] > 1]
        if (masked := storage.masked(inner)) is not None:
            inner = inner[~masked]
        yield inner, (inner + streams) % slots_in_all


def _check_chain(storage: TensorStorage, table: Episodes, found: _Findings) -> list[str]:
    """Check that each step's next observation is the following step's observation."""
    schema = storage.format.schema
    observed = _observed(schema)
    for slots, following in _pairs(storage, table) if observed else ():
        if STEPS in schema:  # the next observation of an n-step row isn't the following step's
            single = _wide(storage.column(STEPS)[slots])[:, 0] == 1
            slots, following = slots[single.cpu()], following[single.cpu()]
        for path in observed:
            message = f"{as_key(path)!r} isn't {as_key(path[1:])!r} of the following step"
            found.add("next observation", message, slots[_differ(storage, path, slots, following)])
    return ["next observation"] if observed else []


def _observed(schema: Schema) -> list[Path]:
    """Return the entries below ``next`` that the following step's root also has."""
    return twins(
        {path: field for path, field in zip(schema.paths, schema.fields, strict=True) if not field.is_list}
    )


def _differ(storage: TensorStorage, path: Path, slots: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return where an entry below ``next`` differs from the following slot's root, ``(n,)`` bool."""
    coming, root = storage.column(path)[slots], storage.column(path[1:])[following]
    return ~same_bits(coming, root, 1).cpu()


def _check_ids(storage: TensorStorage, table: Episodes, found: _Findings) -> list[str]:
    """Check that no id continues after an end, and that each id occurs in one stream."""
    schema = storage.format.schema
    if TRAJ_IDS not in schema:
        return []
    streams = table.num_streams
    first, length = runs_of(table)
    stream = first % streams
    last = ((first // streams + length - 1) % table.capacity) * streams + stream
    ids = storage.column(TRAJ_IDS).view(-1)[last].cpu()
    flags = {flag: torch.zeros(first.shape, dtype=torch.bool, device="cpu") for flag in FLAGS}
    for path in schema.paths:
        if path[0] == "next" and path[-1] in FLAGS:
            flags[path[-1]] |= _wide(storage.column(path)[last]).any(1).cpu()
    ended = flags["done"] | flags["terminated"] | flags["truncated"]
    # Stable, so that the runs of one id stay in the order of time within a stream.
    order = torch.sort(ids, stable=True).indices
    same = (ids[order][1:] == ids[order][:-1]) & (ids[order][1:] >= 0)
    earlier, later = order[:-1][same], order[1:][same]
    apart = stream[earlier] != stream[later]
    found.add("ids", f"an id of {as_key(TRAJ_IDS)!r} occurs in two streams", first[later[apart]])
    again = ended[earlier] & ~apart
    cut, observed = flags["truncated"] & ~flags["terminated"], _observed(schema)
    goes_on = cut[earlier] if observed else torch.zeros_like(again)
    for path in observed:
        goes_on &= ~_differ(storage, path, last[earlier], first[later])
    again &= ~goes_on
    found.add(
        "ids", f"an id of {as_key(TRAJ_IDS)!r} continues after its trajectory ended", first[later[again]]
    )
    return ["ids"]


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor ``(n, ...)`` reshaped to ``(n, values of a row)``."""
    return rows.reshape(rows.shape[0], rows.shape[1:].numel())
