"""`Counting`: transforms that a rollout may skip in rows without a flag, and that write many rows at once later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl.envs.transforms.episodic import Following
from gleanrl.envs.transforms.row_columns import Output

Values = dict[NestedKey, torch.Tensor]
Array = np.ndarray[Any, Any]

_LEAST_AHEAD, _SO_FEW = 8, 64  # rows, and values: writing that many costs little more than writing one


class Counting(Following):
    """Follows episodes with values that many steps at once yield bit for bit as single steps do, such as counts.

    Rows in which no flag is set are *skippable*. A rollout may skip `_step` there if no other transform reads or writes
    this transform's keys. Before the next row that isn't skippable, `catch_up` writes the results of the skipped steps.
    If the policy reads the values, they are written ahead, for coming skippable rows. That is possible only for values
    that depend on the root alone, not on outcomes.
    """

    on_host = True

    def summands(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return the keys of the outcomes that it sums up, each with the key of the sum."""
        return []

    def is_seen(self, seen: Collection[NestedKey] | None) -> bool:
        """Return whether a policy reads this transform's keys.

        Args:
            seen: the keys that the policy reads of a root; None for all.
        """
        return seen is None or not set(seen).isdisjoint(self.written_keys())

    def skippable_steps(self, root: Mapping[NestedKey, torch.Tensor]) -> int | None:
        """Return the number of next steps in which it sets no flag; None if it never sets one.

        Args:
            root: this transform's values in the root of the first of these steps.
        """
        return None

    @abstractmethod
    def catch_up(self, rows: SkippedRows) -> None:
        """Write the results of `_step` for all of `rows`, and set the carried values as after the last row.

        A second call with the same rows must have the same result. `rows` may hold any number of rows.
        """


class SkippedRows:
    """Consecutive rows of a block in which no flag was set.

    Args:
        outputs: the columns to write, by key; the base environment writes other keys.
        addends: see `Skippable`.
        cleared: flags that are already cleared to the end of the block: by key, one row of zeros. `clear` adds to it.
        first: index of the first row.
        count: number of rows.
    """

    def __init__(
        self,
        outputs: Mapping[NestedKey, Output],
        addends: Mapping[NestedKey, Array],
        cleared: Values,
        first: int,
        count: int,
    ) -> None:
        self._outputs, self._addends, self._cleared = outputs, addends, cleared
        self._first, self._count = first, count
        self.values: Values = {}
        """The values in the root after the last row, by key."""

    def count_on(self, key: NestedKey) -> torch.Tensor:
        """Continue the count in the root of the first row; return the count after the last row."""
        return self._run_on(key, None)

    def add_up(self, key: NestedKey) -> torch.Tensor:
        """Add the addends of `key` to the sum in the root of the first row, one by one; return the last sum."""
        return self._run_on(key, self._addends[key])

    def _run_on(self, key: NestedKey, addends: Array | None) -> torch.Tensor:
        self.values[key] = last = self._outputs[key].run_on(self._first, self._count, addends)
        return last

    def clear(self, key: NestedKey) -> None:
        """Write False for the flags at `key`, unless the base environment writes them.

        This clears the rest of the block as well, once. Rows that aren't skippable are overwritten later, one by one.
        """
        output = self._outputs.get(key)
        if output is None:
            return
        if key not in self._cleared:
            self._cleared[key] = output.clear_after(self._first)
        self.values[key] = self._cleared[key]

    def values_after(self, count: int) -> Values:
        """Return the values in the root after the first `count` rows."""
        at = self._first + count - 1
        return {key: self._outputs[key].outcome(at) for key in self.values}


class Skippable(NamedTuple):
    """Transforms that a rollout may skip in skippable rows.

    Attributes:
        transforms: the transforms, in the order of the chain.
        addends: the columns that they sum up, ``(T, *batch, *leaf)`` in the dtype of the sums, by the key of the sums.
    """

    transforms: list[Counting]
    addends: dict[NestedKey, Array]

    def written(self) -> set[NestedKey]:
        """Return the keys that they write."""
        return {key for one in self.transforms for key in one.written_keys()}


class Counters:
    """Runs the transforms that are skipped in skippable rows of a block.

    Its progress is one tuple, `_since`. One assignment replaces it, so that an interrupt can't leave it half changed.

    Args:
        skipped: the transforms that are skipped; see `row_skipping_plan`.
        block: the outer block, which the user gets.
        outputs: the columns to write, by key.
        base_keys: the keys that the base environment writes.
        seen: the keys that the policy reads of a root; None for all.
    """

    def __init__(
        self,
        skipped: Skippable,
        block: Block,
        outputs: Mapping[NestedKey, Output],
        base_keys: Collection[NestedKey],
        seen: Collection[NestedKey] | None = (),
    ) -> None:
        transforms, self._addends = skipped
        self._transforms = transforms
        self._ahead = [one for one in transforms if one.is_seen(seen)]
        self._behind = [one for one in transforms if one not in self._ahead]
        self._outputs = {
            key: outputs[key] for one in transforms for key in one.written_keys() if key not in base_keys
        }
        self._last = block.num_steps - 1
        self._least = max(_LEAST_AHEAD, _SO_FEW // max(1, block.batch_size[:-1].numel()))
        self._cleared: Values = {}
        # The first skipped row, the transforms' values in its root, and the rows that were written ahead.
        self._since: tuple[int, Values, SkippedRows | None] = 0, {}, None
        self._began = 0
        self.until = 0
        """Index of the next row that must not be skipped; at most that of the last row."""

    @property
    def root(self) -> Values:
        """The transforms' values in the root of the first skipped row, or of the next row if none is skipped."""
        return self._since[1]

    def begin(self, t: int, root: Values) -> None:
        """Skip rows from row `t` on.

        The number of rows written ahead is proportional to the number of skippable rows before. Otherwise the cost of a
        block in which an episode ends in every row would be quadratic in its length.

        Args:
            t: index of the first row to skip.
            root: the root of row `t`, which the block holds already; counts and sums continue from it.
        """
        values = {key: root[key] for key in self._outputs}
        counts = [n for one in self._transforms if (n := one.skippable_steps(values)) is not None]
        if self._ahead:
            counts.append(self._least + 2 * (t - self._began))
            self._began = t
        self.until = min(self._last, t + min(counts, default=self._last))
        ahead = None
        if self._ahead and self.until > t:
            ahead = self._rows(t, self.until - t)
            for one in self._ahead:
                one.catch_up(ahead)
        self._since = t, values, ahead

    def catch_up(self, t: int) -> Values:
        """Write the skipped rows before row `t`; return the transforms' values in the root of row `t`.

        The transforms then carry these values, and the next call writes rows from row `t` on.
        """
        first, _, ahead = self._since
        if t > first:
            rows, values = self._rows(first, t - first), {}
            for one in self._behind:
                one.catch_up(rows)
            if ahead is not None:
                values = ahead.values_after(t - first)
                for one in self._ahead:
                    one.carried.update({k: value for k, value in values.items() if k in one.carried})
            self._since = t, values | rows.values, None
        return self._since[1]

    def _rows(self, first: int, count: int) -> SkippedRows:
        return SkippedRows(self._outputs, self._addends, self._cleared, first, count)
