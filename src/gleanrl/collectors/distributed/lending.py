"""Memory that a node lends to its owner: where both are on one machine, batches stand in blocks that both map."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from gleanrl.block import Block, copy_columns
from gleanrl.collectors.columns import IDS
from gleanrl.collectors.distributed.attending import Line, NodeEnd, PipeNames
from gleanrl.collectors.distributed.shares import LentShare
from gleanrl.errors import CapacityError
from gleanrl.schema import Schema
from gleanrl.system.descriptors import Descriptors, memory_of
from gleanrl.tree import as_key, flatten
from gleanrl.workers.segment import OWN, Region, Rows, Segment

_MEMORY = "/memfd:gleanrl"
"""What descriptors of segments show at."""
_TOKEN_BYTES = 16


class Offer(NamedTuple):
    """What an owner says to a node that is made."""

    token: bytes
    """Random bytes, which the node writes into its memory: whoever reads them there sees the same memory."""
    num_blocks: int
    """Batches that the node may have lent at once."""

    @classmethod
    def of(cls, num_blocks: int) -> Offer:
        """Return one that was never made before."""
        return cls(os.urandom(_TOKEN_BYTES), num_blocks)


class Name(NamedTuple):
    """What a process calls memory of its own, and the pipes through which its owner talks to it."""

    process: int
    descriptor: int
    pipes: PipeNames


class Place(NamedTuple):
    """Where a batch stands in the memory of a node."""

    layout: bytes
    """The region and the device that batches say, pickled: they are mostly those of the last batch."""
    block: int
    num_steps: int


class Lender:
    """The node's side: gives blocks to fill, as long as there are any that aren't lent.

    A block belongs to the owner from the answer that names it until an order says that its batch isn't needed any
    more. Nobody else has to see to the memory: the kernel frees it when neither process has it any longer, however
    they end.

    Args:
        offer: the owner's.

    Raises:
        CapacityError: the machine hasn't the memory.
    """

    def __init__(self, offer: Offer) -> None:
        self._segment = Segment(1)
        memoryview(self._segment.progress(0)).cast("B")[OWN * 8 : OWN * 8 + _TOKEN_BYTES] = offer.token
        self._num_blocks = offer.num_blocks
        self._region: Region | None = None
        self._blocks: list[Block] = []
        self._layout: bytes | None = None
        self._device: torch.device | None = None
        self._lent: dict[int, int] = {}
        """The orders whose batches stand in blocks, by block."""
        self._given = 0
        """The block that was given to fill last."""
        self.end = NodeEnd()
        """Of the pipes."""

    @property
    def name(self) -> Name:
        """What the memory and the pipes are called."""
        return Name(os.getpid(), self._segment.descriptor, self.end.names)

    def take_back(self, before: int) -> None:
        """Have the blocks of orders with numbers below that again."""
        self._lent = {block: number for block, number in self._lent.items() if number >= before}

    def block(self, schema: Schema, batch_size: Sequence[int], num_steps: int) -> Block | None:
        """Return a block to fill; None if there is none: all are lent, memory is short, or it would have lists."""
        free = next((number for number in range(self._num_blocks) if number not in self._lent), None)
        if (
            free is None
            or schema.lists
            or not self._has_room(Rows(schema, torch.Size(batch_size), num_steps))
        ):
            return None
        self._given = free
        return self._blocks[free].leading(num_steps)

    def lend(self, order: int, batch: TensorDictBase) -> Place | None:
        """Lend the block that a batch stands in, or one that it is copied into; None if there is none.

        Args:
            order: the number of the order that it was collected for.
            batch: ``[*batch, T]``, on the CPU.
        """
        if not self._stands_in_given(batch):
            leaves = flatten(batch)
            block = self.block(Schema.of(batch), batch.batch_size[:-1], batch.batch_size[-1])
            if block is None:
                return None
            copy_columns(block.columns, [*leaves.values()])
        self._lent[self._given] = order
        if self._layout is None or self._device != batch.device:
            self._layout, self._device = pickle.dumps((self._region, batch.device)), batch.device
        return Place(self._layout, self._given, batch.batch_size[-1])

    def _stands_in_given(self, batch: TensorDictBase) -> bool:
        ids: torch.Tensor = batch.get(as_key(IDS))
        blocks = self._blocks
        return bool(blocks) and blocks[self._given].column(IDS).data_ptr() == ids.data_ptr()

    def _has_room(self, rows: Rows) -> bool:
        """Return whether blocks hold such batches; they are laid out anew where that disturbs nobody."""
        now = self._region and self._region.rows
        if (
            now
            and (now.schema, now.batch_size) == (rows.schema, rows.batch_size)
            and now.num_steps >= rows.num_steps
        ):
            return True
        if self._lent:
            return False
        try:
            self._region = region = self._segment.region("batches", rows, self._num_blocks)
        except CapacityError:
            return False
        self._blocks = [self._segment.block(region, number) for number in range(self._num_blocks)]
        self._layout = None
        return True


class Borrowed:
    """The owner's side: the memory of one node, seen from here.

    Args:
        held: its descriptor; it is closed with this object, and what was borrowed stays readable.
        line: to the node.
    """

    def __init__(self, held: Descriptors, descriptor: int, line: Line) -> None:
        self._held, self.line = held, line
        self._segment = Segment(1, descriptor)
        self._layout = b""
        self._blocks: list[Block] = []
        self._device: torch.device | None = None

    @classmethod
    def opened(cls, name: Name | None, offer: Offer) -> Borrowed | None:
        """Return a node's memory; None if it has none, or it can't be seen from here, as that of another machine."""
        if name is None:
            return None
        shown = f"/proc/{name.process}/fd/{name.descriptor}"
        try:
            if not os.readlink(shown).startswith(_MEMORY):
                return None
            held = Descriptors()
            (descriptor,) = held.take(memory_of(name.process, name.descriptor))
            if os.pread(descriptor, _TOKEN_BYTES, OWN * 8) != offer.token:
                return None  # another machine's process of that number
            line = Line(held, name.process, name.pipes)
            if not os.path.samestat(os.stat(shown), os.fstat(descriptor)):
                return None  # it ended meanwhile, and another one has its number
            return cls(held, descriptor, line)
        except (OSError, CapacityError):
            return None

    def share(self, place: Place) -> LentShare:
        """Return a batch of which the node has told."""
        if place.layout != self._layout:
            region, self._device = pickle.loads(place.layout)
            self._blocks = [self._segment.block(region, number) for number in range(region.num_blocks)]
            self._layout = place.layout
        return LentShare(self._blocks[place.block].leading(place.num_steps), self._device)
