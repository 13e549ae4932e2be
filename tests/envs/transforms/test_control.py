from __future__ import annotations

import pytest
import torch

from gleanrl.envs import GymWrapper, check_env_specs
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RewardSum,
    StepCounter,
    TimeMaxPool,
    TransformedEnv,
)
from gleanrl.errors import EnvironmentContractError, InvalidArgumentError, UnsupportedError
from tests.envs.transforms.ways import batched, batches, collect_both_ways, joined, single
from tests.fakes import OracleEnv, Script

LONG = Script(lengths=(7,))


def test_actions_are_repeated_up_to_the_episodes_end():
    env = GymWrapper(OracleEnv(script=LONG))
    _, parts = batches(TransformedEnv(env, FrameSkipTransform(3)), sizes=(6,))
    batch = joined(parts)
    assert batch["observation"][:, 2].tolist() == [0, 3, 6, 0, 3, 6]
    assert batch["next", "observation"][:, 2].tolist() == [3, 6, 7, 3, 6, 7]
    script = env.unwrapped.script
    want = sum(script.reward(0, 0, step) for step in (1, 2, 3))
    assert batch["next", "reward"][0].item() == pytest.approx(want)
    assert batch["next", "reward"][2].item() == pytest.approx(script.reward(0, 0, 7))
    actions = env.unwrapped.actions
    assert all((actions[0] == actions[k]).all() for k in (1, 2))


def test_transforms_before_see_every_frame_and_those_after_every_step():
    env = GymWrapper(OracleEnv(script=LONG))
    inner = StepCounter(step_count_key="frames")
    stack = CatFrames(2, -1, in_keys=["observation"], out_keys=["stack"])
    env = TransformedEnv(env, Compose(inner, stack, FrameSkipTransform(3), StepCounter(), RewardSum()))
    batch = env.rollout(9)
    assert batch["next", "frames"].flatten().tolist() == [3, 6, 7]
    assert batch["next", "step_count"].flatten().tolist() == [1, 2, 3]
    assert batch["next", "stack"][0].tolist() == [0, 0, 2, 0, 0, 3]
    assert torch.allclose(batch["next", "episode_reward"], batch["next", "reward"].cumsum(0))


def test_noops_come_after_every_reset():
    torch.manual_seed(0)
    env = TransformedEnv(GymWrapper(OracleEnv(script=LONG)), NoopResetEnv(4, random=False))
    assert env.reset()["observation"][2].item() == 4
    _, parts = batches(env, sizes=(7,))
    batch = joined(parts)
    assert batch["observation"][:, 2].tolist() == [4, 5, 6, 4, 5, 6, 4]
    assert not bool(batch["done"].any())
    counts = {
        int(TransformedEnv(GymWrapper(OracleEnv(script=LONG)), NoopResetEnv(4)).reset()["observation"][2])
        for _ in range(40)
    }
    assert counts == {1, 2, 3, 4}


def test_noops_that_always_end_the_episode_are_refused():
    env = TransformedEnv(GymWrapper(OracleEnv(script=LONG)), NoopResetEnv(9, random=False))
    with pytest.raises(EnvironmentContractError, match="fewer noops"):
        env.reset()


class Lives(OracleEnv):
    """Loses one of three lives every second step."""

    def lives(self):
        return 3 - self.step_index // 2


def lively():
    return GymWrapper(Lives(script=Script(lengths=(5,))))


def test_a_lost_life_is_told():
    env = TransformedEnv(lively(), EndOfLifeTransform(eol_attribute="unwrapped.lives"))
    check_env_specs(env)
    _, parts = batches(env, sizes=(10,))
    batch = joined(parts)
    assert batch["next", "end-of-life"].flatten().tolist() == [False, True, False, True, True] * 2
    assert batch["lives"].tolist() == [3, 3, 2, 2, 1] * 2
    assert batch["next", "done"].flatten().tolist() == [False] * 4 + [True] + [False] * 4 + [True]


def test_an_environment_without_lives_is_refused():
    with pytest.raises(UnsupportedError, match=r"unwrapped.ale.lives"):
        TransformedEnv(single(), EndOfLifeTransform()).reset()


@pytest.mark.parametrize("env", [single, batched])
def test_the_greatest_of_the_last_observations(env):
    batch = joined(collect_both_ways(env, lambda: [TimeMaxPool(["observation"], ["top"], T=3)]))
    # Observations grow within an episode: the newest is the greatest, and nothing comes from the episode before.
    assert torch.equal(batch["top"], batch["observation"])
    assert torch.equal(batch["next", "top"], batch["next", "observation"])


def test_a_pool_forgets_what_is_older():
    class Falling(OracleEnv):
        def _emit(self):
            return -super()._emit()

    env = TransformedEnv(GymWrapper(Falling(script=LONG)), TimeMaxPool(["observation"], T=3))
    assert env.rollout(9)["next", "observation"][:, 2].tolist() == [0, 0, -1, -2, -3, -4, -5]


def test_batches_and_bad_numbers_are_refused():
    for transform in (FrameSkipTransform(2), NoopResetEnv(2)):
        with pytest.raises(UnsupportedError, match="its own transform"):
            TransformedEnv(batched(), transform).rollout(2)
    for make in (lambda: FrameSkipTransform(0), lambda: NoopResetEnv(-1), lambda: TimeMaxPool(["a"], T=0)):
        with pytest.raises(InvalidArgumentError, match="integer"):
            make()
