"""What a rollout leaves out in rows in which nothing ends, and what it does there instead.

Transforms that are arithmetic on entries: in rows of few values the core does it, without a tensor in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import RowMaps
from gleanrl._arrays.tensordicts import FLAGS, NestedKey, as_key, as_path
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.counting import Array, Counters, Counting, Skippable, Values
from gleanrl.envs.transforms.entrywise import CONVERSIONS, EntryTransform, Operation
from gleanrl.envs.transforms.row_columns import DoneFlags, OpenedColumns, Output
from gleanrl.envs.transforms.row_view import Row

_MOST_VALUES = 1024  # of a row: torch has kernels for more
_DTYPES = {name: dtype for dtype, name in CONVERSIONS.items()}


class _Mapped(NamedTuple):
    """What becomes of a column of the base environment's.

    Attributes:
        source: its rows, ``(T, *batch, *leaf)``.
        dtype: of what comes out.
        operations: what is done, in order.
    """

    source: Array
    dtype: torch.dtype
    operations: tuple[Operation, ...] = ()

    def after(self, operations: Sequence[Operation]) -> _Mapped:
        """Return what becomes of it where more is done."""
        dtype = self.dtype
        for operation in operations:
            dtype = _DTYPES.get(operation.name, dtype)
        return _Mapped(self.source, dtype, (*self.operations, *operations))

    def mark(self) -> tuple[Any, ...]:
        """Return what differs where numbers stand elsewhere or have another form, or other operations are done."""
        places = [(name, id(tensors), key) for name, tensors, key in self.operations]
        return id(self.source), *places, *map(_form_of, self.numbers())

    def numbers(self) -> list[torch.Tensor | None]:
        """Return the tensors of the operations."""
        return [operation.numbers for operation in self.operations]


Maps = dict[NestedKey, _Mapped]
"""What becomes of which column, by the key where it stands in the end."""


class MappedRows(NamedTuple):
    """Does in a row what some transforms would do there.

    Attributes:
        keys: what is written.
        run: called with `t`, writes row `t` and the root behind it; or returns False, and does nothing, if numbers
            have another form now.
    """

    keys: frozenset[NestedKey]
    run: Callable[[int], bool]


class RowArithmetic:
    """Between what a base environment writes and the block that is handed out.

    Args:
        inner: what the base environment writes into: a column that a transform writes may be a single row there.
        outer: the block that is handed out.
    """

    def __init__(self, inner: Block, outer: Block) -> None:
        self._inner, self._outer = inner, outer
        self._known: tuple[Any, MappedRows | None] | None = None

    def of(self, chain: Sequence[Transform]) -> MappedRows | None:
        """Return what does all that some transforms do in a row.

        Args:
            chain: the transforms, in order; no classes of users', which may do anything.

        Returns:
            None if that is more than arithmetic; or if rows are large, or not those of the columns that get them.
        """
        maps = self._maps_of(chain)
        if maps is None:
            return None
        mark = tuple((key, *mapped.mark()) for key, mapped in maps.items())
        if self._known is None or self._known[0] != mark:
            self._known = mark, self._made(maps)
        return self._known[1]

    def _maps_of(self, chain: Sequence[Transform]) -> Maps | None:
        maps: Maps = {}
        for one in chain:
            if not isinstance(one, EntryTransform) or "_apply_transform" in vars(one):
                return None
            for in_key, out_key in one.pairs():
                before = maps.get(in_key) or self._source(in_key)
                operations = None if before is None else one.arithmetic(before.dtype)
                if before is None or operations is None:
                    return None
                maps[out_key] = before.after(operations)
        return maps

    def _source(self, key: NestedKey) -> _Mapped | None:
        path = ("next", *as_path(key))
        array = self._inner.row_arrays(path)
        if array is None or self._inner.schema[path].dtype not in CONVERSIONS:
            return None
        return _Mapped(array, self._inner.schema[path].dtype)

    def _made(self, maps: Maps) -> MappedRows | None:
        if not all(self._fits(key, mapped) for key, mapped in maps.items()):
            return None
        rows = [self._arrays(*item) for item in maps.items()]
        return MappedRows(frozenset(maps), RowMaps(EXCHANGE, torch.Tensor, rows).run)

    def _fits(self, key: NestedKey, mapped: _Mapped) -> bool:
        """Return whether a map's results are what the columns at a key hold, and its numbers fit the rows."""
        after, shape = ("next", *as_path(key)), mapped.source.shape
        columns = [path for path in (after, as_path(key)) if path in self._outer.schema]
        arrays = [self._outer.row_arrays(path) for path in columns]
        return (
            after in columns
            and mapped.source[0].size <= _MOST_VALUES
            and all(array is not None and array.shape == shape for array in arrays)
            and all(self._outer.schema[path].dtype is mapped.dtype for path in columns)
            and all(_is_readable(one, shape[1:]) for one in mapped.numbers() if one is not None)
        )

    def _arrays(self, key: NestedKey, mapped: _Mapped) -> tuple[Any, ...]:
        """Return what `RowMaps` takes."""
        path = as_path(key)
        after, root = self._outer.row_arrays(("next", *path)), self._outer.row_arrays(path)
        return mapped.source, after, root, [tuple(operation) for operation in mapped.operations]


def _form_of(numbers: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Return what may be another one although a tensor stands where it stood."""
    if numbers is None or numbers.layout is not torch.strided:
        return None
    return type(numbers), numbers.shape, numbers.stride(), numbers.device, numbers.is_neg()


def _is_readable(numbers: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the core can read a tensor for each value of a row: it's on the CPU, as it is, and no larger."""
    if EXCHANGE is None or type(numbers) is not torch.Tensor or numbers.layout is not torch.strided:
        return False
    if not numbers.is_cpu or numbers.is_neg() or not numbers.numel() or numbers.ndim > len(shape):
        return False
    sizes = zip(reversed(numbers.shape), reversed(shape), strict=False)
    return all(size in (1, whole) for size, whole in sizes)


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


class RowSkippingPlan(NamedTuple):
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
) -> RowSkippingPlan | None:
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
        return RowSkippingPlan(counters, mapped, [], steps, [])
    hooks: dict[bool, list[Any]] = {True: [], False: []}
    for one, step in zip(chain, steps, strict=True):
        hooks[one in skipped.transforms].append(step)
    required = [key for key in rows.required if key not in skipped.written()]
    return RowSkippingPlan(counters, None, hooks[False], hooks[True], required)


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
