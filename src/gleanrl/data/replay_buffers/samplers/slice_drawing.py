"""Slices of consecutive steps of one trajectory: their rule, their draws, and the rows that they may begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch

from gleanrl._arrays.native import Episodes
from gleanrl._arrays.results import Draw
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, key_argument, leaf_at
from gleanrl._state.rng import RandomSource
from gleanrl._util import positive_or_none
from gleanrl.data.replay_buffers.change_log import Change, Follower, Version, same_generations
from gleanrl.data.replay_buffers.samplers.episode_index import EpisodeTable, expanded, later, locate, runs_of
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.data.replay_buffers.samplers.transitions import MOST_TRIES, Unit, check_any_step
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.trajectories import MASK
from gleanrl.errors import BatchSizeError, EmptyBufferError, InvalidArgumentError, InvalidTypeError

IsBlocked: TypeAlias = Callable[[Storage, torch.Tensor, Episodes], torch.Tensor]

_CHUNK = 1 << 14  # time steps that one pass handles, to bound its memory


class BlockedRows(Follower[Storage]):
    """Blocks, in a table of priorities, every row that a unit may not be drawn by.

    Not thread-safe: the buffer calls it under its lock.

    Args:
        table: the trajectories.
        priorities: the table that rows are drawn from.
    """

    def __init__(self, table: EpisodeTable, priorities: PriorityTable) -> None:
        self._table, self._priorities = table, priorities
        self._reach, self._rule = 0, (None, 0)
        self._is_blocked: IsBlocked | None = None

    def update(self, storage: Storage, reach: int, rule: Any, is_blocked: IsBlocked) -> None:
        """Block the rows of `storage` that the unit excludes.

        The table of trajectories and the priorities have to be in sync with `storage`.

        Args:
            storage: storage that units are drawn from.
            reach: the number of steps before and after a write within which blocked rows may change.
            rule: the parameters of `is_blocked`; if they change, all rows are checked again.
            is_blocked: called with the storage, slots ``(n,)`` int64 and the trajectories; returns ``(n,)`` bool.
        """
        self._is_blocked = is_blocked
        now = (rule, self._priorities.renewals)
        if (reach, now) != (self._reach, self._rule):
            self.unfollow()
            self._reach, self._rule = reach, now
        self.sync(storage)

    def _look_at_all(self, storage: Storage) -> None:
        self._find(storage, 0, storage.num_steps)

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        around, streams = self._reach, max(storage.rows_per_step, 1)
        stored, capacity = storage.num_steps, storage.capacity_steps
        for start, stop, _ in changes:
            first, behind = start // streams - around, -(-stop // streams) + around
            if stored < capacity:
                first, behind = max(first, 0), min(behind, stored)
            self._find(storage, first % capacity, min(behind - first, stored))

    def _find(self, storage: Storage, step: int, count: int) -> None:
        """Block or unblock the rows of `count` time steps from `step` on, around the ring."""
        table, native, is_blocked = self._table.of(storage), self._priorities.of(storage), self._is_blocked
        assert is_blocked is not None
        for begin in range(step, step + count, _CHUNK):
            steps = torch.arange(begin, min(begin + _CHUNK, step + count), device="cpu") % table.capacity
            slots = (steps[:, None] * table.num_streams + torch.arange(table.num_streams, device="cpu")).view(
                -1
            )
            blocked = is_blocked(storage, slots, table)
            masked = storage.masked(slots)
            blocked = blocked if masked is None else blocked | masked
            native.block(slots.data_ptr(), slots.shape[0], blocked.data_ptr())


def _are_no_starts(
    length: int, strict: bool, overhang: int, storage: Storage, slots: torch.Tensor, table: Episodes
) -> torch.Tensor:
    """Return which rows aren't first steps of slices, ``(n,)`` bool.

    Args:
        length: steps of a whole slice.
        strict: whether trajectories shorter than a slice offer no first step.
        overhang: steps by which a slice may end after its trajectory.
        storage: the storage of the rows.
        slots: the rows, ``(n,)`` int64.
        table: the trajectories.
    """
    before, after = locate(table, slots)
    total, reach = before + after, max(length - overhang, 1)
    if strict:
        return (after < reach) | (total < length)
    return (after < reach) & ((before > 0) | (total >= reach))


@dataclass(frozen=True)
class SliceRule:
    """How a batch is cut into slices.

    Exactly one of `num_slices` and `slice_len` is given.
    """

    num_slices: int | None
    slice_len: int | None
    strict: bool
    """Whether trajectories shorter than a slice are left out. If False, they are drawn whole."""
    left: int
    """Steps by which a slice may begin before its trajectory; they are cut off. -1 for all but one step."""
    right: int
    """Steps by which a slice may end after its trajectory; they are cut off. -1 for all but one step."""
    pad: bool
    """Whether slices that are cut or short are filled up to their full length."""
    truncated: Path | None
    """Path of the flag of each slice's last step; None for no flag."""
    init: Path | None = None
    """Path of the flag of each slice's first step; None for no flag."""

    @property
    def truncated_key(self) -> NestedKey | None:
        """`truncated` in the form that users give it."""
        return None if self.truncated is None else as_key(self.truncated)

    @cached_property
    def flag_keys(self) -> tuple[NestedKey, NestedKey, NestedKey]:
        """Keys of the truncated flag in batches, and of the done and terminated flags next to it."""
        above = (self.truncated or ("",))[:-1]
        truncated, done, terminated = (
            as_key((*above, name)) for name in ((self.truncated or ("",))[-1], "done", "terminated")
        )
        return truncated, done, terminated

    @property
    def span(self) -> tuple[bool | int, bool | int]:
        """`left` and `right` in the form that users give them."""
        left, right = (value < 0 if value <= 0 else value for value in (self.left, self.right))
        return left, right

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices in a batch and their length.

        Raises:
            BatchSizeError: the batch size isn't a multiple of `slice_len` or `num_slices`.
            InvalidArgumentError: slices are no longer than their overhang.
        """
        divisor = self.slice_len or self.num_slices or 1
        quotient, rest = divmod(batch_size, divisor)
        if rest:
            name = "slice_len" if self.slice_len else "num_slices"
            raise BatchSizeError(f"batch_size={batch_size} isn't a multiple of {name}={divisor}")
        count, length = (quotient, divisor) if self.slice_len else (divisor, quotient)
        if max(self.left, self.right) >= length:
            raise InvalidArgumentError(
                f"span=({self.left}, {self.right}): a slice of {length} steps may overhang by {length - 1} at most"
            )
        return count, length

    def overhang(self, length: int) -> tuple[int, int]:
        """Return how far slices of `length` steps may reach beyond both ends of a trajectory."""
        return (length - 1 if self.left < 0 else self.left), (length - 1 if self.right < 0 else self.right)


class Slices(Unit):
    """Slices of trajectories, cut by a rule.

    In an epoch, the item of a trajectory is its last slot when the epoch began, with that slot's generation. A writer
    overwrites the last slot of a trajectory last.

    Args:
        rule: how a batch is cut.
        table: the trajectories.
    """

    by_generation = True

    def __init__(self, rule: SliceRule, table: EpisodeTable) -> None:
        self.rule, self.table = rule, table
        self._starts: BlockedRows | None = None  # for draws by priority
        # A version of a storage, and a batch size for which a draw succeeded.
        self._drawn: tuple[Version, int] | None = None

    def follow(self, storage: Storage) -> None:
        """Keep trajectories and first steps up to date; a missing column raises at the next draw, not here."""
        if self.table.try_sync(storage) and self._starts is not None:
            self._starts.sync(storage)

    def name(self, length: int) -> str:
        """Return the plural noun for trajectories that slices of `length` steps can be cut from."""
        return f"trajectories of {length} steps"

    def sizes(self, batch_size: int) -> tuple[int, int]:
        """Return the number of slices in a batch and their length."""
        return self.rule.sizes(batch_size)

    def uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        """Draw a trajectory, then its first step, each uniformly.

        Raises:
            EmptyBufferError: no trajectory is long enough. No random number is used up.
            BatchSizeError: see `SliceRule.sizes`. The errors of `EpisodeTable.of` are raised, too.
        """
        request = storage.version, batch_size
        if request == self._drawn:  # this draw can't fail, so it needs no snapshot of the generator
            return self._uniform(storage, batch_size, random)
        random.begin()
        before = random.snapshot()
        try:
            drawn = self._uniform(storage, batch_size, random)
        except EmptyBufferError:
            random.adopt(before)  # a draw that fails uses up no random numbers
            raise
        self._drawn = request
        return drawn

    def _uniform(self, storage: Storage, batch_size: int, random: RandomSource) -> Draw:
        count, length = self.rule.sizes(batch_size)
        table = self.table.of(storage)
        first, lengths = _choose(table, self.rule, length, random.uniforms(2 * count))
        tries = 0
        while (masked := storage.masked(first)) is not None and masked.any():
            if tries == MOST_TRIES:
                check_any_step(storage)
            again = _choose(table, self.rule, length, random.uniforms(2 * int(masked.sum())))
            first[masked], lengths[masked] = again
            tries += 1
        return cut(table, self.rule, length, first, lengths)

    def again(self, storage: Storage, draw: Draw, stale: torch.Tensor, random: RandomSource) -> Draw:
        """Draw all slices again: slices are drawn as wholes."""
        assert draw.asked is not None
        return self.uniform(storage, draw.asked, random)

    def weighted(
        self,
        storage: Storage,
        batch_size: int,
        priorities: PriorityTable,
        random: RandomSource,
        served: bool = False,
    ) -> Draw:
        """Draw slices by the priorities of their first steps; see `uniform` for errors."""
        count, length = self.rule.sizes(batch_size)
        table, native = self.table.of(storage), priorities.of(storage)
        if self._starts is None:
            self._starts = BlockedRows(self.table, priorities)
        rule = length, self.rule.strict, self.rule.overhang(length)[1]
        self._starts.update(storage, length, rule, partial(_are_no_starts, *rule))
        if not native.total > 0.0 and not table.num_runs(length if self.rule.strict else 1):
            raise self.none_left(length)
        first, weight, _ = priorities.draw(storage, count, random.for_core(count))
        lengths = locate(table, first)[1].clamp_(max=length)
        drawn = cut(table, self.rule, length, first, lengths)
        weight = weight.repeat_interleave(length if self.rule.pad else lengths)
        extras = {**drawn.extras, "_weight": weight, "priority_weight": weight}
        drawn = drawn._replace(extras=extras)
        return priorities.remember(storage, drawn) if served else drawn

    def items(self, storage: Storage, length: int) -> torch.Tensor:
        """Return the last slots of all trajectories that are long enough."""
        table = self.table.of(storage)
        first, lengths = runs_of(table, length if self.rule.strict else 1)
        tails = later(table, first, lengths - 1)
        masked = storage.masked(tails)
        return tails if masked is None else tails[~masked]

    def living(
        self, storage: Storage, items: torch.Tensor, generations: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Return which trajectories are still stored and long enough."""
        assert generations is not None
        alive = same_generations(storage.generation(items), generations)
        if self.rule.strict and items.shape[0]:
            before, after = locate(self.table.of(storage), items)
            alive &= before + after >= length
        return alive

    def serve(
        self, storage: Storage, items: torch.Tensor, batch_size: int, length: int, random: RandomSource
    ) -> Draw:
        """Return one slice of each trajectory, its first step drawn uniformly."""
        table = self.table.of(storage)
        before, after = locate(table, items)
        lengths = before + after
        spare = (lengths - length).clamp_(min=0)
        offset = (random.uniforms(items.shape[0]) * (spare + 1)).long().minimum(spare)
        first = later(table, items, offset - before)
        return cut(table, self.rule, length, first, lengths.clamp(max=length))._replace(asked=batch_size)

    def is_unbroken(self, storage: Storage, draw: Draw) -> bool:
        """Return whether no trajectory ends before the last step of a slice, by the ends and ids stored now."""
        if draw.last is None:
            return True
        inner = ~draw.last
        if MASK in draw.extras:  # masked rows are copies of last steps
            inner &= draw.extras[MASK]
        if self.table.holds(storage, draw.slots, inner):
            return True
        # `holds` has made the table read the whole storage again, so data derived from the table is stale, too.
        self._drawn = None
        if self._starts is not None:
            self._starts.unfollow()
        return False

    def annotate(self, draw: Draw, records: Any) -> Mapping[NestedKey, torch.Tensor]:
        """Return the marks of a batch (see `marks`), and the stored ``terminated`` (False if it isn't stored)."""
        path = self.rule.truncated
        if path is None and self.rule.init is None:
            return draw.extras
        extras = self.marks(draw, records)
        if path is not None and draw.last is not None:
            truncated_key, _, key = self.rule.flag_keys
            terminated = _flag(records, (*path[:-1], "terminated"))
            extras[key] = torch.zeros_like(extras[truncated_key]) if terminated is None else terminated
        return {**extras, **draw.extras} if draw.extras else extras

    def marks(self, draw: Draw, records: Any) -> dict[NestedKey, torch.Tensor]:
        """Return the flags that show where slices end: the last step of each is truncated, and therefore done.

        Slices of different trajectories are adjacent in a batch. Without these flags, returns and recurrent states
        would run from one slice into the next. If the rule asks for them, the flags of first steps and the mask of
        copies are included. A flag that is stored as a number remains a number.
        """
        path, last = self.rule.truncated, draw.last
        if last is None:
            return {}
        marks: dict[NestedKey, torch.Tensor] = {}
        if MASK in draw.extras:
            marks[MASK] = draw.extras[MASK]
        if self.rule.init is not None:
            marks[as_key(self.rule.init)] = _beginnings(last, draw.extras, records, self.rule.init)
        if path is None:
            return marks
        truncated, done = _flag(records, path), _flag(records, (*path[:-1], "done"))
        if truncated is not None:
            cut_off = _set_at(truncated, last)
        else:
            # A flag that isn't stored gets the shape of its neighbours, so that all flags of a batch have one shape.
            like = _flag(records, (*path[:-1], "terminated")) if done is None else done
            cut_off = (
                last[:, None].clone() if like is None else _spread(last, like).expand(like.shape).clone()
            )
        key, done_key, _ = self.rule.flag_keys
        marks[key], marks[done_key] = cut_off, cut_off if done is None else _set_at(done, last)
        return marks

    def annotated_paths(self, storage: Storage) -> tuple[Path, ...]:
        """Return the columns of the stored flags."""
        path, init = self.rule.truncated, self.rule.init
        if not isinstance(storage, TensorStorage):
            return ()
        names = () if path is None else (path, (*path[:-1], "done"), (*path[:-1], "terminated"))
        schema = storage.format.schema
        return tuple(p for p in (*names, *(() if init is None else (init,))) if p in schema)

    def none_left(self, length: int) -> EmptyBufferError:
        """Return the error for a storage without a trajectory that is long enough."""
        return no_slices(length)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: without the first steps, which the copy finds again."""
        return {**self.__dict__, "_starts": None}


def slice_rule(
    num_slices: Any,
    slice_len: Any,
    strict: bool,
    span: Any,
    pad: bool,
    truncated_key: NestedKey | None,
    init_key: NestedKey | None = None,
) -> SliceRule:
    """Check a user's options and return their rule.

    Raises:
        InvalidTypeError: not exactly one of `num_slices` and `slice_len` is given.
        InvalidArgumentError: a value is out of range.
    """
    if (num_slices is None) == (slice_len is None):
        raise InvalidTypeError(
            f"expected exactly one of num_slices and slice_len, got num_slices={num_slices!r}, "
            f"slice_len={slice_len!r}"
        )
    num_slices = positive_or_none("num_slices", num_slices)
    slice_len = positive_or_none("slice_len", slice_len)
    both = span if isinstance(span, (tuple, list)) else (span, span)
    if len(both) != 2:
        raise InvalidArgumentError(f"span: expected one value or (left, right), got {span!r}")
    left, right = (_overhang(value, slice_len) for value in both)
    truncated = None if truncated_key is None else key_argument("truncated_key", truncated_key)
    init = None if init_key is None else key_argument("init_key", init_key)
    return SliceRule(num_slices, slice_len, bool(strict), left, right, bool(pad), truncated, init)


def _overhang(value: Any, slice_len: int | None) -> int:
    if isinstance(value, bool):
        return -1 if value else 0
    if not isinstance(value, int) or value < 0 or (slice_len is not None and value >= slice_len):
        raise InvalidArgumentError(
            f"span: expected True, False or an integer of 0 or more below the length of a slice, got {value!r}"
        )
    return value


def _choose(
    table: Episodes, rule: SliceRule, length: int, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first slots and the lengths of slices, ``(n,)`` int64 each; each slice takes two uniforms."""
    count = uniforms.shape[0] // 2
    first = torch.empty(count, dtype=torch.int64, device="cpu")
    lengths = torch.empty(count, dtype=torch.int64, device="cpu")
    left, right = rule.overhang(length)
    first_at, lengths_at = first.data_ptr(), lengths.data_ptr()
    try:
        table.draw(length, count, uniforms.data_ptr(), first_at, lengths_at, rule.strict, left, right)
    except RuntimeError as cause:
        raise no_slices(length) from cause
    return first, lengths


