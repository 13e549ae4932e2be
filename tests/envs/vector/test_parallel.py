"""`ParallelEnv` adds processes, limits and shared memory to the common behaviour of batches."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import ReplayBuffer
from gleanrl.data.replay_buffers.storages import LazyTensorStorage
from gleanrl.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    RewardSum,
    StepCounter,
    TargetReturn,
    TrajCounter,
)
from gleanrl.errors import ClosedError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.contract.helpers import check_stream
from tests.envs.vector.makers import SCRIPT, equal, nested, oracle, streams
from tests.fakes_base import CountingEnv, TeamEnv, TwoActionEnv
from tests.leaks import Holdings


@pytest.fixture
def make():
    """Make batches and close them; the test must leave no process or descriptor."""
    ParallelEnv(1, oracle).reset()  # start the fork server now, because it outlives the test
    gc.collect()
    before = Holdings.now()
    made = []

    def build(*args, kind=ParallelEnv, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield build
    for env in made:
        env.close()
    made.clear()
    before.check()


@pytest.mark.parametrize("limit", [3, 5])
@pytest.mark.parametrize(
    "inner",
    [
        lambda: Compose(RewardSum(), StepCounter()),
        lambda: StepCounter(4),
        lambda: TargetReturn(100.0),
        lambda: CatFrames(2, dim=-1, in_keys=["observation"]),
        lambda: Compose(InitTracker(), TrajCounter()),
    ],
    ids=["sum, count", "limit", "target", "frames", "marks"],
)
def test_transformed_members_reset_where_an_outer_limit_ends_an_episode(make, inner, limit):
    found = []
    for kind in (SerialEnv, ParallelEnv):
        batch = make(2, lambda: TransformedEnv(CountingEnv(SCRIPT), inner()), kind=kind)
        env = TransformedEnv(batch, StepCounter(limit, step_count_key="n"))
        rollout = env.rollout(17, break_when_any_done=False)
        collector = SyncDataCollector(
            env, lambda td: td.set("action", torch.zeros(2, 2)), frames_per_batch=34
        )
        found.append([rollout.exclude("action"), collector.next().exclude("action"), collector.next()])
        collector.shutdown(close_env=False)
    for serial, parallel in zip(*found, strict=True):
        assert equal(serial, parallel)


def test_nested_batch_resets_as_a_whole(make):
    """The outer limit ends the only member of each inner batch, so the whole inner batch is reset."""
    found = []
    for kind in (SerialEnv, ParallelEnv):

        def member(kind=kind):
            batch = kind(1, lambda: TransformedEnv(CountingEnv(SCRIPT), Compose(RewardSum(), StepCounter())))
            return TransformedEnv(batch, InitTracker())

        env = TransformedEnv(make(2, member, kind=SerialEnv), StepCounter(3, step_count_key="n"))
        found.append(env.rollout(12, break_when_any_done=False).exclude("action"))
    assert equal(*found)


@pytest.mark.parametrize(
    "create",
    [
        lambda: GymEnv("CartPole-v1"),
        lambda: GymEnv("Pendulum-v1", device="cpu"),
        nested,
        lambda: CountingEnv(SCRIPT),
        lambda: CountingEnv(SCRIPT, (2,)),
        lambda: TeamEnv(SCRIPT, nested_flags=True),
        lambda: TwoActionEnv(SCRIPT),
    ],
    ids=["cartpole", "pendulum", "nested", "base", "batch", "team", "actions"],
)
def test_data_equal_serial_env(make, create):
    found = []
    for kind in (SerialEnv, ParallelEnv):
        env = make(3, create, kind=kind)
        env.set_seed(5)
        torch.manual_seed(1)
        rollout = env.rollout(7, break_when_any_done=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            collector = SyncDataCollector(
                env, None, frames_per_batch=30, total_frames=66, max_frames_per_traj=4
            )
        batches = [batch.reshape(-1) for batch in collector]
        found.append([rollout.reshape(-1), *batches])
    for left, right in zip(*found, strict=True):
        assert equal(left, right)


def test_policy_sees_the_same_rows_as_with_serial_env(make):
    found = []
    for kind in (SerialEnv, ParallelEnv):
        env = make(4, oracle, create_env_kwargs=streams(4), kind=kind)
        torch.manual_seed(0)
        policy = nn.Linear(3, 2)
        found.append(list(SyncDataCollector(env, policy, frames_per_batch=40, total_frames=120)))
    assert all(equal(*pair) for pair in zip(*found, strict=True))
    check_stream(found[1], SCRIPT)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_num_processes_puts_several_environments_in_a_process(make, num_processes):
    env = make(5, oracle, create_env_kwargs=streams(5), num_processes=num_processes)
    assert env.set_seed(1) == 5
    batches = list(SyncDataCollector(env, None, frames_per_batch=50, total_frames=100))
    check_stream(batches, SCRIPT)
    assert batches[0]["observation"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert len(env.processes) == num_processes


def test_a_callable_that_returns_one_environment_gives_each_a_copy_of_it(make):
    env = oracle(3)
    batch = make(3, lambda: env, num_processes=2)
    assert (batch.rollout(3)["observation"][..., 0] == 3).all() and batch.episode == [0] * 3
    assert not env.is_closed and not env.usage.started


def test_batches_are_copies(make):
    env = make(2, oracle, create_env_kwargs=streams(2))
    batches, copies = [], []
    for batch in SyncDataCollector(env, None, frames_per_batch=20, total_frames=100):
        batches.append(batch)
        copies.append(batch.clone())
    assert all(equal(*pair) for pair in zip(batches, copies, strict=True))
    again = make(2, oracle)
    same = list(SyncDataCollector(again, None, frames_per_batch=8, total_frames=24, return_same_td=True))
    assert same[0] is same[2]


def test_two_rollouts_take_turns(make):
    env = make(2, oracle, create_env_kwargs=streams(2))
    collector = iter(SyncDataCollector(env, None, frames_per_batch=10, total_frames=-1))
    first = next(collector)
    env.rollout(3)
    with pytest.warns(UserWarning, match="outside the collector"):
        second = next(collector)
    check_stream([first, second], SCRIPT, fresh_batches=True)


def test_rollout_after_a_stopped_one_calls_back_at_every_step(make):
    env = make(3, oracle, create_env_kwargs=streams(3))
    batch = env.rollout(100)
    assert bool(batch["next", "done"][:, -1].any()) and not bool(batch["next", "done"][:, :-1].any())
    seen = []
    env.rollout(4, callback=lambda env, td: seen.append(td["observation"].clone()), break_when_any_done=False)
    assert len(seen) == 4


def test_nested_batches_use_the_same_fork_server(make):
    inner = [ParallelEnv(2, oracle, create_env_kwargs=streams(2))] * 2
    env = make(2, inner)
    assert env.batch_size == (2, 2) and env.set_seed(3) == 6
    env.reset()
    assert [[resets[-1][0] for resets in each] for each in env.resets] == [[3, 4], [5, 6]]
    serial = make(2, partial(SerialEnv, 2, oracle, create_env_kwargs=streams(2)), kind=SerialEnv)
    serial.reset()
    for policy in (None, nn.Linear(3, 2)):
        batches = []
        for each in (env, serial):
            torch.manual_seed(0)
            batches.append(each.rollout(7, policy, break_when_any_done=False))
        assert batches[0]["observation"][..., 0, 0].tolist() == [[0, 1], [0, 1]]
        assert equal(*batches)
    assert not inner[0].is_started


def test_the_last_reference_ends_the_workers():
    env = ParallelEnv(2, oracle)
    env.reset()
    before = Holdings.now()
    pids = env.processes
    del env
    gc.collect()
    assert len(pids) == 2 and Holdings.now().descriptors != before.descriptors
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            while True:
                os.kill(pid, 0)


def test_single_environment_may_be_serial(make):
    env = make(1, oracle, serial_for_single=True, num_processes=1, mp_start_method="spawn")
    assert type(env) is SerialEnv
    assert type(make(2, oracle, serial_for_single=True)) is ParallelEnv


def test_invalid_options_are_refused(make):
    with pytest.raises(InvalidArgumentError, match="mp_start_method"):
        make(2, oracle, mp_start_method="thread")
    with pytest.raises(InvalidArgumentError, match="num_processes"):
        make(2, oracle, num_processes=3)
    with pytest.raises(InvalidTypeError, match="timeouts"):
        make(2, oracle, timeouts=5)
    with pytest.raises(UnsupportedError, match="close_s"):
        make(2, oracle, metadata_from_workers=False, shutdown_timeout=3.0)
    for name in ("num_processes", "num_sub_threads", "num_threads"):
        with pytest.raises(InvalidArgumentError, match=name):
            make(2, oracle, **{name: 0})


def test_num_sub_threads_sets_the_threads_of_workers(make):
    class Threads(CountingEnv):
        def threads(self):
            return torch.get_num_threads()

    assert make(2, Threads).threads() == [1, 1]
    assert make(2, Threads, num_sub_threads=2).threads() == [2, 2]


def test_unpicklable_attributes_are_reported(make):
    class Locked(CountingEnv):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(RuntimeError, match="can't be sent"):
        make(2, Locked).lock  # noqa: B018


def test_methods_of_a_closed_batch_are_refused(make):
    env = make(2, oracle)
    hello = env.hello
    env.close()
    with pytest.raises(ClosedError):
        hello("you")


def test_data_on_another_device_use_tensordicts(make):
    env = make(2, oracle, device="meta")
    assert isinstance(env.make_stepper(), TensorDictStepper)


def test_buffer_stores_batches_of_a_parallel_env(make):
    """The guide's example of a ParallelEnv, with the buffer's default sampler."""
    env = make(4, lambda: GymEnv("CartPole-v1"))
    memory = ReplayBuffer(storage=LazyTensorStorage(200, ndim=2))
    for data in SyncDataCollector(env, None, frames_per_batch=40, total_frames=120):
        memory.extend(data)
    assert memory[:].numel() == 120 and memory.sample(8).numel() == 8
