"""Batch columns are filled in once a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Schema
from gleanrl._rollout.plan import plan_rollout
from gleanrl.collectors.batch_columns import IDS, BatchColumns
from gleanrl.collectors.frame_accounting import Numbering, TrajectoryIds
from gleanrl.collectors.source import CollectionOptions
from gleanrl.errors import NonFiniteError
from tests.collectors.helpers import NEVER
from tests.fakes_base import CountingEnv


def made(numbering: Numbering | None = None) -> tuple[BatchColumns, Block]:
    """Return columns of two environments and a block of three steps; the first environment ends at its second."""
    env = CountingEnv(NEVER, (2,))
    plan = plan_rollout(env, None)
    columns = BatchColumns(env, plan, CollectionOptions(), numbering)
    block = plan.block(3, columns.schema)
    for column in block.columns:
        column.zero_()
    block.column(("next", "done"))[0, 1] = True
    block.column(("action",))[1, 2] = 0.5
    block.num_complete = 3
    return columns, block


@pytest.mark.parametrize("numbering", [None, Numbering(1, 3)])
def test_trajectory_ids_are_filled_in(numbering: Numbering | None) -> None:
    columns, block = made(numbering)
    begin = TrajectoryIds.begin(2)
    done = columns.complete(block, 3, begin)
    expected = torch.tensor([[0, 0, 2], [1, 1, 1]])
    assert torch.equal(block.column(IDS), expected if numbering is None else numbering(expected))
    assert (done.frames, done.flagged, done.excess) == (6, 0, 0)
    assert (done.trajectories.ids.tolist(), done.trajectories.steps.tolist()) == ([2, 1], [1, 3])
    assert columns.where(block, begin, 0) == ((2 if numbering is None else 7), 1)
    action = columns.action(block, 1, 2)
    assert action is not None and action.tolist() == [0.5, 0.5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_checked_on_their_device(dtype: torch.dtype) -> None:
    columns, block = made()
    path = ("next", "observation")
    fields = {**columns.schema.items(), path: replace(columns.schema[path], dtype=dtype)}
    columns.schema = Schema(fields, columns.schema.groups)
    found = [column.to("cuda") for column in block.columns]
    found[columns.schema.index(path)] = found[columns.schema.index(path)].to(dtype)
    there = Block(columns.schema, block.batch_size[:-1], 3, columns=found)
    assert columns.complete(there, 3, TrajectoryIds.begin(2)).frames == 6
    there.column(path)[1, 2] = torch.inf
    with pytest.raises(NonFiniteError, match="environment 1 .* step 2"):
        columns.complete(there, 3, TrajectoryIds.begin(2))


def test_frames_of_some_steps() -> None:
    columns, block = made()
    assert [columns.frames(block, count) for count in (0, 1, 3)] == [0, 2, 6]
