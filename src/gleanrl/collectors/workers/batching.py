"""Shares of several workers as one batch: side by side, or one after the other, in worker order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.native import Columns
from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.schema import Field, Schema
from gleanrl._util import integer
from gleanrl.collectors.batch_columns import IDS
from gleanrl.data.trajectories import MASK
from gleanrl.errors import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True)
class ShareLayout:
    """How shares ``[*batch, t]`` of B workers make a batch.

    Attributes:
        dim: None for a new first dimension, ``[B, *batch, t]``; 0 for the first dimension of the shares, which for a
            single environment is time; -1 for time.
        batch_size: of a share, without time.
        num_workers: B.
        masked: whether shares may be cut short: side by side, steps that weren't made are masked.
    """

    dim: int | None
    batch_size: torch.Size
    num_workers: int
    masked: bool = False

    def check(self) -> None:
        """Raise if shares that are cut short couldn't be put together.

        Raises:
            UnsupportedError: batches of environments would be put side by side, of different lengths.
        """
        if self.masked and self.dim == 0 and self.batch_size:
            raise UnsupportedError(
                "preemptive_threshold: shares of several environments that were cut short can't be concatenated with "
                "cat_results=0; use 'stack' or -1"
            )

    @property
    def in_time(self) -> bool:
        """Whether the shares follow each other in time."""
        return self.dim is not None and (self.dim == -1 or not self.batch_size)

    @property
    def size(self) -> torch.Size:
        """Dimensions of a batch, without time."""
        if self.in_time:
            return self.batch_size
        if self.dim is None:
            return torch.Size((self.num_workers, *self.batch_size))
        return torch.Size((self.num_workers * self.batch_size[0], *self.batch_size[1:]))

    @property
    def num_envs(self) -> int:
        """Environments that step at once in a batch."""
        return self.size.numel()

    def steps(self, num_steps: int) -> list[int]:
        """Return each worker's steps of a batch of so many."""
        if not self.in_time:
            return [num_steps] * self.num_workers
        each, more = divmod(num_steps, self.num_workers)
        return [each + (worker < more) for worker in range(self.num_workers)]

    def has_places(self, block: Block, counts: Mapping[int, int]) -> bool:
        """Return whether each share has its place in the batch before the others are there; see `arranged`.

        Args:
            block: see `batch`.
            counts: steps that workers are to make.
        """
        whole = len(counts) == self.num_workers and set(counts.values()) == {block.num_steps}
        return whole and not self.masked and not (self.in_time and self.batch_size) and not block.schema.lists

    def schema(self, schema: Schema) -> Schema:
        """Return the columns of a batch, given those of the shares."""
        if not self.masked or self.in_time or MASK in schema:
            return schema
        return Schema({**schema.items(), MASK: Field(torch.Size(), torch.bool)}, schema.groups)

    def batch(self, block: Block, counts: Mapping[int, int], pool: BufferPool, lend: bool) -> Block:
        """Return the batch that the workers' shares make.

        Args:
            block: ``[B, *batch, T]``, written again later.
            counts: steps of each worker's share, for those that have one.
            pool: where large columns come from.
            lend: whether the batch may be views of the block.
        """
        found = list(counts.values())
        num_steps = max(found)
        even = len(found) == self.num_workers and min(found) == num_steps
        if self.in_time and not (even and not self.batch_size):
            return self._joined(block, counts, pool)
        out = block.leading(num_steps)
        if self.schema(block.schema) is not block.schema or not even:
            out = self._masked(out, found, pool)
        elif not lend or self.dim is not None:
            out = out.owned(pool)
        return self.arranged(out)

    def arranged(self, out: Block) -> Block:
        """Return shares of one length side by side, ``[B, *batch, t]``, as the batch that they make: views."""
        if self.dim is None:
            return out
        columns = [column.reshape(-1, *column.shape[2:]) for column in out.columns]  # views: it's contiguous
        batch_size = (self.num_workers * out.batch_size[1], *out.batch_size[2:])
        return Block(out.schema, batch_size[:-1], batch_size[-1], columns=columns)

    def shares(self, batch: TensorDict, counts: Mapping[int, int]) -> Iterator[TensorDict]:
        """Yield each worker's share of a batch, without steps that weren't made: views.

        Args:
            batch: what `batch` made.
            counts: see there.
        """
        begin = 0
        for worker, count in counts.items():
            if self.in_time:
                yield batch[..., begin : begin + count]
                begin += count
            elif self.dim is None:
                yield batch[worker][..., :count]
            else:
                width = self.batch_size[0]
                yield batch[worker * width : (worker + 1) * width][..., :count]

    def _joined(self, block: Block, counts: Mapping[int, int], pool: BufferPool) -> Block:
        out = Block(block.schema, self.batch_size, sum(counts.values()), pool=pool)
        dim = out.time_dim
        for target, column in zip(out.columns, block.columns, strict=True):
            begin = 0
            for worker, count in counts.items():
                target.narrow(dim, begin, count).copy_(column[worker].narrow(dim, 0, count))
                begin += count
        return out

    def _masked(self, block: Block, counts: Sequence[int], pool: BufferPool) -> Block:
        """Return a copy with a mask that is False on the steps that weren't made; these are zero, of no trajectory."""
        out = Block(self.schema(block.schema), block.batch_size[:-1], block.num_steps, pool=pool)
        mask = out.column(MASK)
        mask.fill_(True)
        for path, column in zip(block.schema.paths, block.columns, strict=True):
            out.column(path).copy_(column)
        for worker, count in enumerate(counts):
            missing = block.num_steps - count
            for path in out.schema.paths:
                _blank(out, path, worker, count, missing, -1 if path == IDS else 0)
        return out


