"""`TrajCounter` numbers trajectories, and `Timer` measures steps and resets."""

from __future__ import annotations

import torch

from gleanrl._os import clock
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import Compose, StepCounter, Timer, TrajCounter, TransformedEnv
from tests.envs.transforms.ways import SCRIPT, batched, collect_both_ways, joined, single
from tests.fakes_base import CountingEnv


def test_trajectories_are_numbered_in_the_order_of_their_resets():
    env = TransformedEnv(single(), Compose(StepCounter(3), TrajCounter(repeats=2)))
    check_env_specs(env)
    begun = int(env.transform[1].total)
    data = env.rollout(7, break_when_any_done=False)
    assert torch.equal(data["traj_count"], data["next", "traj_count"])
    number = data["traj_count"].flatten() - begun
    assert torch.equal(number[1:] > number[:-1], data["next", "done"].flatten()[:-1]) and number[0] == 0
    rows = joined(collect_both_ways(batched, lambda: [TrajCounter("n")]))["n"].squeeze(-1)
    assert rows[:, 0].tolist() == [0, 1, 2] and len(rows.unique()) == int(rows.max()) + 1


def test_trajectory_count_has_a_bounded_spec():
    spec = TransformedEnv(batched(), TrajCounter()).observation_spec["traj_count"]
    assert isinstance(spec, Bounded) and spec.shape == (3, 1) and spec.dtype is torch.int64
    assert not spec.low.any() and spec.is_in(spec.rand()) and not spec.is_in(spec.zero() - 1)


def test_trajectory_numbers_continue_from_a_state():
    env, fresh = (TransformedEnv(CountingEnv(SCRIPT, (2,)), TrajCounter()) for _ in range(2))
    env.rollout(5, break_when_any_done=False)
    fresh.load_state_dict(env.state_dict())
    assert fresh.reset()["traj_count"].flatten().tolist() == env.reset()["traj_count"].flatten().tolist()


class Slow(CountingEnv):
    """Takes two seconds for a reset and one for a step."""

    def _reset(self, tensordict=None, **kwargs):
        clock.sleep(2)
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict):
        clock.sleep(1)
        return super()._step(tensordict)


def test_steps_policies_and_resets_are_timed():
    def policy(tensordict):
        clock.sleep(3)
        return tensordict.set("action", torch.zeros(2))

    with clock.use(clock.FakeClock()):
        env = TransformedEnv(Slow(SCRIPT), Timer())
        root, rows = env.reset(), []
        for _ in range(6):
            stepped, root = env.step_and_maybe_reset(policy(root))
            rows.append(stepped.clone())
    data = torch.stack(rows)
    first = data["observation"][:, 2] == 0
    assert first.sum() > 1
    assert (
        data["next", "time_step"].tolist() == [1.0] * 6 and data["next", "time_policy"].tolist() == [3.0] * 6
    )
    assert not data["next", "time_reset"].any()
    assert torch.equal(data["time_reset"], first * 2.0)
    assert torch.equal(data["time_step"], ~first * 1.0) and torch.equal(data["time_policy"], ~first * 3.0)
    check_env_specs(TransformedEnv(CountingEnv(SCRIPT, (2,)), Timer(out_keys=["s", "p", "r"])))
    batch = next(iter(SyncDataCollector(TransformedEnv(CountingEnv(SCRIPT), Timer()), frames_per_batch=3)))
    assert (batch["next", "time_step"] > 0).all()
