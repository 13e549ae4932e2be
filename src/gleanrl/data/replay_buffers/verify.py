"""An audit that checks whether stored records are consistent with each other, as steps of a rollout must be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gleanrl._arrays.native import Episodes
from gleanrl._arrays.results import html_parts, parts_text
from gleanrl._arrays.tensordicts import FLAGS, as_key
from gleanrl.data.replay_buffers.describe import (
    column_statistics,
    end_flags,
    linked_runs,
    observed_twice,
    wide,
)
from gleanrl.data.replay_buffers.samplers.episode_index import (
    BoundaryKeys,
    EpisodeTable,
    later,
    locate,
    runs_of,
)
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.lists import ListStorage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.trajectories import STEPS, TRAJ_IDS, same_bits
from gleanrl.errors import MissingKeyError, SchemaError

_CHUNK = 1 << 16  # time steps checked at once


class AuditProblem(NamedTuple):
    """One kind of problem, with the first slot that has it."""

    rule: str
    """The rule, as `audit` lists them, for example ``"flags"``."""
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
    warnings: tuple[AuditProblem, ...] = ()
    """Values that may be right, but often show a mistake: constant columns, and values that aren't finite."""

    @property
    def ok(self) -> bool:
        """Whether there are no problems. Warnings don't count."""
        return not self.problems

    def _parts(self) -> dict[str, object]:
        parts = self._asdict()
        return parts if self.warnings else {name: parts[name] for name in self._fields[:-1]}

    def __repr__(self) -> str:
        """Return the fields, one on a line, and the warnings if there are any."""
        return parts_text("AuditReport", self._parts())

    def _repr_html_(self) -> str:
        return html_parts("AuditReport", self._parts())


def audit(storage: Storage, sampled: EpisodeTable | None = None) -> AuditReport:
    """Check every stored record, without changing any. Trajectories end by the keys of `sampled`, a sampler's table.

    - schema: columns have the shapes and dtypes of the first write.
    - generations: every stored row was written.
    - flags: ``done`` is ``terminated`` or ``truncated``, where all three are stored.
    - next observation: within a trajectory, an entry below ``next`` equals the following step's root, bit for bit. Rows
      of n-step data that look further ahead are skipped.
    - ids: no trajectory id continues after an end or occurs in two streams. A truncation isn't an end if the following
      step continues from its next observation (``set_truncated=True`` of a collector).

    - not finite: no ``action`` and no ``reward`` holds a NaN or an infinity. In other entries it is a warning.
    - constant column: a warning if all rows of an entry are equal, except for bools and entries below ``collector``.

    Rows where ``("collector", "mask")`` is False are padding and aren't compared. Storages other than tensor storages
    are checked by "schema", "generations" and the two rules on values. "next observation" and "ids" need records in
    order, and entries that tell where trajectories end.

    Cost: one or two passes over the stored records.

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
    found, warned = _Findings(), _Findings()
    trajectories = None
    if isinstance(storage, TensorStorage) and len(storage):
        # A copy reads all records again, and so notices flags that were changed through views.
        boundaries = EpisodeTable(BoundaryKeys()) if sampled is None else copy.copy(sampled)
        trajectories = _check_steps(storage, boundaries, checks, found)
    if not problems:
        checks += _check_values(storage, found, warned)
    return AuditReport(
        len(storage), trajectories, tuple(checks), (*problems, *found.problems()), warned.problems()
    )


def _check_steps(
    storage: TensorStorage, boundaries: EpisodeTable, checks: list[str], found: _Findings
) -> int | None:
    """Check the rules that compare rows, and return the number of trajectories; None if it isn't known."""
    if flags := _check_flags(storage, found):
        checks.append(flags)
    try:
        table = boundaries.of(storage) if storage.ordered else None
    except (MissingKeyError, SchemaError):
        table = None
    if table is None:
        return None
    checks += [*_check_chain(storage, table, found), *_check_ids(storage, table, found)]
    return table.num_runs(1)


def _check_values(storage: Storage, found: _Findings, warned: _Findings) -> list[str]:
    """Check that values are finite and that columns aren't constant; return the names of the rules that applied."""
    checks = dict[str, None]()
    for path, column in column_statistics(storage).items():
        if column.dtype is None or column.dtype.is_floating_point or column.dtype.is_complex:
            checks["not finite"] = None
        if column.first_nonfinite is not None:
            kind = found if path[-1] in ("action", "reward") else warned
            message = f"{as_key(path)!r} has a NaN or an infinite value"
            kind.count("not finite", message, column.nonfinite_rows, column.first_nonfinite)
        if column.dtype != torch.bool and path[0] != "collector":
            checks["constant column"] = None
            if column.constant:
                warned.count("constant column", f"{as_key(path)!r} is equal in all rows", column.rows, 0)
    return [*checks]


