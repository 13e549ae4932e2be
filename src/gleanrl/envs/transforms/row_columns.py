"""Reads and writes the columns of blocks in transformed rollouts.

`Outputs` writes the results of transforms into the outer block, which the user gets. `OpenedColumns` and `DoneFlags`
read rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.native import RunningSums
from gleanrl._arrays.schema import Field, Schema, allocate, numpy_twin, numpy_view
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path, is_private
from gleanrl._rollout.row_writers import BatchedRowWriter, batched_row_writer
from gleanrl._rollout.tensordict_stepper import any_set, declared
from gleanrl._util import is_ours
from gleanrl.envs.transforms.compose import flattened
from gleanrl.errors import EnvironmentContractError, PolicyError


class OpenedColumns:
    """The rows of a block's columns by key. A column is split into row tensors at its first use.

    Args:
        block: the block.
        after: whether to take the columns below ``"next"``; otherwise the columns of the root.
        also: paths of more columns; their keys are the whole paths.
        without: paths of columns to leave out.
    """

    def __init__(
        self, block: Block, after: bool, also: Sequence[Path] = (), without: Collection[Path] = ()
    ) -> None:
        self._block = block
        skip = 1 if after else 0
        self._paths: dict[NestedKey, Path] = {
            as_key(path[skip:]): path
            for path in block.schema.paths
            if (path[0] == "next") == after and path not in without
        }
        self._paths |= {as_key(path): path for path in also}
        self._rows: dict[NestedKey, Sequence[torch.Tensor]] = {}

    def get(self, key: NestedKey) -> Sequence[torch.Tensor] | None:
        """Return the rows at `key`, ``T`` tensors ``(*batch, *leaf)``; None if there is no such column."""
        rows = self._rows.get(key)
        if rows is None and key in self._paths:
            rows = self._rows[key] = self._unbound(self._paths[key])
        return rows

    def row(self, key: NestedKey, t: int) -> torch.Tensor | None:
        """Return row `t` at `key`, ``(*batch, *leaf)``; None if there is no such column."""
        path = self._paths.get(key)
        if path is None:
            return None
        rows = self._rows.get(key)
        return self._block.column(path).select(self._block.time_dim, t) if rows is None else rows[t]

    def _unbound(self, path: Path) -> Sequence[torch.Tensor]:
        column, time = self._block.column(path), self._block.time_dim
        # All rows of a `SpareRow` column are the same memory: one view is enough.
        if column.stride(time) == 0 and len(column.shape) > time:
            return (column.select(time, 0),) * self._block.num_steps
        return self._block.rows(path)

    def __iter__(self) -> Iterator[NestedKey]:
        """Iterate over the keys."""
        return iter(self._paths)


class SpareRow:
    """Memory for one row that serves as a whole column, if no code reads earlier rows of the column."""

    def __init__(self) -> None:
        self._rows: dict[Path, torch.Tensor] = {}

    def column(
        self, path: Path, field: Field, batch_size: Sequence[int], num_steps: int, device: Any
    ) -> torch.Tensor:
        """Return a column ``[*batch, T, *leaf]`` all of whose rows are the same memory.

        A second call for a path uses that memory again, unless shape or dtype changed. New memory is zero.
        """
        row = self._rows.get(path)
        shape = (*batch_size, 1, *field.shape)
        if row is None or row.shape != torch.Size(shape) or row.dtype is not field.dtype:
            row = self._rows[path] = allocate(shape, field.dtype, device).zero_()
        return row.expand((*batch_size, num_steps, *field.shape))


_FEW = 64
"""The most environments for which reading flags as bytes takes less time than a call of NumPy."""


class DoneFlags:
    """The done flags of a block's steps.

    Args:
        block: the block.
        groups: paths of the groups of flags, without ``"next"``; ``()`` is the environment's own.
    """

    def __init__(self, block: Block, groups: Sequence[Path]) -> None:
        self._columns = [block.time_first(("next", *group, "done")) for group in groups]
        self._arrays = [numpy_view(column) for column in self._columns] if block.on_cpu else None
        self._stride = block.num_steps
        self._cells: Any = None  # for few environments: the bytes of all flags, environment by environment
        if self._arrays is not None and len(groups) == 1:
            column = block.column(("next", *groups[0], "done"))
            if (
                column.numel() == block.batch_size.numel() <= _FEW * block.num_steps
                and column.is_contiguous()
            ):
                self._cells = memoryview(numpy_view(column).reshape(-1))  # type: ignore[arg-type]

    def any(self, t: int) -> bool:
        """Return whether a flag is set in row `t`."""
        if self._cells is not None:
            return bool(self._cells[t :: self._stride].tobytes().strip(b"\0"))  # any byte but 0
        if self._arrays is None:
            return any(bool(column[t].any()) for column in self._columns)
        return any_set(self._arrays, t)


def copy_action(key: NestedKey, row: torch.Tensor, value: torch.Tensor) -> None:
    """Copy an action from the inverse transforms into the row that the environment reads.

    Args:
        key: key of the action, for the message.
        row: the row in the inner block.
        value: the action.

    Raises:
        PolicyError: if shape or dtype differ.
    """
    if value.shape != row.shape or value.dtype is not row.dtype:
        raise PolicyError(
            f"key {key!r}: the environment expects shape {tuple(row.shape)} {row.dtype}, got {tuple(value.shape)} "
            f"{value.dtype} from the inverse transforms; fix the policy's output, or the transform"
        )
    row.copy_(value)


def lists_pass(env: Any) -> bool:
    """Return whether no transform reads or changes entries that are kept in lists.

    If there are such entries, this library's transforms are judged by their keys, and a user's transform counts as
    reading them. Hooks on rows get tensors, and list entries have none.
    """
    dims = len(env.batch_size)
    inside, outside = (
        {path: field for path, field in declared(some.full_observation_spec, dims).items() if field.is_list}
        for some in (env.base_env, env)
    )
    if not inside and not outside:
        return True
    chain = flattened(env.transform)
    touched = {as_path(key) for transform in chain for key in (*transform.in_keys, *transform.written_keys())}
    ours = all(is_ours(type(transform)) for transform in chain)
    return ours and inside == outside and touched.isdisjoint(inside)


def require_declared(
    expected: Mapping[Path, Field], made: Mapping[NestedKey, torch.Tensor], base_schema: Schema, dims: int
) -> None:
    """Check that a reset's root is as the transformed specs declare it.

    Args:
        expected: the declared fields.
        made: the results of transforms, ``[*batch, *leaf]``.
        base_schema: the fields that the base environment writes.
        dims: number of batch dimensions.

    Raises:
        EnvironmentContractError: if an entry is absent, or has another shape or dtype.
    """
    for path, field in expected.items():
        value = made.get(as_key(path))
        found: Field | None = base_schema[path] if path in base_schema else None  # noqa: SIM401
        if value is not None:
            found = Field(value.shape[dims:], value.dtype)
        if found != field:
            raise EnvironmentContractError(
                f"reset of a transformed environment: key {as_key(path)!r} expected {field}, as the transformed specs "
                f"declare it, got {'nothing' if found is None else found}; fix the transform, or its "
                "transform_observation_spec"
            )


Keys = tuple[NestedKey, ...]
_MOST_SETS = 16
"""The most sets of keys with a cached writer. A transform could write other keys in every row."""


class Output:
    """Writes the values of one key: below ``"next"`` in the row of the step, and into the root of the following row.

    Args:
        block: the outer block, which the user gets.
        path: path of the key, without ``"next"``; one of the two columns may be absent.
    """

    def __init__(self, block: Block, path: Path) -> None:
        after = ("next", *path)
        self.key = as_key(path)
        self._running: dict[int | None, RunningSums] = {}
        some = block.schema[after if after in block.schema else path]
        self._shape, self._dtype = torch.Size((*block.batch_size[:-1], *some.shape)), some.dtype
        self._on_cpu = block.on_cpu and numpy_twin(some.dtype) is some.dtype
        self._last = block.num_steps - 1
        # An absent column is replaced by a dummy of one row with step 0, so that a write needs no test.
        self._next, self._next_step = self._rows(block, after)
        self._root, self._root_step = self._rows(block, path)

    def _rows(self, block: Block, path: Path) -> tuple[Any, int]:
        """Return the column, time first, and the step from one row to the next: 1, or 0 for a dummy.

        The column is a NumPy array if that is possible.
        """
        there = path in block.schema
        if there:
            column = block.time_first(path)
        else:
            column = torch.empty((1, *self._shape), dtype=self._dtype, device=block.columns[0].device)
        return (numpy_view(column) if self._on_cpu else column), int(there)

    def write(self, t: int, value: torch.Tensor) -> None:
        """Write `value` as outcome of row `t`, and as root of row ``t + 1`` if the block has that row.

        Raises:
            EnvironmentContractError: if shape or dtype differ from the column's; then nothing is written.
        """
        self._check(value)
        row = value.numpy() if self._on_cpu else value
        self._next[t * self._next_step] = row
        if t < self._last:
            self._root[(t + 1) * self._root_step] = row

    def write_root(self, t: int, value: torch.Tensor) -> None:
        """Write `value` as root of row `t`; raise as `write` does."""
        self._check(value)
        self._root[t * self._root_step] = value.numpy() if self._on_cpu else value

    def run_on(self, first: int, count: int, addends: np.ndarray[Any, Any] | None) -> torch.Tensor:
        """Write running sums as outcomes of `count` rows, and as the following roots; return the last sum.

        Both columns must be in the block, on the CPU.

        Args:
            first: the first row; the sums continue from its root.
            count: number of rows, at least 1. The block's last row must not be included, because no root follows it.
            addends: values to add, time first; None adds 1 in each row.
        """
        # `RunningSums` keeps the array alive, so no other array has its id.
        which = None if addends is None else id(addends)
        if which not in self._running:
            self._running[which] = RunningSums(self._next, self._root, addends)
        self._running[which].run_on(first, count)
        return self.outcome(first + count - 1)

    def outcome(self, t: int) -> torch.Tensor:
        """Return a copy of the outcome of row `t` of a column on the CPU."""
        return torch.from_numpy(np.array(self._next[t]))

    def clear_after(self, first: int) -> torch.Tensor:
        """Write zeros as outcomes of all rows from `first` on, and as the following roots; return a row of zeros."""
        self._next[first:] = 0
        self._root[first + 1 :] = 0
        return torch.zeros(self._shape, dtype=self._dtype, device="cpu")

    def _check(self, value: torch.Tensor) -> None:
        if value.shape != self._shape or value.dtype is not self._dtype:
            raise EnvironmentContractError(
                f"transform: key {self.key!r} expected shape {tuple(self._shape)} {self._dtype}, as the transformed "
                f"specs declare it, got {tuple(value.shape)} {value.dtype}; fix the transform, or its "
                "transform_*_spec method"
            )


class Outputs:
    """Writes the results of transforms into rows, by key.

    Most rows get the same set of keys. For each such set the native core writes a row in one call.

    Args:
        block: the outer block, which the user gets.
        keys: the keys that transforms are known to write.
        declared: the paths that the transformed specs declare. Private entries aren't among them, and aren't written.

    Attributes:
        by_key: the output of each known key.
    """

    def __init__(self, block: Block, keys: Iterable[NestedKey], declared: Collection[Path]) -> None:
        self._block, self._declared = block, frozenset(declared)
        self.by_key = {key: Output(block, as_path(key)) for key in keys}
        self._rows: dict[Keys, BatchedRowWriter | None] = {}
        self._roots: dict[Keys, BatchedRowWriter | None] = {}

    def write(self, t: int, made: Mapping[NestedKey, torch.Tensor]) -> None:
        """Write transformed values as outcome of row `t`, and as root of row ``t + 1`` if the block has that row.

        Private entries are skipped.

        Raises:
            EnvironmentContractError: if the specs don't declare a key, or declare another shape or dtype.
        """
        keys = tuple(made)
        rows = self._rows[keys] if keys in self._rows else self._learn(self._rows, keys, True)
        if rows is not None and rows.write(t, made) is not None:
            return
        for key, value in made.items():
            if (output := self.by_key.get(key) or self._output(key)) is not None:
                output.write(t, value)

    def write_root(self, t: int, values: Mapping[NestedKey, torch.Tensor]) -> None:
        """Write transformed values as root of row `t`; see `write`."""
        keys = tuple(values)
        rows = self._roots[keys] if keys in self._roots else self._learn(self._roots, keys, False)
        if rows is not None and rows.write(t, values) is not None:
            return
        for key, value in values.items():
            if (output := self.by_key.get(key) or self._output(key)) is not None:
                output.write_root(t, value)

    def _learn(
        self, known: dict[Keys, BatchedRowWriter | None], keys: Keys, after: bool
    ) -> BatchedRowWriter | None:
        """Return the writer that writes these keys in one call, and cache it.

        Args:
            known: the cache.
            keys: the keys to write, in order.
            after: whether to write outcomes and the following roots; otherwise roots only.

        Returns:
            None if a column is absent or unsuitable, or the cache is full. The keys are then written one by one.
        """
        if len(known) == _MOST_SETS:
            return None
        schema, paths = self._block.schema, {key: as_path(key) for key in keys}
        columns = {key: ("next", *path) if after else path for key, path in paths.items()}
        roots = {key: path for key, path in paths.items() if after and path in schema}
        there = self._declared.issuperset(paths.values()) and all(path in schema for path in columns.values())
        rows = (
            batched_row_writer(self._block, columns, roots)
            if there and self._are_alike(paths.values())
            else None
        )
        known[keys] = rows
        return rows

    def _are_alike(self, paths: Iterable[Path]) -> bool:
        """Return whether outcome and root have the same field, for each path that has both columns."""
        schema = self._block.schema
        both = [(path, ("next", *path)) for path in paths if path in schema and ("next", *path) in schema]
        return all(schema[root] == schema[after] for root, after in both)

    def _output(self, key: NestedKey) -> Output | None:
        """Return the output of a key that is written for the first time, and cache it; None for a private key.

        Raises:
            EnvironmentContractError: if the transformed specs don't declare the key.
        """
        path = as_path(key)
        if is_private(path):
            return None
        if path not in self._declared:
            raise EnvironmentContractError(
                f"transform: a hook wrote {key!r}, which the transformed specs don't declare; declare it in "
                "transform_observation_spec"
            )
        self.by_key[key] = output = Output(self._block, path)
        return output
