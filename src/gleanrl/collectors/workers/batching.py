"""Shares of several workers put together as one batch: along a dimension of workers, of environments, or in time."""

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
    """The form of a batch of shares ``[*batch, t]`` of B workers.

    Attributes:
        dim: None stacks the shares along a new first dimension, ``[B, *batch, t]``. 0 concatenates along the first
            dimension of the shares, which is time for a single environment. -1 concatenates in time.
        batch_size: of a share, without time.
        num_workers: B.
        masked: whether shares may be cut short. Stacked shares have a mask then, which is False for missing steps.
    """

    dim: int | None
    batch_size: torch.Size
    num_workers: int
    masked: bool = False

    def check(self) -> None:
        """Check that shares of different lengths can be put together.

        Raises:
            UnsupportedError: shares of several environments would be concatenated along the environments.
        """
        if self.masked and self.dim == 0 and self.batch_size:
            raise UnsupportedError(
                "preemptive_threshold: shares of several environments that were cut short can't be concatenated with "
                "cat_results=0; use 'stack' or -1"
            )

    @property
    def in_time(self) -> bool:
        """Whether the shares are concatenated in time."""
        return self.dim is not None and (self.dim == -1 or not self.batch_size)

    @property
    def size(self) -> torch.Size:
        """Batch size of a batch, without time."""
        if self.in_time:
            return self.batch_size
        if self.dim is None:
            return torch.Size((self.num_workers, *self.batch_size))
        return torch.Size((self.num_workers * self.batch_size[0], *self.batch_size[1:]))

    @property
    def num_envs(self) -> int:
        """Number of environments that step at once in a batch."""
        return self.size.numel()

    def steps(self, num_steps: int) -> list[int]:
        """Return the steps of each worker's share of a batch of `num_steps` steps."""
        if not self.in_time:
            return [num_steps] * self.num_workers
        each, more = divmod(num_steps, self.num_workers)
        return [each + (worker < more) for worker in range(self.num_workers)]

    def has_fixed_positions(self, block: Block, counts: Mapping[int, int]) -> bool:
        """Return whether the position of each share in the batch is known before the other shares are finished.

        Shares can then be copied one by one; see `arranged`.

        Args:
            block: see `batch`.
            counts: number of steps that each worker is to make.
        """
        all_full = len(counts) == self.num_workers and set(counts.values()) == {block.num_steps}
        return (
            all_full and not self.masked and not (self.in_time and self.batch_size) and not block.schema.lists
        )

    def schema(self, schema: Schema) -> Schema:
        """Return the columns of a batch, given the columns of the shares."""
        if not self.masked or self.in_time or MASK in schema:
            return schema
        return Schema({**schema.items(), MASK: Field(torch.Size(), torch.bool)}, schema.groups)

    def batch(self, block: Block, counts: Mapping[int, int], pool: BufferPool, lend: bool) -> Block:
        """Return the batch of the workers' shares.

        Args:
            block: ``[B, *batch, T]``, which the workers write again later.
            counts: number of steps of each worker's share, for workers that have one.
            pool: provides large columns.
            lend: whether the batch may be views of the block, valid until the next batch.
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
        """Return views of shares of equal length, ``[B, *batch, t]``, in the form of the batch."""
        if self.dim is None:
            return out
        # Blocks are contiguous, so that `reshape` returns views.
        columns = [column.reshape(-1, *column.shape[2:]) for column in out.columns]
        batch_size = (self.num_workers * out.batch_size[1], *out.batch_size[2:])
        return Block(out.schema, batch_size[:-1], batch_size[-1], columns=columns)

    def shares(self, batch: TensorDict, counts: Mapping[int, int]) -> Iterator[TensorDict]:
        """Yield views of each worker's share of a batch, without missing steps.

        Args:
            batch: the result of `batch`.
            counts: see `batch`.
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
        """Return a copy of the shares, concatenated in time."""
        out = Block(block.schema, self.batch_size, sum(counts.values()), pool=pool)
        dim = out.time_dim
        for target, column in zip(out.columns, block.columns, strict=True):
            begin = 0
            for worker, count in counts.items():
                target.narrow(dim, begin, count).copy_(column[worker].narrow(dim, 0, count))
                begin += count
        return out

    def _masked(self, block: Block, counts: Sequence[int], pool: BufferPool) -> Block:
        """Return a copy with a mask that is False for missing steps, whose values are zero and whose id is -1."""
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
    """Copies whole shares of a block one at a time: one call of the native core copies all columns.

    Args:
        block: ``[B, *batch, T]``, contiguous columns without object columns.
    """

    def __init__(self, block: Block) -> None:
        self._block, count = block, block.batch_size[0]
        self._sizes = [column.nbytes // count for column in block.columns]
        self._rows = Columns([column.data_ptr() for column in block.columns], self._sizes, count)
        self._numbers = torch.arange(count, device="cpu")
        self._at = [number.data_ptr() for number in self._numbers.unbind()]

    def copy(self, workers: Sequence[int], addresses: Sequence[int]) -> None:
        """Copy shares to their positions among the shares of all workers.

        Args:
            workers: numbers of the workers, ascending.
            addresses: addresses of the contiguous columns of `side_by_side`.
        """
        first, count = workers[0], len(workers)
        if workers[-1] - first >= count:  # not adjacent: one call for each
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
        """Copy one share into contiguous columns of the same schema and length."""
        self._rows.gather(self._at[worker], 1, [column.data_ptr() for column in target.columns])

    def side_by_side(self, pool: BufferPool) -> Block:
        """Return a new block with room for the shares of all workers, in worker order."""
        block = self._block
        return Block(block.schema, block.batch_size[:-1], block.num_steps, pool=pool)


def _blank(block: Block, path: Any, worker: int, begin: int, count: int, value: int) -> None:
    """Set `count` steps of a worker's share to `value`, from step `begin` on; object columns to their blank."""
    rows = block.column(path)[worker].narrow(block.time_dim - 1, begin, count)
    if isinstance(rows, torch.Tensor):
        rows.fill_(value)
    else:
        rows.copy_(ObjectColumn.blanks(rows.shape, rows.blank))


def mask_last(mask: Any, ids: Any, flags: Any, excess: int) -> int:
    """Mask the last `excess` frames of a batch in row-major order; return how many of them were flagged.

    Args:
        mask: mask of the batch, bool. False is written.
        ids: trajectory ids of the batch. -1 is written.
        flags: flags of nonfinite values, bool. False is written. None if there are none.
        excess: number of frames, at least 1.
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
    """Return the value of `ShareLayout.dim` for a collector's ``cat_results``.

    Raises:
        InvalidArgumentError: if it is none of ``"stack"``, 0, -1 and None.
    """
    if cat_results is None or cat_results == "stack":
        return None
    if isinstance(cat_results, str) or integer("cat_results", cat_results) not in (0, -1):
        raise InvalidArgumentError(f"cat_results: expected 'stack', 0 or -1, got {cat_results!r}")
    return int(cat_results)