class _Findings:
    """Problems, counted by kind."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, rule: str, message: str, slots: torch.Tensor) -> None:
        """Record the rows `slots`, ``(n,)`` int64, as violations of a rule."""
        if slots.shape[0]:
            self.count(rule, message, slots.shape[0], int(slots[0]))

    def count(self, rule: str, message: str, rows: int, slot: int) -> None:
        """Record a number of rows, of which `slot` is the first, as violations of a rule."""
        count, first = self._found.get((rule, message), (0, slot))
        self._found[rule, message] = count + rows, first

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
    never = _Findings()
    for start in range(0, len(storage), _CHUNK):  # one large vector of slots would take longer to fill
        slots = torch.arange(start, min(start + _CHUNK, len(storage)), device="cpu")
        never.add("generations", "stored rows that were never written", slots[storage.generation(slots) < 1])
    return [*never.problems()]


def _check_flags(storage: TensorStorage, found: _Findings) -> str | None:
    """Check that done equals terminated or truncated; return the rule's name if it applies."""
    schema = storage.format.schema
    groups = {path[:-1] for path in schema.paths if path[-1] in FLAGS}
    complete = [group for group in groups if all((*group, flag) in schema for flag in FLAGS)]
    for group in sorted(complete):
        done, terminated, truncated = (storage.column((*group, flag))[: len(storage)] for flag in FLAGS)
        wrong = wide(done != (terminated | truncated)).any(1)
        message = f"{as_key((*group, 'done'))!r} isn't terminated or truncated"
        found.add("flags", message, wrong.nonzero()[:, 0].cpu())
    return "flags" if complete else None


def _spans(storage: TensorStorage, table: Episodes) -> Iterator[tuple[slice, slice]]:
    """Yield the slots of adjacent steps, as ranges of one length: the earlier steps and the following ones."""
    streams, count = table.num_streams, len(storage)
    for start in range(0, count - streams, _CHUNK * streams):
        stop = min(start + _CHUNK * streams, count - streams)
        yield slice(start, stop), slice(start + streams, stop + streams)
    if count == table.capacity * streams:  # the ring is full, so its last step can precede its first one
        yield slice(count - streams, count), slice(0, streams)


def _check_chain(storage: TensorStorage, table: Episodes, found: _Findings) -> list[str]:
    """Check that each step's next observation is the following step's observation."""
    schema = storage.format.schema
    observed = observed_twice(schema)
    for span, following in _spans(storage, table) if observed else ():
        for path in observed:
            same = same_bits(storage.column(path)[span], storage.column(path[1:])[following], 1)
            slots = (~same).nonzero()[:, 0].cpu() + span.start
            # Only these are looked up: most rows are right, so a comparison of ranges is fast.
            slots = slots[locate(table, slots)[1] > 1]
            if (masked := storage.masked(slots)) is not None:
                slots = slots[~masked]
            if STEPS in schema:  # the next observation of an n-step row isn't the following step's
                slots = slots[(wide(storage.column(STEPS)[slots])[:, 0] == 1).cpu()]
            message = f"{as_key(path)!r} isn't {as_key(path[1:])!r} of the following step"
            found.add("next observation", message, slots)
    return ["next observation"] if observed else []


def _check_ids(storage: TensorStorage, table: Episodes, found: _Findings) -> list[str]:
    """Check that no id continues after an end, and that each id occurs in one stream."""
    schema = storage.format.schema
    if TRAJ_IDS not in schema:
        return []
    first, length = runs_of(table)
    last, stream = later(table, first, length - 1), first % table.num_streams
    links = linked_runs(storage, first, last, end_flags(storage, last))
    apart = stream[links.earlier] != stream[links.later]
    found.add("ids", f"an id of {as_key(TRAJ_IDS)!r} occurs in two streams", first[links.later[apart]])
    again = links.ended & ~apart & ~links.continued
    found.add(
        "ids",
        f"an id of {as_key(TRAJ_IDS)!r} continues after its trajectory ended",
        first[links.later[again]],
    )
    return ["ids"]
