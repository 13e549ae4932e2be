"""After an error in a batch of environments, the ledger agrees with the environments' own step counts."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv
from gleanrl.envs.transforms import RewardSum, TransformedEnv
from gleanrl.errors import WorkerCrashedError
from tests.fakes import FakeFailure, OracleEnv, Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 4))


class Failing(OracleEnv):
    """Counts its steps; fails at its `at`-th step or at its `at`-th reset."""

    def __init__(self, at=None, during="step", **kwargs):
        super().__init__(**kwargs)
        self.at, self.during, self.made = at, during, 0

    def step(self, action):
        if self.during == "step" and self.made + 1 == self.at:
            raise FakeFailure("step")
        result = super().step(action)
        self.made += 1
        return result

    def reset(self, **kwargs):
        if self.during == "reset" and self.episode + 2 == self.at:
            self.at = None
            raise FakeFailure("reset")
        return super().reset(**kwargs)


class FailingBase(CountingEnv):
    """A failing environment derived from `EnvBase`."""

    def __init__(self, at, during):
        super().__init__(SCRIPT)
        self.at, self.during, self.made = at, during, 0

    def _step(self, tensordict):
        if self.during == "step" and self.made + 1 == self.at:
            raise FakeFailure("step")
        out = super()._step(tensordict)
        self.made += 1
        return out

    def _reset(self, tensordict=None, **kwargs):
        if self.during == "reset" and len(self.masks) + 1 == self.at:
            self.at = None
            raise FakeFailure("reset")
        return super()._reset(tensordict, **kwargs)


def gym(stream, at=None, during="step"):
    return GymWrapper(Failing(at, during, stream=stream, script=SCRIPT))


def base(stream, at=None, during="step"):
    return FailingBase(at, during)


def wrapped(stream, at=None, during="step"):
    return TransformedEnv(gym(stream, at, during), RewardSum())


def made(env):
    """Return the steps that one environment counted."""
    inner = env.base_env if isinstance(env, TransformedEnv) else env
    return inner.made if isinstance(inner, FailingBase) else inner.unwrapped.made


def own_count(env):
    """Return the steps that all environments counted."""
    return sum(env.made) if isinstance(env, ParallelEnv) else sum(map(made, env.members))


def parallel(*args, **kwargs):
    return ParallelEnv(*args, num_processes=2, **kwargs)


@pytest.mark.parametrize("during", ["step", "reset"])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("kind", "member"),
    [(SerialEnv, gym), (SerialEnv, base), (SerialEnv, wrapped), (parallel, gym), (parallel, base)],
)
def test_ledger_agrees_after_an_error(kind, member, place, during):
    # Each kind of policy is combined with each other parameter.
    policy = (place + (during == "step") + (member is base)) % 2

    def build(stream):
        return member(stream, 2 if during == "reset" else 5, during) if stream == place else member(stream)

    env = kind(3, build, create_env_kwargs=[{"stream": stream} for stream in range(3)])
    act = (lambda td: td.set("action", torch.zeros(3, 2))) if policy else None
    collector = SyncDataCollector(env, act, frames_per_batch=24, total_frames=48)
    with pytest.raises(FakeFailure):
        collector.rollout()
    stats = collector.stats()
    assert stats.stepped == stats.discarded == own_count(env)
    collector.shutdown()


class Killed(OracleEnv):
    """Counts its steps in a file; the process is killed during its `at`-th step."""

    def __init__(self, counts, at=None, **kwargs):
        super().__init__(**kwargs)
        self.counts, self.at = np.memmap(counts, np.int64, "r+"), at

    def step(self, action):
        if self.counts[self.stream] + 1 == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().step(action)
        self.counts[self.stream] += 1
        return result


def counted(tmp_path, at=None, place=None):
    """Return four environments in two processes that count in a file, and the file."""
    counts = str(tmp_path / "counts")
    np.zeros(4, np.int64).tofile(counts)

    def build(stream):
        return GymWrapper(Killed(counts, at if stream == place else None, stream=stream, script=SCRIPT))

    kwargs = [{"stream": stream} for stream in range(4)]
    return ParallelEnv(4, build, create_env_kwargs=kwargs, num_processes=2), counts


def check_loss(collector, counts):
    """Check that the second batch loses a worker, and that the ledger agrees with the environments' counts."""
    with pytest.raises(WorkerCrashedError):
        collector.rollout()
    stats = collector.stats()
    assert stats.stepped == np.fromfile(counts, np.int64).sum() and stats.delivered == 24
    assert stats.discarded == stats.stepped - 24
    collector.shutdown()


@pytest.mark.parametrize("policy", [None, "policy"])
@pytest.mark.parametrize("place", range(4))
def test_ledger_agrees_after_a_worker_is_killed_in_a_step(tmp_path, place, policy):
    env, counts = counted(tmp_path, 9, place)
    act = (lambda td: td.set("action", torch.zeros(4, 2))) if policy else None
    collector = SyncDataCollector(env, act, frames_per_batch=24, total_frames=72)
    collector.rollout()
    check_loss(collector, counts)


@pytest.mark.parametrize("worker", range(2))
def test_ledger_agrees_after_a_worker_is_killed_between_steps(tmp_path, worker):
    env, counts = counted(tmp_path)
    calls = []

    def act(td):
        calls.append(td)
        if len(calls) == 9:
            os.kill(env.processes[worker], signal.SIGKILL)
        return td.set("action", torch.zeros(4, 2))

    collector = SyncDataCollector(env, act, frames_per_batch=24, total_frames=72)
    calls.clear()
    collector.rollout()
    calls[:] = [None] * 6
    check_loss(collector, counts)
