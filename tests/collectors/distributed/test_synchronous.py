"""Synchronous nodes each make a share of every batch."""

from __future__ import annotations

import pytest
import torch

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl.collectors.distributed.synchronous import Joining
from gleanrl.collectors.source import Budget
from gleanrl.collectors.workers.batching import ShareLayout
from tests.collectors.distributed.helpers import FATAL, check_rows
from tests.fakes import FakeFailure

SCHEMA = Schema({("x",): Field(torch.Size((2,)), torch.float32)})


@pytest.mark.parametrize("counts", [(5, 5), (5, 4), (2, 5)])
@pytest.mark.parametrize(
    ("dim", "batch_size"), [(None, ()), (None, (3,)), (0, ()), (0, (3,)), (-1, ()), (-1, (3,))]
)
def test_shares_are_joined_as_they_come(dim, batch_size, counts):
    arrangement = ShareLayout(dim, torch.Size(batch_size), 2)
    # Nodes that are joined along the batch have shares of one length.
    counts = counts if arrangement.in_time else (5, 5)
    blocks = [Block(SCHEMA, batch_size, count) for count in counts]
    for block in blocks:
        block.column(("x",)).copy_(torch.rand(block.column(("x",)).shape))
    joining = Joining(arrangement, {0: 5, 2: 5}, (blocks[0], None), BufferPool())
    joining.take(2, blocks[1])
    joining.take(0, blocks[0])
    parts = [block.batch() for block in blocks]
    expected = torch.stack(parts) if dim is None else torch.cat(parts, 0 if dim == 0 else len(batch_size))
    batch = joining.batch()
    assert batch.shape == expected.shape and bool((batch == expected).all()) and batch.names[-1] == "time"


def test_batches_have_a_share_of_each_node_in_their_order(together):
    source = together.source
    spent, batches = source.spent, []
    with pytest.warns(UserWarning, match="the last batch has 10 of 20 frames"):
        budget = Budget(2, 20, spent + 50)
    while source.more(budget):
        collected = source.next(budget)
        batches.append(source.deliver(collected, collected.batch))
    assert source.spent == spent + 50
    assert [batch.shape for batch in batches] == [(2, 10), (2, 10), (2, 5)]
    for batch in batches:
        assert batch.names == [None, "time"]
        assert [int(row["observation"][0, 0]) for row in batch] == [0, 1]
        assert [set((row % 2).tolist()) for row in batch["collector", "traj_ids"]] == [{0}, {1}]
    check_rows(batches)
    assert together.frames_per_batch == 20
    aside = source.collect(budget.extra_grant())
    assert source.deliver(aside, aside.batch).shape == (2, 10) and source.spent == spent + 50


def test_each_batch_uses_the_current_weights(together):
    puts = together.source.weights.puts
    for value in (2.0, 3.0, 3.0):
        together.policy.become(value)
        assert together.next()["action"].unique().tolist() == [value]
    assert together.source.weights.puts == puts + 2
    together.update_policy_weights_()
    version = together.policy_version
    assert together.next()["policy_version"].unique().tolist() == [version]


def test_failing_share_discards_the_other_shares(together):
    before = together.stats()
    together.policy.become(FATAL)
    with pytest.raises(FakeFailure):
        together.next()
    together.policy.become(0.0)
    batch = together.next()
    assert bool((batch["observation"][:, 0, 2] == 0).all())  # each share begins with a reset
    after = together.stats()
    assert after.delivered == before.delivered + 20
    assert after.stepped == after.delivered + after.discarded


def test_state_restores_counts_weights_and_ids(together):
    state = together.state_dict()
    assert sorted(state) == ["frames", "iter", "source", "worker0", "worker1"]
    together.policy.become(5.0)
    names = set(together.next()["collector", "traj_ids"].unique().tolist())
    together.load_state_dict(state)
    assert together.source.spent == state["frames"]
    assert together.policy.value.tolist() == state["worker0"]["policy_state_dict"]["module.value"].tolist()
    batch = together.next()
    assert not names & set(batch["collector", "traj_ids"].unique().tolist())
    del state["worker1"]
    with pytest.raises(KeyError, match="worker1"):
        together.load_state_dict(state)
