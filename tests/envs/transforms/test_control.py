"""Transforms that control stepping: frame skips, no-ops after a reset, lost lives, maxima over time."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, TensorDictReplayBuffer
from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    AutoResetTransform,
    CatFrames,
    Compose,
    ConditionalSkip,
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RewardSum,
    StepCounter,
    TimeMaxPool,
    Timer,
    TransformedEnv,
    VecGymEnvTransform,
)
from gleanrl.errors import EnvironmentContractError, InvalidArgumentError, UnsupportedError
from tests.envs.transforms.ways import batched, batches, collect_both_ways, joined, single
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv

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


def member(*lengths):
    return lambda: CountingEnv(Script(lengths=lengths))


@pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
def test_members_of_a_batch_skip_frames_separately(batch):
    makes = [member(7, 4), member(5), member(6, 1)]
    apart = SerialEnv(3, [lambda make=make: TransformedEnv(make(), FrameSkipTransform(3)) for make in makes])
    together = TransformedEnv(batch(3, makes), FrameSkipTransform(3))
    try:
        left, right = (
            env.rollout(8, lambda td: td.set("action", torch.ones(3, 2)), break_when_any_done=False)
            for env in (apart, together)
        )
        check_env_specs(together)
    finally:
        together.close()
    assert right["next", "done"].any(1).all()
    for key in ("reward", "done", "observation"):
        columns = [batch["next", key] for batch in (left, right)]
        assert torch.equal(*(column[..., -2:] if key == "observation" else column for column in columns)), key


def test_an_environment_that_steps_its_rows_together_skips_frames():
    env = TransformedEnv(CountingEnv(Script(lengths=(3, 5)), (2,)), FrameSkipTransform(2))
    batch = env.rollout(5, break_when_any_done=False)
    assert batch["next", "observation"][..., 2].tolist() == [[2, 3, 2, 4, 5], [2, 4, 5, 2, 3]]
    check_env_specs(env)


def test_members_outside_the_step_mask_skip_no_frames():
    base = SerialEnv(2, member(9))
    chain = Compose(FrameSkipTransform(2), ConditionalSkip(lambda td: torch.tensor([True, False])))
    batch = TransformedEnv(base, chain).rollout(2)
    assert batch["next", "observation"][..., 2].tolist() == [[0, 0], [2, 4]]


def test_vector_environment_skips_frames_until_one_member_ends():
    vector = gymnasium.vector.SyncVectorEnv(
        [lambda n=n: OracleEnv(script=Script(lengths=(n,))) for n in (4, 3)]
    )
    env = TransformedEnv(GymWrapper(vector), FrameSkipTransform(2))
    step, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert step["next", "observation"][:, 2].tolist() == [2, 2]
    with pytest.raises(
        UnsupportedError, match=r"environments \[1\] ended before the others' step was over.*SerialEnv"
    ):
        env.step(env.rand_action(root))


def test_earlier_transforms_see_every_frame_and_later_ones_every_step():
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


def test_lost_life_sets_its_flag():
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
def test_time_max_pool_returns_the_maximum_of_the_last_observations(env):
    batch = joined(collect_both_ways(env, lambda: [TimeMaxPool(["observation"], ["top"], T=3)]))
    # Observations grow within an episode, so the newest is the greatest. No value comes from the episode before.
    assert torch.equal(batch["top"], batch["observation"])
    assert torch.equal(batch["next", "top"], batch["next", "observation"])


def test_time_max_pool_forgets_older_observations():
    class Falling(OracleEnv):
        def _emit(self):
            return -super()._emit()

    env = TransformedEnv(GymWrapper(Falling(script=LONG)), TimeMaxPool(["observation"], T=3))
    assert env.rollout(9)["next", "observation"][:, 2].tolist() == [0, 0, -1, -2, -3, -4, -5]


def test_batches_and_bad_numbers_are_refused():
    with pytest.raises(UnsupportedError, match="its own transform"):
        TransformedEnv(batched(), NoopResetEnv(2)).rollout(2)
    for make in (lambda: FrameSkipTransform(0), lambda: NoopResetEnv(-1), lambda: TimeMaxPool(["a"], T=0)):
        with pytest.raises(InvalidArgumentError, match="integer"):
            make()


@pytest.mark.parametrize(
    "transform",
    [
        *(lambda: FrameSkipTransform(2), EndOfLifeTransform, AutoResetTransform, VecGymEnvTransform, Timer),
        lambda: Compose(FrameSkipTransform(2)),
    ],
)
def test_transforms_of_environments_raise_in_a_buffer(transform):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=transform(), batch_size=2)
    rb.extend(TensorDict(a=torch.zeros(4), batch_size=[4]))
    with pytest.raises(
        UnsupportedError, match="follows an environment's episodes; it can't be used in a replay"
    ):
        rb.sample()
