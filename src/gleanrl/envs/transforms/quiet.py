"""What a rollout leaves out in rows in which nothing ends, and what it does there instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gleanrl.block import Block
from gleanrl.envs.transforms.arithmetic import MappedRows, RowArithmetic
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.columns import OpenedColumns
from gleanrl.envs.transforms.counting import Array, Counters, Counting, Values
from gleanrl.envs.transforms.mapping import EntryTransform
from gleanrl.envs.transforms.outputs import Output
from gleanrl.tree import FLAGS, NestedKey, Path, as_path

Steps = Sequence[tuple[Any, bool]]
"""The hooks of transforms; see `Transform.stepping`."""

_SUMMED = "uint8", "int8", "int16", "int32", "int64", "float32", "float64"
"""What the core adds up."""


class Blocks(NamedTuple):
    """What rows are written into.

    Attributes:
        inner: by the base environment.
        outer: the block that is handed out.
        given: the keys that the base environment writes, without ``"next"``.
        required: those that transforms have to write in every row.
        outputs: where what they write goes.
        arithmetic: between these two.
    """

    inner: Block
    outer: Block
    given: Collection[NestedKey]
    required: list[NestedKey]
    outputs: Mapping[NestedKey, Output]
    arithmetic: RowArithmetic


class QuietPart(NamedTuple):
    """How the transforms of a rollout are run.

    Attributes:
        counters: those that are skipped in quiet rows.
        always: the hooks of those that aren't.
        others: the hooks that are run beside in rows that aren't quiet.
        required: what has to be written in quiet rows beside what counters write.
        mapped: does all that is to be done in quiet rows; None if hooks do.
    """

    counters: Counters
    always: Steps
    others: Steps
    required: list[NestedKey]
    mapped: MappedRows | None

    def catch_up(self, t: int, roots: OpenedColumns) -> Values:
        """Do what was skipped before row `t`; return what stands in its root.

        Args:
            t: the row.
            roots: of the block that is handed out.
        """
        values = self.counters.catch_up(t)
        found = {key: roots.row(key, t) for key in (() if self.mapped is None else self.mapped.keys)}
        return values | {key: value for key, value in found.items() if value is not None}


def quiet_part(
    chain: Sequence[Transform], steps: Steps, blocks: Blocks, seen: Collection[NestedKey] | None
) -> QuietPart | None:
    """Return what may be left out in quiet rows, and how; None for nothing.

    Args:
        chain: the transforms that act in steps.
        steps: their hooks.
        blocks: what rows are written into.
        seen: what the policy reads of a root; None for all of it.
    """

    def counters(tail: Tail) -> Counters:
        return Counters(tail.transforms, blocks.outer, blocks.outputs, blocks.given, seen, tail.addends)

    for through in (True, False):
        tail = counting_tail(chain, blocks, seen, through)
        mapped = blocks.arithmetic.of([one for one in chain if one not in tail.transforms])
        if mapped is not None and mapped.keys.union(tail.written()).issuperset(blocks.required):
            return QuietPart(counters(tail), [], steps, [], mapped)
    if not tail.transforms:
        return None
    hooks: dict[bool, list[Any]] = {True: [], False: []}
    for one, step in zip(chain, steps, strict=True):
        hooks[one in tail.transforms].append(step)
    required = [key for key in blocks.required if key not in tail.written()]
    return QuietPart(counters(tail), hooks[False], hooks[True], required, None)


class Tail(NamedTuple):
    """Transforms that may be skipped in quiet rows.

    Attributes:
        transforms: in their order.
        addends: what they add up, by the key of the sums, rows first.
    """

    transforms: list[Counting]
    addends: dict[NestedKey, Array]

    def written(self) -> set[NestedKey]:
        """Return what they write."""
        return {key for one in self.transforms for key in one.written_keys()}


def counting_tail(
    chain: Sequence[Transform], blocks: Blocks, seen: Collection[NestedKey] | None, through: bool = False
) -> Tail:
    """Return the transforms at the end of a chain that may be skipped in quiet rows.

    Args:
        chain: the transforms that act in steps.
        blocks: what rows are written into.
        seen: what the policy reads of a root; None for all of it.
        through: whether transforms of entries may stand behind them; the core has to do all that these do then.
    """
    tail = Tail([], {})
    filled: set[NestedKey] = set()
    later: set[NestedKey] = set()
    mapped: set[NestedKey] = set()
    for position, one in reversed([*enumerate(chain)]):
        if not isinstance(one, Counting):
            if not (through and isinstance(one, EntryTransform)):
                break
            mapped.update(one.written_keys())
            continue
        values = _values_of(one, blocks)
        addends = None if values is None else _addends_of(one, chain[:position], mapped, blocks)
        if (
            values is not None
            and addends is not None
            and filled.isdisjoint(values)
            and not (addends and one.is_seen(seen))
            and later.isdisjoint(in_key for in_key, _ in one.summands())
        ):
            filled |= values
            tail.transforms.insert(0, one)
            tail.addends.update(addends)
        later.update(one.written_keys())
    others = [one for one in chain if one not in tail.transforms]
    used = {key for one in others for key in one.written_keys()}
    used |= {key for one in others if isinstance(one, Counting) for key, _ in one.summands()}
    return tail if used.isdisjoint(tail.written()) else Tail([], {})


def _values_of(one: Counting, blocks: Blocks) -> set[NestedKey] | None:
    """Return what a transform writes, flags aside; None if others write that, too, or it isn't in arrays."""
    written = one.written_keys()
    if not all(as_path(key)[-1] in FLAGS for key in written if key in blocks.given):
        return None
    mine = {key for key in written if key not in blocks.given}
    columns = [path for key in mine for path in (as_path(key), ("next", *as_path(key)))]
    if not all(_is_array(blocks.outer, path) for path in columns):
        return None
    return {key for key in mine if as_path(key)[-1] not in FLAGS}


def _addends_of(
    one: Counting, before: Sequence[Transform], mapped: Collection[NestedKey], blocks: Blocks
) -> dict[NestedKey, Array] | None:
    """Return what a transform adds up, by the key of the sums, rows first; None if the core can't, or it isn't kept.

    Args:
        one: the transform.
        before: those that stand before it.
        mapped: the keys of what is changed behind it: there it adds up what the base environment wrote.
        blocks: what rows are written into.
    """
    found = {}
    for in_key, out_key in one.summands():
        block = blocks.inner if in_key in mapped else blocks.outer
        addend, total = (("next", *as_path(key)) for key in (in_key, out_key))
        if not _is_array(block, addend) or block.schema[addend] != blocks.outer.schema[total]:
            return None
        if in_key in mapped and any(in_key in other.written_keys() for other in before):
            return None  # it's neither what was nor what comes in the end
        array = block.row_arrays(addend)
        if array is None or not (array.strides[0] or len(array) == 1) or array.dtype.name not in _SUMMED:
            return None
        found[out_key] = array
    return found


def _is_array(block: Block, path: Path) -> bool:
    return path in block.schema and block.row_arrays(path) is not None
