"""What a rollout leaves out in rows in which nothing ends, and what it does there instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gleanrl.block import Block
from gleanrl.envs.transforms.arithmetic import MappedRows, RowArithmetic
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.columns import DoneFlags, OpenedColumns
from gleanrl.envs.transforms.counting import Array, Counters, Counting, Skippable, Values
from gleanrl.envs.transforms.mapping import EntryTransform
from gleanrl.envs.transforms.outputs import Output
from gleanrl.envs.transforms.rows import Row
from gleanrl.tree import FLAGS, NestedKey, as_key, as_path

Steps = Sequence[tuple[Any, bool]]
"""The hooks of transforms; see `Transform.stepping`."""

_SUMMED = "uint8", "int8", "int16", "int32", "int64", "float32", "float64"
"""What the core adds up."""


def run_steps(steps: Steps, root: Row, outcome: Row) -> None:
    """Run the hooks of transforms on a step."""
    for run, takes_root in steps:
        if takes_root:
            run(root, outcome)
        else:
            run(outcome)


class Destinations:
    """What the rows of a rollout are written into.

    Args:
        inner: by the base environment.
        outer: the block that is handed out.
        required: the keys that transforms have to write in every row.
        outputs: where what they write goes, by key.

    Attributes:
        given: the keys that the base environment writes, without ``"next"``.
        arithmetic: from the inner block to the outer one.
    """

    def __init__(
        self, inner: Block, outer: Block, required: list[NestedKey], outputs: Mapping[NestedKey, Output]
    ) -> None:
        self.inner, self.outer, self.required, self.outputs = inner, outer, required, outputs
        self.given = {as_key(path[1:]) for path in inner.schema.paths if path[0] == "next"}
        self.arithmetic = RowArithmetic(inner, outer)


class QuietPlan(NamedTuple):
    """How the transforms of a rollout are run.

    Attributes:
        counters: those that are skipped in quiet rows.
        mapped: does all the others do in quiet rows; None if hooks do.
        in_every_row: the hooks of those others; none where it's `mapped`.
        in_other_rows: the hooks that are run, after these, in rows that aren't quiet; all of the chain's where it's
            `mapped`.
        required: what has to be written in quiet rows beside what counters write; nothing where it's `mapped`.
    """

    counters: Counters
    mapped: MappedRows | None
    in_every_row: Steps
    in_other_rows: Steps
    required: list[NestedKey]

    def is_quiet(self, t: int, done: DoneFlags) -> bool:
        """Return whether nothing has ended in row `t`, nor counters end anything there."""
        return t < self.counters.until and not done.any(t)

    def catch_up(self, t: int, roots: OpenedColumns) -> Values:
        """Do what was skipped before row `t`; return what stands in its root.

        Args:
            t: the row.
            roots: of the block that is handed out.
        """
        keys = () if self.mapped is None else self.mapped.keys
        mapped = {key: value for key in keys if (value := roots.row(key, t)) is not None}
        return self.counters.catch_up(t) | mapped


def quiet_plan(
    chain: Sequence[Transform], steps: Steps, rows: Destinations, seen: Collection[NestedKey] | None
) -> QuietPlan | None:
    """Return how transforms are run where that depends on whether a row is quiet; None if it doesn't.

    Args:
        chain: the transforms that act in steps, all of them this library's.
        steps: their hooks.
        rows: what is written.
        seen: what the policy reads of a root; None for all of it.
    """
    skipped = skippable(chain, rows, seen, past_entries=True)
    mapped = rows.arithmetic.of([one for one in chain if one not in skipped.transforms])
    if mapped is None or not mapped.keys.union(skipped.written()).issuperset(rows.required):
        mapped, skipped = None, skippable(chain, rows, seen, past_entries=False)
        if not skipped.transforms:
            return None
    counters = Counters(skipped, rows.outer, rows.outputs, rows.given, seen)
    if mapped is not None:
        return QuietPlan(counters, mapped, [], steps, [])
    hooks: dict[bool, list[Any]] = {True: [], False: []}
    for one, step in zip(chain, steps, strict=True):
        hooks[one in skipped.transforms].append(step)
    required = [key for key in rows.required if key not in skipped.written()]
    return QuietPlan(counters, None, hooks[False], hooks[True], required)


def skippable(
    chain: Sequence[Transform],
    rows: Destinations,
    seen: Collection[NestedKey] | None,
    past_entries: bool,
) -> Skippable:
    """Return the counting transforms at the end of a chain that may be skipped in quiet rows.

    Args:
        chain: the transforms that act in steps.
        rows: what is written.
        seen: what the policy reads of a root; None for all of it.
        past_entries: whether transforms of entries may stand behind them; the core has to do all that these do then.
    """
    found = Skippable([], {})
    # What stands behind the transform that is looked at: keys that counting transforms write, those among them that are
    # found write, flags aside, and keys that transforms of entries change.
    counted: set[NestedKey] = set()
    filled: set[NestedKey] = set()
    changed: set[NestedKey] = set()
    for position, one in reversed([*enumerate(chain)]):
        if not isinstance(one, Counting):
            if not (past_entries and isinstance(one, EntryTransform)):
                break
            changed.update(one.written_keys())
            continue
        values = _values_of(one, rows)
        addends = None if values is None else _addends_of(one, chain[:position], changed, rows)
        if (
            values is not None
            and addends is not None
            and filled.isdisjoint(values)
            and not (addends and one.is_seen(seen))  # sums can't be written ahead
            and counted.isdisjoint(in_key for in_key, _ in one.summands())  # not what stood there in its turn
        ):
            filled |= values
            found.transforms.insert(0, one)
            found.addends.update(addends)
        counted.update(one.written_keys())
    others = [one for one in chain if one not in found.transforms]
    used = {key for one in others for key in one.written_keys()}
    used |= {key for one in others if isinstance(one, Counting) for key, _ in one.summands()}
    return found if used.isdisjoint(found.written()) else Skippable([], {})


def _values_of(one: Counting, rows: Destinations) -> set[NestedKey] | None:
    """Return what a transform writes, flags aside; None if others write that, too, or it isn't in arrays."""
    written = one.written_keys()
    if not all(as_path(key)[-1] in FLAGS for key in written if key in rows.given):
        return None
    mine = {key for key in written if key not in rows.given}
    columns = [path for key in mine for path in (as_path(key), ("next", *as_path(key)))]
    if any(rows.outer.row_arrays(path) is None for path in columns):
        return None
    return {key for key in mine if as_path(key)[-1] not in FLAGS}


def _addends_of(
    one: Counting, before: Sequence[Transform], changed: Collection[NestedKey], rows: Destinations
) -> dict[NestedKey, Array] | None:
    """Return what a transform adds up, by the key of the sums; None if the core can't, or it isn't kept.

    Args:
        one: the transform.
        before: those that stand before it.
        changed: the keys of what is changed behind it: there it adds up what the base environment wrote.
        rows: what is written.
    """
    found = {}
    for in_key, out_key in one.summands():
        addend, total = (("next", *as_path(key)) for key in (in_key, out_key))
        if in_key in changed and any(in_key in other.written_keys() for other in before):
            return None  # it's neither what was nor what comes in the end
        block = rows.inner if in_key in changed else rows.outer
        array = block.row_arrays(addend)
        if (
            array is None
            or array.dtype.name not in _SUMMED
            or block.schema[addend] != rows.outer.schema[total]
        ):
            return None
        if not array.strides[0]:  # a spare row, whose values are gone
            return None
        found[out_key] = array
    return found
