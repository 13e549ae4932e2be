"""The service of an environment worker, run in the test's process."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from gleanrl._arrays.schema import Field, Schema
from gleanrl._process.remote_errors import RemoteTraceback
from gleanrl._process.shared_columns import HALT, ITEM, STEP, SharedRows, SharedSegment
from gleanrl._process.worker_main import WorkerContext
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl.envs import GymWrapper
from gleanrl.envs.vector.factories import factories
from gleanrl.envs.vector.worker import BIND_CODE, RUN_CODE, STEP_CODE, BlockPlan, MemberShare
from gleanrl.errors import WorkerError
from tests.envs.vector.makers import SCRIPT, oracle, streams
from tests.fakes import FakeFailure, RaisingEnv

ACTION = {("action",): Field(torch.Size((2,)), torch.float32)}


@pytest.fixture
def stations():
    """Yield the owner's segment, and a worker's view of it."""
    owner = SharedSegment(1)
    worker = SharedSegment(1, owner.descriptor)
    yield owner, WorkerContext(0, worker, worker.progress(0))
    owner.close()
    worker.close()


def bound(servant, owner, num_envs, num_steps):
    schema = Schema({**servant.schema(), **ACTION})
    region = owner.region("rows", SharedRows(schema, torch.Size((num_envs,)), num_steps))
    block = owner.block(region)
    block.column(("action",)).zero_()
    servant.bind(BlockPlan(region, False))
    return block


def test_rows_are_written_into_the_owners_block(stations):
    owner, station = stations
    servant = MemberShare(factories(2, oracle, streams(2)), first=1)(station)
    servant.new_steppers(EpisodeRules())
    block = bound(servant, owner, 4, 3)
    for t in range(3):
        servant.signal(STEP_CODE)
        assert station.progress[STEP] == t + 1 and station.progress[ITEM] == 0
    assert block.column(("next", "observation"))[1:3, 0].tolist() == [[0, 0, 1], [1, 0, 1]]
    carried = {path: leaf.copy() for path, leaf in servant.root().items()}
    servant.signal(BIND_CODE)
    assert block.column(("observation",))[1:3, 0].tolist() == carried[("observation",)].tolist()
    servant.signal(STEP_CODE)
    servant.stop(1)
    servant.reset_rows([True, False])
    servant.load(_root(), [1, 2])
    assert servant.steps().tolist() == [1, 2]
    servant.close()


def test_run_stops_when_the_pool_is_closed(stations):
    owner, station = stations
    servant = MemberShare(factories(1, oracle, None), first=0)(station)
    servant.new_steppers(EpisodeRules())
    block = bound(servant, owner, 1, 3)
    block.column(("next", "observation")).fill_(-1)
    servant.signal(STEP_CODE)
    owner.progress(0)[HALT] = 1
    servant.signal(RUN_CODE)
    assert block.column(("next", "observation"))[0].tolist() == [[0, 0, 1], [-1] * 3, [-1] * 3]
    servant.close()


def _root():
    env = oracle(7)
    return torch.stack([env.reset(), env.reset()])


def test_faults_are_sent_unchanged(stations):
    owner, station = stations
    made = factories(2, [oracle, lambda: GymWrapper(RaisingEnv(2, script=SCRIPT))], None)
    servant = MemberShare(made, first=3)(station)
    servant.new_steppers(EpisodeRules(max_steps=5))
    bound(servant, owner, 5, 3)
    servant.signal(STEP_CODE)
    with pytest.raises(StepFault) as caught:
        servant.signal(STEP_CODE)
    fault = pickle.loads(pickle.dumps(caught.value)).counted_from(3)
    assert (fault.t, fault.env, fault.during) == (1, 4, "step") and isinstance(fault.cause, FakeFailure)
    assert isinstance(fault.cause.__cause__, RemoteTraceback)


def test_unknown_signals_are_refused(stations):
    _, station = stations
    servant = MemberShare(factories(1, oracle, None), first=0)(station)
    with pytest.raises(WorkerError, match="before a block was bound"):
        servant.signal(STEP_CODE)
    with pytest.raises(WorkerError, match="no signal"):
        servant.signal(b"?")


def test_failing_construction_closes_the_other_members(stations):
    _, station = stations
    made = []

    def build():
        if made:
            raise FakeFailure
        made.append(oracle())
        return made[0]

    with pytest.raises(FakeFailure):
        MemberShare(factories(2, build, None), first=0)(station)
    assert made[0].is_closed and station.progress[ITEM] == 1


def test_requests_reach_the_members(stations):
    _, station = stations
    servant = MemberShare(factories(2, oracle, streams(2)), first=0)(station)
    numbers = itertools.count(1)

    def asked(name, requests):
        return pickle.loads(pickle.dumps(servant.answer(next(numbers), name, requests)))

    asked("set_seed", {0: (4, False), 1: (5, False)})
    fresh = asked("reset", {1: (None, {})})
    assert fresh[1]["observation"].tolist() == [1, 0, 0]
    asked("reset", {0: (None, {})})
    root = fresh[1].set("action", torch.zeros(2))
    assert asked("step", {0: (root,), 1: (root,)})[0]["observation"].tolist() == [0, 0, 1]
    assert asked("attribute", {0: ("stream",), 1: ("stream",)}) == {0: (False, 0), 1: (False, 1)}
    assert asked("attribute", {0: ("hello",)})[0][0]
    assert asked("call", {1: ("hello", ("you",), {})})[1] == "hello you from 1"
    states = asked("state_dict", {0: (), 1: ()})
    asked("parse_state", {i: (state, True) for i, state in states.items()})
    asked("adopt_state", {0: (), 1: ()})
