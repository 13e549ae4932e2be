"""Chooses which transforms a rollout skips in skippable rows, and which ones the native core runs.

A row is skippable if no flag is set in it. Counting transforms are skipped there, and write many rows at once later.
The core computes transforms that are arithmetic on small rows, without torch.
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

_MOST_VALUES = 1024  # values in a row: for larger rows torch's kernels are faster
_DTYPES = {name: dtype for dtype, name in CONVERSIONS.items()}


class _Mapped(NamedTuple):
    """A column of the base environment with the operations that transforms apply to its rows.

    Attributes:
        source: the column, ``(T, *batch, *leaf)``.
        dtype: dtype of the result.
        operations: the operations, in order.
    """

    source: Array
    dtype: torch.dtype
    operations: tuple[Operation, ...] = ()

    def after(self, operations: Sequence[Operation]) -> _Mapped:
        """Return the same column with more operations."""
        dtype = self.dtype
        for operation in operations:
            dtype = _DTYPES.get(operation.name, dtype)
        return _Mapped(self.source, dtype, (*self.operations, *operations))

    def mark(self) -> tuple[Any, ...]:
        """Return a value to compare: it differs if the column, an operation, or the form of an operand differs."""
        places = [(name, id(tensors), key) for name, tensors, key in self.operations]
        return id(self.source), *places, *map(_form_of, self.numbers())

    def numbers(self) -> list[torch.Tensor | None]:
        """Return the current operands of the operations; None for conversions."""
        return [operation.numbers for operation in self.operations]


Maps = dict[NestedKey, _Mapped]
"""The mapped columns by the key of the result."""


class MappedRows(NamedTuple):
    """Runs some transforms on a row in the native core.

    Attributes:
        keys: the keys that it writes.
        run: called with `t`, writes the outcome of row `t` and the following root. It writes nothing and returns False
            if an operand has another form now.
    """

    keys: frozenset[NestedKey]
    run: Callable[[int], bool]


class RowArithmetic:
    """Compiles transforms that are arithmetic to `MappedRows`, from the inner to the outer block.

    Args:
        inner: the base environment's block; a column that a transform writes may be a single row there.
        outer: the block that the user gets.
    """

    def __init__(self, inner: Block, outer: Block) -> None:
        self._inner, self._outer = inner, outer
        self._known: tuple[Any, MappedRows | None] | None = None

    def mapped_rows(self, chain: Sequence[Transform]) -> MappedRows | None:
        """Return `MappedRows` that equal the transforms in `chain`, bit for bit.

        The last result is cached, and used again while columns, operations and operands keep their form.

        Args:
            chain: the transforms in order; none of a user's class, which may do anything.

        Returns:
            None if a transform isn't arithmetic, rows are large, the results don't fit the columns, or the core can't
            read an operand.
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
        """Return whether the results fit the outer columns at `key`, and the core can read the operands."""
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
        """Return the arguments of `RowMaps` for one key: source, outcome column, root column, operations."""
        path = as_path(key)
        after, root = self._outer.row_arrays(("next", *path)), self._outer.row_arrays(path)
        return mapped.source, after, root, [tuple(operation) for operation in mapped.operations]