def no_slices(length: int) -> EmptyBufferError:
    """Return the error for a storage without a trajectory that is long enough."""
    return EmptyBufferError(
        f"can't sample: no trajectory of {length} steps is stored; use shorter slices, or strict_length=False"
    )


def cut(table: Episodes, rule: SliceRule, length: int, first: torch.Tensor, lengths: torch.Tensor) -> Draw:
    """Return the rows of slices with the given first slots and lengths, ``(n,)`` int64 each."""
    count = first.shape[0]
    slots, last = expanded(table, first, lengths, length if rule.pad else 0)
    extras: dict[NestedKey, torch.Tensor] = {}
    if rule.pad:
        extras[MASK] = (torch.arange(length, device="cpu") < lengths[:, None]).view(-1)
    return Draw(slots, extras, last=last, asked=count * length)


def _flag(records: Any, path: Path) -> torch.Tensor | None:
    while isinstance(records, dict) and path:
        records, path = records.get(path[0]), path[1:]
    flag = leaf_at(records, path)
    return None if flag is None or flag.dtype.is_complex else flag


def _set_at(flag: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Return a flag ``(n, ...)`` of bools or numbers that is also set where `marks`, ``(n,)``, is True."""
    spread = _spread(marks, flag)
    return flag | spread if flag.dtype == torch.bool else flag.masked_fill(spread, 1)


def _beginnings(
    last: torch.Tensor, extras: Mapping[NestedKey, torch.Tensor], records: Any, path: Path
) -> torch.Tensor:
    """Return the stored flags at `path`, also set at the first step of each slice, but not at copies of last steps."""
    first = torch.ones_like(last)
    first[1:] = last[:-1]
    if MASK in extras:
        mask = extras[MASK]
        first[1:] |= ~mask[:-1]
        first &= mask
    stored = _flag(records, path)
    return first[:, None] if stored is None else _set_at(stored, first)


def _spread(last: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one mark for each row, ``(n,)``, in a shape that broadcasts with ``(n, ...)`` flags."""
    marks = last if like.is_cpu else last.to(like.device)
    return marks.view(-1, *[1] * (like.ndim - 1))
