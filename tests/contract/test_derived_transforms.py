"""Derived transforms work as in other releases of this API: alone, in rollouts, in collectors and in batches."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.transforms import Compose, StepCounter, Transform, TransformedEnv
from tests.contract.derived_transforms import (
    KINDS,
    AddsAnEntry,
    ChangesInputs,
    FindsTheCollector,
    LooksAround,
    MapsAnEntry,
    MapsAnEntryElsewhere,
    MapsInputs,
    MapsRewards,
    OverridesInv,
    ReturnsAnotherTensorDict,
    SeesTheRequest,
)
from tests.contract.helpers import snapshot
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 1, 4))

each_kind = pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)


# ----------------------------------------------------------------------- in environments
def act(env):
    (key,) = env.action_keys
    value = env.full_action_spec[key].zero()
    value = value + 0.5 if value.is_floating_point() else value
    return lambda tensordict: tensordict.set(key, value.clone())


def by_hand(env, steps):
    """Return the rows of a loop of `step_and_maybe_reset`, as a user would write it."""
    root, rows, policy = env.reset(), [], act(env)
    for _ in range(steps):
        stepped, root = env.step_and_maybe_reset(policy(root))
        rows.append(stepped.clone())
    return torch.stack(rows, len(env.batch_size))


def same(batch, expected):
    """Check that both hold the same entries, bit by bit."""
    assert snapshot(batch).keys() == snapshot(expected).keys()
    for key, value in snapshot(expected).items():
        assert torch.equal(batch[key], value), key


def make(cls, batch_size=(), *others):
    env = TransformedEnv(CountingEnv(SCRIPT, batch_size), Compose(cls(), *others))
    return env, env.transform[0]


def checked(batch, env, transform):
    transform.check(batch)
    if hasattr(transform, "check_env"):
        transform.check_env(env.base_env)


def collected(env, frames):
    collector = SyncDataCollector(env, act(env), frames_per_batch=frames, total_frames=2 * frames)
    batches = list(collector)
    collector.shutdown()
    return torch.cat(batches, batches[0].ndim - 1)


@each_kind
@pytest.mark.parametrize("batch_size", [(), (2,)], ids=str)
def test_steps_rollouts_and_collectors_agree(cls, batch_size):
    env, transform = make(cls, batch_size)
    expected = by_hand(env, 8)
    checked(expected, env, transform)
    env, transform = make(cls, batch_size)
    rollout = env.rollout(8, act(env), break_when_any_done=False)
    checked(rollout, env, transform)
    same(rollout, expected)
    env, transform = make(cls, batch_size, StepCounter())
    batch = collected(env, 4 * env.numel())
    checked(batch, env, transform)
    same(batch.select(*expected.keys(True, True)), expected)


@each_kind
def test_as_members_of_a_batch_of_environments(cls):
    def member():
        return TransformedEnv(CountingEnv(SCRIPT), cls())

    batch = SerialEnv(2, member)
    rollout = batch.rollout(8, act(batch), break_when_any_done=False)
    expected = torch.stack([by_hand(member(), 8)] * 2)
    same(rollout, expected)
    check_env_specs(member())


@pytest.mark.slow
@each_kind
def test_as_members_in_processes(cls):
    expected = by_hand(TransformedEnv(CountingEnv(SCRIPT), cls()), 5)
    env = ParallelEnv(2, lambda: TransformedEnv(CountingEnv(SCRIPT), cls()))
    rollout = env.rollout(5, act(env), break_when_any_done=False)
    env.close()
    same(rollout, torch.stack([expected] * 2))


def test_the_collector_is_found():
    env, transform = make(FindsTheCollector)
    env.rollout(2)
    assert set(transform.found) == {"NoneType"} and transform.collector is None
    collector = SyncDataCollector(env, frames_per_batch=2, total_frames=2)
    list(collector)
    assert transform.found[-1] == "SyncDataCollector" and transform.collector is collector


def test_closing_the_environment_closes_transforms():
    class Closes(Transform):
        closed = 0

        def close(self):
            self.closed += 1

    env = TransformedEnv(CountingEnv(), Compose(StepCounter(), Closes()))
    env.close()
    env.close()
    assert env.transform[1].closed == 1
    assert env.transform[1].init(TensorDict()) is None


# ---------------------------------------------------------------------- buffers
def records(count=6):
    data = {"observation": torch.randn(count, 3), "action": torch.full((count, 2), 0.5)}
    flags = {"done": torch.zeros(count, 1, dtype=torch.bool)}
    after = TensorDict(
        {"observation": torch.randn(count, 3), "reward": torch.ones(count, 1), **flags}, [count]
    )
    return TensorDict({**data, **flags, "reward": torch.full((count, 1), -2.0), "next": after}, [count])


def through_a_buffer(cls):
    data = records()
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), transform=cls(), batch_size=6)
    buffer.extend(data)
    return data, buffer


@pytest.mark.parametrize(
    ("cls", "key", "expected"),
    [
        (MapsAnEntry, "observation", lambda data: data["observation"] + 10),
        (MapsAnEntryElsewhere, "angle", lambda data: data["observation"].sin()),
        (MapsRewards, "reward", lambda data: data["reward"].sign()),
        (AddsAnEntry, "twice", lambda data: data["observation"] * 2),
        (LooksAround, "observation", lambda data: data["observation"]),
        (SeesTheRequest, "observation", lambda data: data["observation"]),
        (ReturnsAnotherTensorDict, "clock", lambda data: data["observation"][..., 2:]),
    ],
)
def test_buffer_reads_apply_forward(cls, key, expected):
    data, buffer = through_a_buffer(cls)
    assert torch.equal(buffer[:][key], expected(data))
    assert torch.equal(buffer[1:3][key], expected(data)[1:3])


@pytest.mark.parametrize("cls", [ChangesInputs, MapsInputs, OverridesInv])
def test_buffer_writes_apply_the_inverse(cls):
    data, buffer = through_a_buffer(cls)
    assert (data["action"] == 0.5).all()  # the caller's tensor is unchanged
    assert (buffer.storage[:]["action"] == 0.25).all()


def test_overridden_forward_acts_in_buffers_only():
    class Forward(Transform):
        def forward(self, tensordict):
            return tensordict.set("observation", tensordict["observation"] * 0)

    env = TransformedEnv(CountingEnv(SCRIPT), Forward())
    assert env.rollout(2)["next", "observation"].any()
    _, buffer = through_a_buffer(Forward)
    assert not buffer.sample()["observation"].any()