class Shares:
    """Copies whole shares of a block, one at a time: all columns in one call of the core, in the caller's thread.

    Args:
        block: ``[B, *batch, T]``, contiguous columns without lists.
    """

    def __init__(self, block: Block) -> None:
        self._block, count = block, block.batch_size[0]
        self._sizes = [column.nbytes // count for column in block.columns]
        self._rows = Columns([column.data_ptr() for column in block.columns], self._sizes, count)
        self._numbers = torch.arange(count, device="cpu")
        self._at = [number.data_ptr() for number in self._numbers.unbind()]

    def copy(self, workers: Sequence[int], addresses: Sequence[int]) -> None:
        """Copy shares to their places among those of all workers.

        Args:
            workers: whose, in order.
            addresses: of contiguous columns as `side_by_side` makes them.
        """
        first, count = workers[0], len(workers)
        if workers[-1] - first >= count:  # there are others in between
            for worker in workers:
                self.copy([worker], addresses)
            return
        to = (
            [base + first * size for base, size in zip(addresses, self._sizes, strict=True)]
            if first
            else addresses
        )
        self._rows.gather(self._at[first], count, to)

    def copy_alone(self, worker: int, target: Block) -> None:
        """Copy one share into contiguous columns of its schema and length."""
        self._rows.gather(self._at[worker], 1, [column.data_ptr() for column in target.columns])

    def side_by_side(self, pool: BufferPool) -> Block:
        """Return a fresh block that all shares have a place in, in worker order."""
        block = self._block
        return Block(block.schema, block.batch_size[:-1], block.num_steps, pool=pool)


def _blank(block: Block, path: Any, worker: int, begin: int, count: int, value: int) -> None:
    rows = block.column(path)[worker].narrow(block.time_dim - 1, begin, count)
    if isinstance(rows, torch.Tensor):
        rows.fill_(value)
    else:
        rows.copy_(ObjectColumn.blanks(rows.shape, rows.blank))


def mask_last(mask: Any, ids: Any, flags: Any, excess: int) -> int:
    """Mask the last frames of a batch; return how many of them were flagged.

    Args:
        mask: of the batch, bool.
        ids: of its trajectories.
        flags: bool; None without any.
        excess: how many frames.
    """
    last = mask.nonzero()[-excess:].unbind(1)
    mask[last] = False
    ids[last] = -1
    if flags is None:
        return 0
    flagged = int(flags[last].sum())
    flags[last] = False
    return flagged


def arrangement_dim(cat_results: Any) -> int | None:
    """Return what a collector's ``cat_results`` means; see `ShareLayout.dim`.

    Raises:
        InvalidArgumentError: it's none of ``"stack"``, 0, -1 and None.
    """
    if cat_results is None or cat_results == "stack":
        return None
    if isinstance(cat_results, str) or integer("cat_results", cat_results) not in (0, -1):
        raise InvalidArgumentError(f"cat_results: expected 'stack', 0 or -1, got {cat_results!r}")
    return int(cat_results)
