"""Both sides see lent memory, which is reused after its return and never taken for another process's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._os.files import Descriptors, memory, pipe
from gleanrl._process import shared_columns
from gleanrl.collectors.batch_columns import IDS
from gleanrl.collectors.distributed.local_transport import NodeMemory, Offer, SharedBlockPool
from gleanrl.errors import CapacityError
from tests.leaks import Holdings

SCHEMA = Schema({("x",): Field(torch.Size((3,)), torch.float32), IDS: Field(torch.Size(), torch.int64)})
LISTS = Schema({("x",): Field(torch.Size((-1,)), torch.float32), IDS: Field(torch.Size(), torch.int64)})


@pytest.fixture
def offer() -> Iterator[Offer]:
    """Yield an offer of two blocks; the test must leave no resource behind."""
    before = Holdings.now()
    yield Offer.of(2)
    before.check()


def filled(block: Block, value: float) -> Block:
    for column in block.columns:
        column.fill_(value)
    return block


def test_borrower_reads_the_memory_of_the_lender(offer: Offer) -> None:
    lender = SharedBlockPool(offer)
    borrowed = NodeMemory.opened(lender.name, offer)
    assert borrowed is not None
    for number, num_steps in enumerate((5, 4)):  # a shorter batch uses the first steps of a block
        block = lender.block(SCHEMA, (2,), num_steps)
        assert block is not None
        place = lender.lend(number, filled(block, number).batch())
        assert place is not None and place.block == number
        share = borrowed.share(place)
        assert share.view().shape == (2, num_steps) and bool((share.view() == number).all())
        assert share.view().names == [None, "time"]
        filled(block, 7.0)
        assert bool((share.view() == 7).all()), "it's the same memory"
        filled(block, number)


def test_block_is_reused_only_after_its_return(offer: Offer) -> None:
    lender = SharedBlockPool(offer)
    borrowed = NodeMemory.opened(lender.name, offer)
    assert borrowed is not None

    def lent(order: int) -> int | None:
        block = lender.block(SCHEMA, (), 5)
        place = block and lender.lend(order, filled(block, order).batch())
        return None if place is None else place.block

    assert [lent(0), lent(1), lent(2)] == [0, 1, None]
    lender.reclaim(1)
    assert lender.block(SCHEMA, (), 6) is None, "longer blocks would move those that are lent"
    assert [lent(3), lent(4)] == [0, None]
    lender.reclaim(4)
    longer = lender.block(SCHEMA, (), 6)
    assert longer is not None and longer.num_steps == 6
    place = lender.lend(5, filled(longer, 5.0).batch())
    assert place is not None and borrowed.share(place).view().shape == (6,)


def test_batch_outside_shared_blocks_is_copied_or_refused(offer: Offer) -> None:
    lender = SharedBlockPool(offer)
    borrowed = NodeMemory.opened(lender.name, offer)
    assert borrowed is not None
    batch = filled(Block(SCHEMA, (2,), 5), 3.0).batch()
    place = lender.lend(0, batch)
    assert place is not None
    assert bool((borrowed.share(place).view() == batch).all())
    assert lender.block(LISTS, (2,), 5) is None
    assert lender.lend(1, batch) is not None and lender.lend(2, batch) is None


def test_scarce_memory_lends_no_block(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    lender = SharedBlockPool(offer)
    monkeypatch.setattr(shared_columns, "available_memory", lambda: 100)
    assert lender.block(SCHEMA, (), 5) is None
    with pytest.raises(CapacityError):
        SharedBlockPool(offer)


def test_memory_of_other_processes_is_not_opened(offer: Offer) -> None:
    lender = SharedBlockPool(offer)
    held = Descriptors()
    others = [*held.take(memory("gleanrl")), *held.take(pipe())]
    os.truncate(others[0], 4096)
    assert all(NodeMemory.opened(lender.name._replace(descriptor=other), offer) is None for other in others)
    assert NodeMemory.opened(None, offer) is None
    assert NodeMemory.opened(lender.name, Offer.of(2)) is None, "that of a node that was given another token"
    assert NodeMemory.opened(lender.name._replace(descriptor=10**6), offer) is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert NodeMemory.opened(lender.name._replace(process=ended.pid), offer) is None
    assert os.fstat(others[0]).st_size == 4096


def test_borrowed_share_outlives_its_lender(offer: Offer) -> None:
    lender = SharedBlockPool(offer)
    borrowed = NodeMemory.opened(lender.name, offer)
    block = lender.block(SCHEMA, (), 5)
    assert borrowed is not None and block is not None
    place = lender.lend(0, filled(block, 2.0).batch())
    assert place is not None
    del lender, block
    share = borrowed.share(place)
    del borrowed
    assert bool((share.view() == 2).all())
