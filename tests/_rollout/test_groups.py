"""Policies can read and write whole groups and nested groups, and no step sees the group of an earlier step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    set_composite_lp_aggregate,
    set_interaction_type,
)

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase, step_mdp
from tests.fakes_modules import Normal, module

POSE, ACTION = ("robot", "pose"), ("robot", "act")
STEPS = 4
"""Number of steps. The first row is built as a TensorDict, from which the columns are inferred."""


class Robot(EnvBase):
    """Its pose is the sum of its actions."""

    def __init__(self) -> None:
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite(robot=Composite(pose=Unbounded((2, 3)), shape=(2,)), shape=(2,))
        self.action_spec = Composite(robot=Composite(act=Bounded(-9, 9, (2, 3)), shape=(2,)), shape=(2,))
        self.reward_spec = Unbounded((2, 1))

    def _row(self, pose: torch.Tensor) -> TensorDict:
        robot = TensorDict({"pose": pose}, self.batch_size)
        return TensorDict({"robot": robot, "done": torch.zeros(2, 1, dtype=torch.bool)}, self.batch_size)

    def _reset(self, tensordict: Any = None) -> TensorDict:
        return self._row(torch.arange(6.0).reshape(2, 3))

    def _step(self, tensordict: Any) -> TensorDict:
        return self._row(tensordict[POSE] + tensordict[ACTION]).set("reward", torch.ones(2, 1))

    def _set_seed(self, seed: int | None) -> None:
        pass


def draw(given: Any, distribution: Any = Normal, **kwargs: Any) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(given, [ACTION], distribution_class=distribution, **kwargs)


def composite(given: Any) -> ProbabilisticTensorDictModule:
    names = {"distribution_map": {"act": Normal}, "name_map": {"act": ACTION}}
    return draw({"params": given}, CompositeDistribution, distribution_kwargs=names, return_log_prob=True)


def parameters(pose: torch.Tensor) -> TensorDict:
    return TensorDict({"loc": pose, "scale": pose.sigmoid() + 0.1}, pose.shape[:-1])


def halves(pose: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pose / 2, pose.sigmoid() + 0.1


def of_group(p: TensorDict) -> Normal:
    return Normal(p["loc"], p["scale"])


def of_pose(loc: torch.Tensor, scale: torch.Tensor) -> Normal:
    return Normal(loc, scale.sigmoid() + 0.1)


def constant(pose: torch.Tensor) -> torch.Tensor:
    return pose * 0 + 1


POLICIES: dict[str, Callable[[], list[Any]]] = {
    "leaves are written, their group is read": lambda: [
        module(halves, [("robot", "p", "act", "loc"), ("robot", "p", "act", "scale")], [POSE]),
        composite(("robot", "p")),
    ],
    "at the top": lambda: [
        module(halves, [("p", "act", "loc"), ("p", "act", "scale")], [POSE]),
        composite("p"),
    ],
    "a group is written, and read": lambda: [
        module(lambda x: TensorDict({"act": parameters(x)}, x.shape[:-1]), [("robot", "p")], [POSE]),
        composite(("robot", "p")),
    ],
    "a group is written, its leaves are read": lambda: [
        module(parameters, ["p"], [POSE]),
        draw([("p", "loc"), ("p", "scale")]),
    ],
    "a group is written, and a leaf of it again": lambda: [
        module(parameters, [("q", "_p")], [POSE]),
        module(constant, [("q", "_p", "loc")], [POSE]),
        draw({"p": ("q", "_p")}, of_group),
    ],
    "again, at the top": lambda: [
        module(parameters, ["_p"], [POSE]),
        module(constant, [("_p", "loc")], [POSE]),
        draw({"p": "_p"}, of_group),
    ],
    "a group of the root is replaced": lambda: [
        module(lambda x: TensorDict({"pose": x / 2}, x.shape[:-1]), ["robot"], [POSE]),
        draw({"loc": POSE, "scale": POSE}, of_pose),
    ],
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.MEAN], ids=str)
def test_groups_of_each_step_are_current(name: str, kind: InteractionType) -> None:
    policy, env = ProbabilisticTensorDictSequential(*POLICIES[name]()), Robot()
    with set_interaction_type(kind), set_composite_lp_aggregate(False), torch.no_grad():
        torch.manual_seed(0)
        found = env.rollout(STEPS, policy)
        torch.manual_seed(0)
        root, steps = env.reset(), []
        for _ in range(STEPS):
            steps.append(env.step(policy(root)))
            root = step_mdp(steps[-1], action_keys=[ACTION])
    for key in (POSE, ACTION, ("next", *POSE)):
        expected = torch.stack([step[key] for step in steps], 1)
        assert torch.equal(found[key], expected), (key, found[key], expected)
