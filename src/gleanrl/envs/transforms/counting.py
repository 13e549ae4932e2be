"""Transforms that only count: a rollout skips them where nothing ends, and they catch up with many rows at once."""

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

_LEAST_AHEAD, _SO_FEW = 8, 64  # rows; values: to write so many costs little more than to write one


class Counting(Following):
    """Follows episodes by what can be made of many steps as well as of one, bit for bit the same.

    Rows in which no flag is set are *quiet*. A rollout may leave `_step` out in them, where no other transform reads or
    writes what this one writes: before the next row that isn't quiet, `catch_up` does what `_step` would have done.
    What hangs on the root alone, and not on outcomes, is written for the quiet rows to come where the policy sees it.
    """

    on_host = True

    def summands(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return which outcomes it reads, each with the key of what is made of it."""
        return []

    def is_seen(self, seen: Collection[NestedKey] | None) -> bool:
        """Return whether a policy that reads `seen` of a root, all of it if that is None, sees what it writes."""
        return seen is None or not set(seen).isdisjoint(self.written_keys())

    def quiet_steps(self, root: Mapping[NestedKey, torch.Tensor]) -> int | None:
        """Return after how many steps from `root` it may set a flag, one less; None if it never does.

        Args:
            root: what it wrote into a root.
        """
        return None

    @abstractmethod
    def catch_up(self, rows: QuietRows) -> None:
        """Do what `_step` does, for all of `rows`; doing it twice must be the same as once, and any number of them."""


class QuietRows:
    """Consecutive rows of a block in which no flag was set.

    Args:
        outputs: where values go, by key; other keys are written by somebody else.
        addends: see `Skippable`.
        cleared: flags that were cleared to the end of the block before, by key with a row of them; what `clear` clears
            is added.
        first: the first row.
        count: how many.
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
        """What stands in the root behind the last row."""

    def count_on(self, key: NestedKey) -> torch.Tensor:
        """Count on from the root of the first row; return what stands behind the last one."""
        return self._run_on(key, None)

    def add_up(self, key: NestedKey) -> torch.Tensor:
        """Add the outcomes that `key` sums to the root of the first row, one by one; return what the last one makes."""
        return self._run_on(key, self._addends[key])

    def _run_on(self, key: NestedKey, addends: Array | None) -> torch.Tensor:
        self.values[key] = last = self._outputs[key].run_on(self._first, self._count, addends)
        return last

    def clear(self, key: NestedKey) -> None:
        """Write flags that aren't set; nothing if somebody else writes what stands at `key`.

        The rest of the block is cleared, too: rows that aren't quiet are written one by one.
        """
        output = self._outputs.get(key)
        if output is None:
            return
        if key not in self._cleared:
            self._cleared[key] = output.clear_after(self._first)
        self.values[key] = self._cleared[key]

    def values_after(self, count: int) -> Values:
        """Return what stands in the root behind the first `count` rows."""
        at = self._first + count - 1
        return {key: self._outputs[key].outcome(at) for key in self.values}


class Skippable(NamedTuple):
    """Transforms that may be skipped in quiet rows.

    Attributes:
        transforms: in their order.
        addends: what they add up, ``(T, *batch, *leaf)`` in the dtype of the sums, by the key of the sums.
    """

    transforms: list[Counting]
    addends: dict[NestedKey, Array]

    def written(self) -> set[NestedKey]:
        """Return what they write."""
        return {key for one in self.transforms for key in one.written_keys()}


class Counters:
    """The transforms that are skipped in quiet rows of a block.

    Where they stand is one value that changes by one assignment, so that an interrupt leaves it whole.

    Args:
        skipped: those transforms; see `quiet_plan`.
        block: the block that is handed out.
        outputs: where values go, by key.
        given: what the base environment writes into the block itself.
        seen: what the policy reads of a root; None for all of it.
    """

    def __init__(
        self,
        skipped: Skippable,
        block: Block,
        outputs: Mapping[NestedKey, Output],
        given: Collection[NestedKey],
        seen: Collection[NestedKey] | None = (),
    ) -> None:
        transforms, self._addends = skipped
        self._transforms = transforms
        self._ahead = [one for one in transforms if one.is_seen(seen)]
        self._behind = [one for one in transforms if one not in self._ahead]
        self._outputs = {
            key: outputs[key] for one in transforms for key in one.written_keys() if key not in given
        }
        self._last = block.num_steps - 1
        self._least = max(_LEAST_AHEAD, _SO_FEW // max(1, block.batch_size[:-1].numel()))
        self._cleared: Values = {}
        # Since which row they are skipped, with what root, and the rows that were written ahead.
        self._since: tuple[int, Values, QuietRows | None] = 0, {}, None
        self._began = 0
        self.until = 0
        """The first row that isn't known to be quiet; the last one never is."""

    @property
    def root(self) -> Values:
        """Their values in the root of the first row that they skipped, or that comes next."""
        return self._since[1]

    def begin(self, t: int, root: Values) -> None:
        """Skip rows from row `t` on. `root` is its root, and stands in the block already: sums begin there.

        What is written ahead is in proportion to what was quiet before: else a block in which something ends in every
        row would cost the square of its length.
        """
        kept = {key: root[key] for key in self._outputs}
        quiet = [n for one in self._transforms if (n := one.quiet_steps(kept)) is not None]
        if self._ahead:
            quiet.append(self._least + 2 * (t - self._began))
            self._began = t
        self.until = min(self._last, t + min(quiet, default=self._last))
        ahead = None
        if self._ahead and self.until > t:
            ahead = self._rows(t, self.until - t)
            for one in self._ahead:
                one.catch_up(ahead)
        self._since = t, kept, ahead

    def catch_up(self, t: int) -> Values:
        """Do what was skipped before row `t`; return the values in its root."""
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

    def _rows(self, first: int, count: int) -> QuietRows:
        return QuietRows(self._outputs, self._addends, self._cleared, first, count)
