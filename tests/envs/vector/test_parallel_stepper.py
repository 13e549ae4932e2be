"""Worker processes step their environments into the rows of a block."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import ParallelEnv, SerialEnv
from gleanrl.errors import UnsupportedError
from tests.envs.vector.makers import oracle, streams, with_goal
from tests.fakes import Script
from tests.fakes_base import CountingEnv

ACTION = {("action",): Field(torch.Size((2,)), torch.float32)}


@pytest.fixture(scope="module")
def env():
    """Return three streams in two processes."""
    made = ParallelEnv(3, oracle, create_env_kwargs=streams(3), num_processes=2)
    yield made
    made.close()


def run(stepper, blocks, ready=False):
    """Fill blocks; return the content of each when it was full."""
    out = []
    for block in blocks:
        block.column(("action",)).zero_()
        stepper.bind(block, ready)
        if ready:
            stepper.run(block)
        else:
            for t in range(block.num_steps):
                stepper.step(t)
        out.append({path: block.column(path).clone() for path in block.schema.paths})
    return out


def schema_of(stepper):
    return Schema({**stepper.schema().items(), **ACTION})


@pytest.mark.parametrize("ready", [False, True])
def test_shared_and_ordinary_blocks_get_the_same_rows(ready):
    found = []
    for kind, lent in ((SerialEnv, False), (ParallelEnv, True), (ParallelEnv, False)):
        env = kind(3, oracle, create_env_kwargs=streams(3))
        stepper = env.make_stepper()
        schema = schema_of(stepper)
        if lent:
            blocks = (stepper.block(schema, size) for size in (4, 4, 6, 4))
        else:
            one = Block(schema, (3,), 4)
            blocks = iter((one, one, Block(schema, (3,), 6), Block(schema, (3,), 4)))
        found.append(run(stepper, blocks, ready))
        env.close()
    for others in found[1:]:
        for mine, other in zip(found[0], others, strict=True):
            assert all(torch.equal(mine[path], other[path]) for path in mine)


def test_same_arguments_return_the_same_block(env):
    stepper = env.make_stepper()
    schema = schema_of(stepper)
    block = stepper.block(schema, 4)
    assert stepper.block(schema, 4) is block and block.borrowed and stepper.block(schema, 5) is not block


def test_last_stepper_holds_the_lease(env):
    first, second = env.make_stepper(EpisodeRules(max_steps=2)), env.make_stepper()
    first.schema()
    assert not first.disturbed
    second.schema()
    assert first.disturbed and not second.disturbed
    first.reset()
    assert second.disturbed and not first.disturbed
    filled = run(first, [first.block(schema_of(first), 6)])[0]
    assert int(filled["next", "observation"][..., 2].max()) == 2
    env.reset()
    assert first.disturbed


def test_carry_continues_from_block_to_block(env):
    stepper = env.make_stepper()
    stepper.reset()
    episodes = stepper.root()[("observation",)][:, 1]
    stepper.reset(torch.tensor([False, False, True]))
    assert (stepper.root()[("observation",)][:, 1] - episodes).tolist() == [0, 0, 1]
    stepper.reset(torch.zeros(3, dtype=torch.bool))
    root = env.reset()
    stepper.load(root)
    assert torch.equal(stepper.root()[("observation",)], root["observation"])


def test_without_reset_when_done_members_are_not_reset(env):
    stepper = env.make_stepper(EpisodeRules(reset_when_done=False))
    filled = run(stepper, [stepper.block(schema_of(stepper), 9)])[0]
    steps = filled["next", "observation"][..., 2]
    assert torch.equal(steps[:, 1:] - steps[:, :-1], torch.ones(3, 8))
    stepper.bind(stepper.block(schema_of(stepper), 9), False)
    stepper.step(0)
    stepper.stop(1)


def test_unlike_columns_are_refused():
    env = ParallelEnv(2, [oracle, with_goal])
    with pytest.raises(UnsupportedError, match="goal"):
        env.make_stepper().schema()
    env.close()


class Interrupting(CountingEnv):
    """Sends Ctrl-C to a process once, in the middle of a run."""

    def __init__(self, process, step):
        super().__init__(Script(ending="never"))
        self.process, self.left = process, step

    def _step(self, tensordict):
        self.left -= 1
        if self.left == 0:
            os.kill(self.process, signal.SIGINT)
        return super()._step(tensordict)


def test_an_interrupted_run_of_random_actions_counts_its_frames():
    streams = [{"process": os.getpid(), "step": n} for n in (50, -1)]
    # One process, so the environments step in turn.
    made = ParallelEnv(2, Interrupting, create_env_kwargs=streams, num_processes=1)
    collector = SyncDataCollector(made, None, frames_per_batch=40_000, total_frames=80_000)
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    stats = collector.stats()
    assert 98 <= stats.discarded < 40_000 and stats.stepped == stats.discarded
    collector.shutdown()
