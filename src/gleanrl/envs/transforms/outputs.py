"""Where what transforms make of steps goes: the columns of the block that is handed out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gleanrl.block import Block
from gleanrl.errors import EnvironmentContractError
from gleanrl.native import RunningSums
from gleanrl.rollouts.whole_rows import WholeRows, whole_rows
from gleanrl.schema import numpy_dtype, numpy_twin, numpy_view
from gleanrl.tree import NestedKey, Path, as_key, as_path, is_private

_MOST_SETS = 16
"""Sets of keys that are remembered: a transform may write others in every row."""


class Output:
    """Where the values of one key go: below ``"next"`` in the step's own row, and into the root of the row after.

    Args:
        block: the block that is handed out.
        path: the key, without ``"next"``; either column may be absent.
    """

    def __init__(self, block: Block, path: Path) -> None:
        after = ("next", *path)
        self.key = as_key(path)
        self._block = block
        self._running: dict[Path | None, RunningSums] = {}
        some = block.schema[after if after in block.schema else path]
        self._shape, self._dtype = torch.Size((*block.batch_size[:-1], *some.shape)), some.dtype
        self._on_cpu = block.on_cpu and numpy_twin(some.dtype) is some.dtype
        self._array_shape, self._array_dtype = tuple(self._shape), numpy_dtype(some.dtype)
        self._last = block.num_steps - 1
        # A column that isn't there is a dummy of one row, so that a write needs no test.
        self._next, self._next_step = self._rows(block, after)
        self._root, self._root_step = self._rows(block, path)

    def _rows(self, block: Block, path: Path) -> tuple[Any, int]:
        """Return the column's rows, as arrays on the CPU, and the distance from one row to the next."""
        there = path in block.schema
        if there:
            column = block.time_first(path)
        else:
            column = torch.empty((1, *self._shape), dtype=self._dtype, device=block.columns[0].device)
        return (numpy_view(column) if self._on_cpu else column), int(there)

    def write(self, t: int, value: torch.Tensor) -> None:
        """Write the outcome of row `t`, and the root of row ``t + 1`` if there is one."""
        if self._on_cpu:
            array = value.numpy()
            if array.dtype is not self._array_dtype or array.shape != self._array_shape:
                self._check(value)
            self._next[t * self._next_step] = array
            if t < self._last:
                self._root[(t + 1) * self._root_step] = array
            return
        self._check(value)
        self._next[t * self._next_step] = value
        if t < self._last:
            self._root[(t + 1) * self._root_step] = value

    def write_root(self, t: int, value: torch.Tensor) -> None:
        """Write the root of row `t`."""
        self._check(value)
        self._root[t * self._root_step] = value.numpy() if self._on_cpu else value

    def run_on(self, first: int, count: int, addends: Path | None) -> torch.Tensor:
        """Write sums as outcomes of the rows from `first` on, and the roots behind them; return the last.

        Args:
            first: the first row, whose root the sums begin with.
            count: how many rows; not the block's last one.
            addends: the column that is added up; None to count.
        """
        if addends not in self._running:
            arrays = None if addends is None else self._block.row_arrays(addends)
            self._running[addends] = RunningSums(self._next, self._root, arrays)
        self._running[addends].run(first, count)
        return self.outcome(first + count - 1)

    def outcome(self, t: int) -> torch.Tensor:
        """Return a copy of the outcome of row `t`, on the CPU."""
        return torch.from_numpy(np.array(self._next[t]))

    def clear_after(self, first: int) -> torch.Tensor:
        """Write zeros into the outcomes of the rows from `first` on, and the roots behind them; return such a row."""
        self._next[first:] = 0
        self._root[first + 1 :] = 0
        return torch.zeros(self._shape, dtype=self._dtype, device="cpu")

    def _check(self, value: torch.Tensor) -> None:
        if value.shape != self._shape or value.dtype is not self._dtype:
            raise EnvironmentContractError(
                f"transform: key {self.key!r} expected shape {tuple(self._shape)} {self._dtype}, as the transformed "
                f"specs declare it, got {tuple(value.shape)} {value.dtype}"
            )


class Outputs:
    """Writes what transforms made of rows, by key.

    What is written together is mostly the same again: for each such set of keys the core writes a row in one call.

    Args:
        block: the block that is handed out.
        keys: what transforms are known to write.
        declared: the paths of all that they may write, private entries aside, which go nowhere.

    Attributes:
        by_key: where the values of each key go, as far as it's known.
    """

    def __init__(self, block: Block, keys: Iterable[NestedKey], declared: Collection[Path]) -> None:
        self._block, self._declared = block, declared
        self.by_key = {key: Output(block, as_path(key)) for key in keys}
        self._rows: dict[tuple[NestedKey, ...], WholeRows | None] = {}
        self._roots: dict[tuple[NestedKey, ...], WholeRows | None] = {}

    def write(self, t: int, made: Mapping[NestedKey, torch.Tensor]) -> None:
        """Write what was made of the outcome of row `t`, also into the root of the row after it."""
        keys = tuple(made)
        rows = self._rows[keys] if keys in self._rows else self._rows_of(keys)
        if rows is not None and rows.write(t, made) is not None:
            return
        known = self.by_key
        for key, value in made.items():
            output = known.get(key) or self._output(key)
            if output is not None:
                output.write(t, value)

    def write_root(self, t: int, values: Mapping[NestedKey, torch.Tensor]) -> None:
        """Write what was made of the root of row `t`."""
        keys = tuple(values)
        rows = self._roots[keys] if keys in self._roots else self._roots_of(keys)
        if rows is not None and rows.write(t, values) is not None:
            return
        for key, value in values.items():
            if (output := self.by_key.get(key) or self._output(key)) is not None:
                output.write_root(t, value)

    def _rows_of(self, keys: tuple[NestedKey, ...]) -> WholeRows | None:
        paths = {key: ("next", *as_path(key)) for key in keys}
        roots = {key: path[1:] for key, path in paths.items() if path[1:] in self._block.schema}
        return self._kept(self._rows, keys, paths, roots)

    def _roots_of(self, keys: tuple[NestedKey, ...]) -> WholeRows | None:
        return self._kept(self._roots, keys, {key: as_path(key) for key in keys}, {})

    def _kept(
        self,
        known: dict[tuple[NestedKey, ...], WholeRows | None],
        keys: tuple[NestedKey, ...],
        paths: Mapping[NestedKey, Path],
        roots: Mapping[NestedKey, Path],
    ) -> WholeRows | None:
        """Return what writes these columns at once, if they are there; few sets of keys are remembered."""
        there = all(as_path(k) in self._declared and path in self._block.schema for k, path in paths.items())
        rows = whole_rows(self._block, paths, roots) if there and len(known) < _MOST_SETS else None
        if len(known) < _MOST_SETS:
            known[keys] = rows
        return rows

    def _output(self, key: NestedKey) -> Output | None:
        """Return where the values of a key that wasn't written before go; None for private ones."""
        path = as_path(key)
        if is_private(path):
            return None
        if path not in self._declared:
            raise EnvironmentContractError(
                f"transform: it wrote {key!r}, which the transformed specs don't declare; declare it in "
                "transform_observation_spec"
            )
        self.by_key[key] = output = Output(self._block, path)
        return output
