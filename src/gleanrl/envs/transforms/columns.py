"""Columns of a block as a transformed rollout sees them, and what it reads and checks of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from gleanrl.block import Block
from gleanrl.envs.transforms.compose import flattened
from gleanrl.errors import EnvironmentContractError, PolicyError
from gleanrl.overrides import is_ours
from gleanrl.rollouts.steppers import any_set, declared
from gleanrl.schema import Field, Schema, allocate, numpy_view
from gleanrl.tree import NestedKey, Path, as_key, as_path


class OpenedColumns:
    """The rows of a block's columns by key, each column unbound when it is first asked for.

    Args:
        block: whose columns.
        after: whether the keys are those below ``"next"``; if not, those of the root.
        also: more columns, by their whole paths.
        without: paths that are left out.
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
        if column.stride(time) == 0 and len(column.shape) > time:
            return (column.select(time, 0),) * self._block.num_steps
        return self._block.rows(path)

    def __iter__(self) -> Iterator[NestedKey]:
        """Iterate over the keys."""
        return iter(self._paths)


class SpareRow:
    """Memory of one row that stands in for a whole column whose rows nobody looks back at."""

    def __init__(self) -> None:
        self._rows: dict[Path, torch.Tensor] = {}

    def column(
        self, path: Path, field: Field, batch_size: Sequence[int], num_steps: int, device: Any
    ) -> torch.Tensor:
        """Return a column ``[*batch, T, *leaf]`` all of whose rows are the same memory."""
        row = self._rows.get(path)
        shape = (*batch_size, 1, *field.shape)
        if row is None or row.shape != torch.Size(shape) or row.dtype is not field.dtype:
            row = self._rows[path] = allocate(shape, field.dtype, device).zero_()
        return row.expand((*batch_size, num_steps, *field.shape))


_FEW = 64
"""Environments up to which it takes less time to read their flags one by one than to call NumPy."""


class DoneFlags:
    """The done flags of a block's steps.

    Args:
        block: whose columns.
        groups: where flags stand; ``()`` is the root.
    """

    def __init__(self, block: Block, groups: Sequence[Path]) -> None:
        self._columns = [block.time_first(("next", *group, "done")) for group in groups]
        self._arrays = [numpy_view(column) for column in self._columns] if block.on_cpu else None
        self._stride = block.num_steps
        self._cells: Any = None  # the flags of each environment one after the other, if they are few
        if self._arrays is not None and len(groups) == 1:
            column = block.column(("next", *groups[0], "done"))
            if (
                column.numel() == block.batch_size.numel() <= _FEW * block.num_steps
                and column.is_contiguous()
            ):
                self._cells = memoryview(numpy_view(column).reshape(-1))  # type: ignore[arg-type]  # read in no time

    def any(self, t: int) -> bool:
        """Return whether a flag is set in row `t`."""
        if self._cells is not None:
            return bool(self._cells[t :: self._stride].tobytes().strip(b"\0"))  # anything but zeros
        if self._arrays is None:
            return any(bool(column[t].any()) for column in self._columns)
        return any_set(self._arrays, t)


def copy_action(key: NestedKey, row: torch.Tensor, value: torch.Tensor) -> None:
    """Write an action that inverse transforms made into the row that the environment reads."""
    if value.shape != row.shape or value.dtype is not row.dtype:
        raise PolicyError(
            f"key {key!r}: the environment expects shape {tuple(row.shape)} {row.dtype}, got {tuple(value.shape)} "
            f"{value.dtype} from the inverse transforms"
        )
    row.copy_(value)


def lists_pass(env: Any) -> bool:
    """Return whether the lists of a transformed environment pass its transforms untouched."""
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
    expected: Mapping[Path, Field], made: Mapping[NestedKey, torch.Tensor], others: Schema, dims: int
) -> None:
    """Check that a reset's root is what the transformed specs declare.

    Args:
        expected: what they declare.
        made: what transforms made of it, `dims` batch dimensions first.
        others: what the base environment wrote.
        dims: the number of batch dimensions.

    Raises:
        EnvironmentContractError: naming the key, what was expected and what came.
    """
    for path, field in expected.items():
        value = made.get(as_key(path))
        came: Field | None = others[path] if path in others else None  # noqa: SIM401
        if value is not None:
            came = Field(value.shape[dims:], value.dtype)
        if came != field:
            raise EnvironmentContractError(
                f"reset behind transforms: key {as_key(path)!r} is declared as {field}, got "
                f"{'nothing' if came is None else came}; fix the transform, or its transform_observation_spec"
            )
