"""`MultiAction` runs a chunk of actions as the same actions one by one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Composite, Unbounded
from gleanrl.envs import EnvBase, SerialEnv, check_env_specs
from gleanrl.envs.transforms import Compose, MultiAction, RewardSum, StepCounter, TransformedEnv
from gleanrl.errors import InvalidArgumentError, MissingKeyError, SchemaError, UnsupportedError
from gleanrl.testing import check_transform


class Counting(EnvBase):
    """Counts its steps and ends at `end`; the reward is the action."""

    def __init__(self, end=5, size=()):
        super().__init__(batch_size=size)
        self.end, self.taken = end, 0
        self.observation_spec = Composite(obs=Unbounded((*size, 1)), shape=size)
        self.action_spec = Unbounded((*size, 1))
        self.reward_spec = Unbounded((*size, 1))

    def _reset(self, tensordict=None, **_):
        self.count = torch.zeros(*self.batch_size, 1)
        return TensorDict({"obs": self.count.clone()}, self.batch_size)

    def _step(self, tensordict):
        self.taken += 1
        self.count = self.count + 1
        out = {
            "obs": self.count.clone(),
            "reward": tensordict["action"].clone(),
            "done": self.count >= self.end,
        }
        return TensorDict(out, self.batch_size)

    def _set_seed(self, seed):
        pass


def chunk(*actions):
    return torch.tensor([float(action) for action in actions])[:, None]


@pytest.mark.parametrize("stack_rewards", [True, False])
@pytest.mark.parametrize("stack_observations", [True, False])
def test_chunk_takes_one_step_per_action(stack_rewards, stack_observations):
    macro = MultiAction(stack_rewards=stack_rewards, stack_observations=stack_observations)
    env = TransformedEnv(Counting(), macro)
    root = env.reset()
    assert root["obs"].tolist() == ([[0]] if stack_observations else [0])
    step, root = env.step_and_maybe_reset(root.set("action", chunk(1, 2, 3)))
    after = step["next"]
    assert after["reward"].tolist() == ([[1], [2], [3]] if stack_rewards else [3])
    assert after["obs"].tolist() == ([[1], [2], [3]] if stack_observations else [3])
    assert torch.equal(step["action"], chunk(1, 2, 3)) and not after["done"]
    assert root["obs"].tolist() == after["obs"].tolist()
    step, root = env.step_and_maybe_reset(root.set("action", chunk(4, 5, 6)))
    after = step["next"]
    assert env.base_env.taken == 5, "not past the end"
    assert after["reward"].tolist() == ([[4], [5], [0]] if stack_rewards else [5])
    assert after["obs"].tolist() == ([[4], [5], [5]] if stack_observations else [5])
    assert after["done"] and root["obs"].reshape(-1).tolist() == [0]


def test_members_of_a_batch_end_separately():
    def env(**options):
        return TransformedEnv(
            SerialEnv(2, [lambda: Counting(3), lambda: Counting(5)]), MultiAction(**options)
        )

    actions = torch.arange(1.0, 9.0).reshape(2, 4, 1)
    for stack, rewards in ((True, [[1, 2, 3, 0], [5, 6, 7, 8]]), (False, [3, 8])):
        subject = env(stack_rewards=stack)
        step, root = subject.step_and_maybe_reset(subject.reset().set("action", actions))
        assert step["next", "reward"].squeeze(-1).tolist() == rewards
        assert step["next", "obs"].tolist() == [[3], [4]]
        assert step["next", "done"].tolist() == [[True], [False]]
        assert root["obs"].tolist() == [[0], [4]]
        step, root = subject.step_and_maybe_reset(root.set("action", actions))
        assert step["next", "obs"].tolist() == [[3], [5]] and step["next", "done"].all()


def test_members_outside_the_step_mask_take_no_action():
    env = TransformedEnv(SerialEnv(3, [Counting, lambda: Counting(1), Counting]), MultiAction())
    root = env.reset().set("action", torch.ones(3, 3, 1)).set("_step", torch.tensor([False, True, True]))
    assert env.step(root)["next", "obs"].flatten().tolist() == [0, 1, 3]
    assert env.base_env.taken == [0, 1, 3]


def test_rollouts_and_collectors_step_chunks_of_a_batch():
    def env(**options):
        base = SerialEnv(2, [lambda: Counting(3), lambda: Counting(5)])
        return TransformedEnv(base, MultiAction(**options))

    def policy(tensordict):
        return tensordict.set("action", torch.arange(4.0).reshape(2, 2, 1))

    collector = SyncDataCollector(env(), policy, frames_per_batch=8, total_frames=8)
    for batch in (env().rollout(4, policy, break_when_any_done=False), *collector):
        assert batch["next", "obs"].squeeze(-1).tolist() == [[2, 3, 2, 3], [2, 4, 5, 2]]
        assert batch["next", "reward"].squeeze(-1).tolist() == [
            [[0, 1], [0, 0], [0, 1], [0, 0]],
            [[2, 3], [2, 3], [2, 0], [2, 3]],
        ]
        assert batch["action"].shape == (2, 4, 2, 1)
    collector.shutdown()
    for stacked in (False, True):
        check_env_specs(env(stack_observations=stacked))
        assert env(stack_observations=stacked).rollout(9, policy).shape == (2, 2)


def test_earlier_transforms_see_each_action_and_later_ones_the_chunk():
    env = TransformedEnv(
        Counting(),
        Compose(StepCounter(step_count_key="each"), MultiAction(), StepCounter(step_count_key="chunks")),
    )
    batch = env.rollout(9, lambda tensordict: tensordict.set("action", chunk(1, 1)))
    assert batch["next", "each"].flatten().tolist() == [2, 4, 5]
    assert batch["next", "chunks"].flatten().tolist() == [1, 2, 3]
    summed = TransformedEnv(Counting(), Compose(RewardSum(), MultiAction(stack_rewards=False)))
    batch = summed.rollout(9, lambda tensordict: tensordict.set("action", chunk(1, 2)))
    assert batch["next", "episode_reward"].flatten().tolist() == [3, 6, 7]


@pytest.mark.parametrize(
    ("macro", "key"),
    [
        (lambda: MultiAction(action_key="action", chunk_key=("agent", "chunk")), ("agent", "chunk")),
        (lambda: MultiAction.from_vla(), ("vla_action", "chunk")),
    ],
)
def test_chunk_may_have_another_key(macro, key):
    env = TransformedEnv(Counting(), macro())
    assert env.action_keys == [key]
    step = env.step(env.reset().set(key, chunk(1, 2)))
    assert step["next", "reward"].tolist() == [[1], [2]]
    assert torch.equal(step[key], chunk(1, 2)) and "action" not in step.keys()


def test_chunk_may_use_another_dimension():
    env = TransformedEnv(Counting(size=(2,)), MultiAction(dim=2))
    assert env.action_spec.shape == env.reward_spec.shape == (2, 1, -1)
    actions = torch.arange(6.0).reshape(2, 1, 3)
    assert torch.equal(env.step(env.reset().set("action", actions))["next", "reward"], actions)


def test_specs_have_any_length():
    env = TransformedEnv(Counting(), MultiAction(stack_observations=True))
    assert env.action_spec.shape == env.reward_spec.shape == env.observation_spec["obs"].shape == (-1, 1)
    assert env.rand_action()["action"].shape == (1, 1)
    check_env_specs(TransformedEnv(Counting(), MultiAction()))


def test_collectors_step_chunks():
    collector = SyncDataCollector(
        TransformedEnv(Counting(), MultiAction()),
        lambda tensordict: tensordict.set("action", chunk(1, 1, 1)),
        frames_per_batch=4,
        total_frames=8,
    )
    for batch in collector:
        assert batch["next", "obs"].flatten().tolist() == [3, 5, 3, 5]
        assert batch["next", "reward"].sum(1).flatten().tolist() == [3, 2, 3, 2]
    collector.shutdown()


def test_invalid_arguments_and_chunks_are_refused():
    with pytest.raises(InvalidArgumentError, match="dim"):
        MultiAction(dim=0)
    env = TransformedEnv(Counting(), MultiAction())
    with pytest.raises(SchemaError, match="expected a chunk of actions at 'action' along dimension 0"):
        env.step(env.reset().set("action", torch.zeros(0, 1)))
    with pytest.raises(MissingKeyError, match="action"):
        env.step(env.reset())
    with pytest.raises(UnsupportedError, match="part of an environment"):
        MultiAction(stack_observations=True)._reset(TensorDict(), TensorDict())


@pytest.mark.parametrize("stack_rewards", [True, False])
def test_multi_action_passes_the_transform_suite(stack_rewards):
    report = check_transform(lambda: MultiAction(stack_rewards=stack_rewards), env=Counting, num_steps=20)
    assert "state" in report.passed