def _form_of(numbers: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Return the properties that may change while a tensor stays the same object.

    These are type, shape, strides, device and negation. None without an operand, or if it isn't strided.
    """
    if numbers is None or numbers.layout is not torch.strided:
        return None
    return type(numbers), numbers.shape, numbers.stride(), numbers.device, numbers.is_neg()


def _is_readable(numbers: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the core can read an operand: a plain CPU tensor that broadcasts with a row of `shape`."""
    if EXCHANGE is None or type(numbers) is not torch.Tensor or numbers.layout is not torch.strided:
        return False
    if not numbers.is_cpu or numbers.is_neg() or not numbers.numel() or numbers.ndim > len(shape):
        return False
    sizes = zip(reversed(numbers.shape), reversed(shape), strict=False)
    return all(size in (1, full) for size, full in sizes)


Steps = Sequence[tuple[Any, bool]]
"""The hooks of transforms, each with whether it takes the root; see `Transform.stepping`."""

_SUMMED = "uint8", "int8", "int16", "int32", "int64", "float32", "float64"
"""The dtypes that the core sums up."""


def run_steps(steps: Steps, root: Row, outcome: Row) -> None:
    """Run the hooks of transforms on a step's outcome, in order."""
    for run, takes_root in steps:
        if takes_root:
            run(root, outcome)
        else:
            run(outcome)


class Destinations:
    """The blocks that the rows of a rollout are written into.

    Args:
        inner: the base environment's block.
        outer: the block that the user gets.
        required: the keys that transforms must write in every row.
        outputs: the outputs for the results of transforms, by key.

    Attributes:
        base_keys: the keys that the base environment writes, without ``"next"``.
        arithmetic: compiles transforms from the inner to the outer block.
    """

    def __init__(
        self, inner: Block, outer: Block, required: list[NestedKey], outputs: Mapping[NestedKey, Output]
    ) -> None:
        self.inner, self.outer, self.required, self.outputs = inner, outer, required, outputs
        self.base_keys = {as_key(path[1:]) for path in inner.schema.paths if path[0] == "next"}
        self.arithmetic = RowArithmetic(inner, outer)


class RowSkippingPlan(NamedTuple):
    """How a rollout runs its transforms, depending on whether a row is skippable.

    Attributes:
        counters: the transforms that are skipped in skippable rows.
        mapped: runs all other transforms in skippable rows; None if their hooks run.
        in_every_row: the hooks of the other transforms; empty with `mapped`.
        in_other_rows: the hooks that run in rows that aren't skippable, after `in_every_row`. With `mapped` these are
            all hooks of the chain.
        required: the keys that must be written in skippable rows, except keys of counters; empty with `mapped`.
    """

    counters: Counters
    mapped: MappedRows | None
    in_every_row: Steps
    in_other_rows: Steps
    required: list[NestedKey]

    def is_skippable(self, t: int, done: DoneFlags) -> bool:
        """Return whether no episode ended in row `t`: neither by the environment's flags nor by a counter."""
        return t < self.counters.until and not done.any(t)

    def catch_up(self, t: int, roots: OpenedColumns) -> Values:
        """Write the skipped rows before row `t`; return the transforms' values in the root of row `t`.

        Args:
            t: the row.
            roots: the root columns of the outer block.
        """
        keys = () if self.mapped is None else self.mapped.keys
        mapped = {key: value for key in keys if (value := roots.row(key, t)) is not None}
        return self.counters.catch_up(t) | mapped


def row_skipping_plan(
    chain: Sequence[Transform], steps: Steps, rows: Destinations, seen: Collection[NestedKey] | None
) -> RowSkippingPlan | None:
    """Return how to run transforms in skippable and in other rows.

    The best plan skips the counters and maps all other transforms in the core. If the core can't do that, their hooks
    run in every row, and only counters at the end of the chain are skipped.

    Args:
        chain: the transforms that act in steps, all of them this library's.
        steps: their hooks.
        rows: the blocks to write.
        seen: the keys that the policy reads of a root; None for all.

    Returns:
        None if skippable rows need no other treatment.
    """
    skipped = skippable(chain, rows, seen, past_entries=True)
    mapped = rows.arithmetic.mapped_rows([one for one in chain if one not in skipped.transforms])
    if mapped is None or not mapped.keys.union(skipped.written()).issuperset(rows.required):
        mapped, skipped = None, skippable(chain, rows, seen, past_entries=False)
        if not skipped.transforms:
            return None
    counters = Counters(skipped, rows.outer, rows.outputs, rows.base_keys, seen)
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
    """Return the counting transforms at the end of a chain that a rollout may skip in skippable rows.

    The search runs from the end to the front. A later transform must not depend on a skipped one, and a skipped
    transform must find its inputs unchanged in the columns.

    Args:
        chain: the transforms that act in steps.
        rows: the blocks to write.
        seen: the keys that the policy reads of a root; None for all.
        past_entries: whether entry transforms may come after them. The core must then run these entry transforms.
    """
    found = Skippable([], {})
    counted: set[NestedKey] = set()  # keys that later counting transforms write
    filled: set[NestedKey] = set()  # keys that later skippable transforms write, except flags
    changed: set[NestedKey] = set()  # keys that later entry transforms write
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
            and not (addends and one.is_seen(seen))  # sums depend on outcomes, so they can't be written ahead
            # The column of a summand must not hold values of a later counting transform.
            and counted.isdisjoint(in_key for in_key, _ in one.summands())
        ):
            filled |= values
            found.transforms.insert(0, one)
            found.addends.update(addends)
        counted.update(one.written_keys())
    unskipped = [one for one in chain if one not in found.transforms]
    used = {key for one in unskipped for key in one.written_keys()}
    used |= {key for one in unskipped if isinstance(one, Counting) for key, _ in one.summands()}
    return found if used.isdisjoint(found.written()) else Skippable([], {})


def _values_of(one: Counting, rows: Destinations) -> set[NestedKey] | None:
    """Return the keys that a transform writes, except flags; None if it can't be skipped.

    That is so if the base environment writes one of them too, or a column has no NumPy array.
    """
    written = one.written_keys()
    if not all(as_path(key)[-1] in FLAGS for key in written if key in rows.base_keys):
        return None
    own_keys = {key for key in written if key not in rows.base_keys}
    columns = [path for key in own_keys for path in (as_path(key), ("next", *as_path(key)))]
    if any(rows.outer.row_arrays(path) is None for path in columns):
        return None
    return {key for key in own_keys if as_path(key)[-1] not in FLAGS}


def _addends_of(
    one: Counting, before: Sequence[Transform], changed: Collection[NestedKey], rows: Destinations
) -> dict[NestedKey, Array] | None:
    """Return the columns that a transform sums up, by the key of the sum.

    Args:
        one: the transform.
        before: the transforms before it.
        changed: the keys that later transforms change. Their addends are read from the inner block, which holds the
            values of the base environment.
        rows: the blocks to write.

    Returns:
        None if the core can't sum the values, or they aren't kept in a column.
    """
    found = {}
    for in_key, out_key in one.summands():
        addend, total = (("next", *as_path(key)) for key in (in_key, out_key))
        if in_key in changed and any(in_key in other.written_keys() for other in before):
            return None  # neither block holds the value between the two changes
        block = rows.inner if in_key in changed else rows.outer
        array = block.row_arrays(addend)
        if (
            array is None
            or array.dtype.name not in _SUMMED
            or block.schema[addend] != rows.outer.schema[total]
        ):
            return None
        if not array.strides[0]:  # a `SpareRow` column: earlier values are overwritten
            return None
        found[out_key] = array
    return found
