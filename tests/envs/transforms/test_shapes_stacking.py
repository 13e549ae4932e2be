"""`Stack` joins entries or groups along a new dimension."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import check_env_specs
from gleanrl.envs.transforms import Stack, TransformedEnv
from gleanrl.errors import InvalidArgumentError, MissingKeyError
from tests.envs.transforms.ways import SCRIPT
from tests.fakes_base import CountingEnv


class TwoAgents(CountingEnv):
    """Has two agents with separate keys, ``left`` and ``right``, and an action for each."""

    def _declare(self):
        super()._declare()
        shape = tuple(self.batch_size)
        names = ("left", "right")
        self.observation_spec = Composite({name: Unbounded((*shape, 3)) for name in names}, shape=shape)
        acts = {f"{name}_act": Bounded(-1.0, 1.0, (*shape, 2)) for name in names}
        self.action_spec = Composite(acts, shape=shape)

    def _package(self, flags):
        out = super()._package(flags)
        observation = out.pop("observation")
        return out.set("left", observation).set("right", observation + 10)

    def _step(self, tensordict):
        acts = torch.stack([tensordict["left_act"], tensordict["right_act"]])
        return super()._step(TensorDict({"action": acts}, []))


@pytest.mark.parametrize("size", [(), (3,)], ids=str)
@pytest.mark.parametrize(("dim", "positive"), [(-2, False), (0, True)])
def test_agents_are_stacked_along_a_new_dimension(size, dim, positive):
    both = Stack(["left", "right"], "agents", "acts", ["left_act", "right_act"], dim, positive)
    env = TransformedEnv(TwoAgents(SCRIPT, size), both)
    check_env_specs(env)
    assert env.observation_spec["agents"].shape == (*size, 2, 3) and env.action_keys == ["acts"]
    batch = env.rollout(7, break_when_any_done=False)
    assert torch.equal(batch["agents"][..., 1, :], batch["agents"][..., 0, :] + 10)
    assert "left" not in batch.keys()
    env.base_env.actions.clear()
    data = env.rollout(1)
    (given,) = env.base_env.actions  # (2, *size, 2)
    assert torch.equal(given.movedim(0, -2), data["acts"].select(len(size), 0))


def test_groups_are_stacked_as_batches():
    agents = {name: TensorDict({"obs": torch.rand(4, 5), "reward": torch.zeros(1)}) for name in ("a", "b")}
    out = Stack(["a", "b"], "agents")(TensorDict(agents))
    assert out["agents"].batch_size == (2,) and out["agents", "obs"].shape == (2, 4, 5)
    assert set(out.keys()) == {"agents"}
    back = Stack([], "x", "agents", ["a", "b"]).inv(out)
    assert torch.equal(back["b", "obs"], out["agents", "obs"][1])


def test_del_keys_false_keeps_the_entries():
    data = TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}, [2])
    out = Stack(["a", "b"], "c", del_keys=False)(data.clone())
    assert out["c"].shape == (2, 3, 2) and set(out.keys()) == {"a", "b", "c"}
    with pytest.raises(InvalidArgumentError, match="allow_positive_dim"):
        Stack(["a", "b"], "c", dim=0)
    with pytest.raises(MissingKeyError, match="'d'"):
        Stack(["a", "d"], "c")(data)
