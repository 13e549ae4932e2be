"""Transforms of actions: masks, discretised actions, and their specs."""

from __future__ import annotations

import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from gleanrl.envs import SerialEnv, check_env_specs
from gleanrl.envs.transforms import (
    ActionDiscretizer,
    ActionMask,
    Compose,
    DiscreteActionProjection,
    NoopResetEnv,
    RenameTransform,
    StepCounter,
    Transform,
    TransformedEnv,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError
from tests.envs.transforms.ways import batched, collect_both_ways, joined, single
from tests.fakes import Script
from tests.fakes_base import CountingEnv
from tests.fakes_masks import MaskedEnv as ManyMasks
from tests.fakes_masks import check_allowed


class ChoiceEnv(CountingEnv):
    """Has five actions. All are allowed except the step number modulo five."""

    def _declare(self):
        super()._declare()
        shape = tuple(self.batch_size)
        self.action_spec = OneHot(5, shape=(*shape, 5))
        spec = self.observation_spec
        spec["action_mask"] = Binary(shape=(*shape, 5), dtype=torch.bool)
        self.observation_spec = spec

    def _package(self, flags):
        out = super()._package(flags)
        step = out["observation"][..., 2:].long() % 5
        out["action_mask"] = torch.arange(5) != step
        return out


@pytest.mark.parametrize("size", [(), (3,)])
def test_random_actions_keep_to_the_mask(size):
    env = TransformedEnv(ChoiceEnv(Script(lengths=(4, 7)), size), Compose(ActionMask(), StepCounter()))
    collector = SyncDataCollector(env, frames_per_batch=60, total_frames=-1)
    for _ in range(2):
        batch = collector.next()
        assert not bool((batch["action"].bool() & ~batch["action_mask"]).any())
    chosen = batch["action"].reshape(-1, 5).bool().any(0)
    assert bool(chosen.all())
    root = env.reset()
    for _ in range(20):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        assert bool(
            root["action_mask"].gather(-1, env.rand_action(root)["action"].long().argmax(-1, True)).all()
        )


def test_an_action_that_cannot_be_masked_is_refused():
    with pytest.raises(InvalidTypeError, match="masked"):
        TransformedEnv(single(), ActionMask()).action_spec  # noqa: B018


@pytest.mark.parametrize(("name", "offset"), [("MEDIAN", 0.5), ("LOW", 0.0), ("HIGH", 1.0), ("RANDOM", None)])
@pytest.mark.parametrize("categorical", [True, False])
def test_numbers_of_intervals_become_actions(name, offset, categorical):
    strategy = ActionDiscretizer.SamplingStrategy[name]
    env = single()
    discretizer = ActionDiscretizer(torch.tensor([4, 5]), sampling=strategy, categorical=categorical)
    transformed = TransformedEnv(env, discretizer)
    check_env_specs(transformed)
    env.unwrapped.actions.clear()
    batch = transformed.rollout(3)
    given = torch.stack([torch.from_numpy(action) for action in env.unwrapped.actions])
    choice = batch["action"]
    if not categorical:
        choice = torch.stack([part.long().argmax(-1) for part in choice.split([4, 5], -1)], -1)
    low, high = (-1 + 2 * (choice + o) / torch.tensor([4, 5]) for o in (0, 1))
    assert bool(((given >= low - 1e-6) & (given <= high + 1e-6)).all())
    if offset is not None:
        assert torch.allclose(given, low + offset * (high - low), atol=1e-6)


def test_discretized_actions_have_discrete_specs():
    assert isinstance(TransformedEnv(single(), ActionDiscretizer(3)).action_spec, MultiCategorical)
    env = TransformedEnv(batched(), ActionDiscretizer(3, out_action_key="choice"))
    assert env.action_keys == ["choice"]
    assert env.action_spec["choice"].shape == (3, 2)
    collect_both_ways(batched, lambda: [ActionDiscretizer(3, out_action_key="choice")])


class NarrowEnv(CountingEnv):
    """Has actions of one component, ``(*batch, 1)``, or without an action dimension."""

    dims = 1

    def _declare(self):
        super()._declare()
        self.action_spec = self.action_spec[..., :1] if self.dims else self.action_spec[..., 0]


class ScalarEnv(NarrowEnv):
    dims = 0


@pytest.mark.parametrize("size", [(), (3,)], ids=str)
@pytest.mark.parametrize(
    ("env", "categorical", "kind", "shape", "given"),
    [
        (NarrowEnv, True, MultiCategorical, (1,), (1,)),
        (NarrowEnv, False, MultiOneHot, (4,), (1,)),
        (ScalarEnv, True, Categorical, (), ()),
        (ScalarEnv, False, OneHot, (4,), ()),
        (CountingEnv, True, MultiCategorical, (2,), (2,)),
    ],
)
def test_discrete_actions_have_the_dimensions_of_continuous_ones(env, categorical, kind, shape, given, size):
    made = TransformedEnv(env(Script(ending="never"), size), ActionDiscretizer(4, categorical=categorical))
    assert type(made.action_spec) is kind and made.action_spec.shape == (*size, *shape)
    check_env_specs(made)
    made.base_env.actions.clear()
    batch = made.rollout(3)
    acted = torch.stack(made.base_env.actions, len(size))
    assert acted.shape == (*size, 3, *given)
    choice = batch["action"] if categorical else batch["action"].long().argmax(-1).reshape(acted.shape)
    assert torch.allclose(acted, -1 + (choice + 0.5) / 2)


def test_discretizer_works_over_a_batch_of_environments():
    made = TransformedEnv(SerialEnv(2, NarrowEnv), ActionDiscretizer(4))
    assert made.action_spec.shape == (2, 1)
    made.rollout(3)
    check_env_specs(TransformedEnv(SerialEnv(2, ScalarEnv), ActionDiscretizer(4)))


class MaskedEnv(CountingEnv):
    """Forbids one of four actions in each step."""

    def _declare(self):
        super()._declare()
        shape = tuple(self.batch_size)
        self.action_spec = Categorical(4, shape=shape)
        spec = self.observation_spec
        spec["action_mask"] = Categorical(2, shape=(*shape, 4), dtype=torch.bool)
        self.observation_spec = spec

    def _package(self, flags):
        out = super()._package(flags)
        out["action_mask"] = torch.arange(4) != (out["observation"][..., 2:] % 4)
        return out


@pytest.mark.parametrize("size", [(), (2,)], ids=str)
def test_specs_of_a_masked_environment_hold(size):
    for seed in range(5):  # an action drawn for this step may be forbidden in the previous one
        check_env_specs(TransformedEnv(MaskedEnv(None, size), ActionMask()), seed=seed)


class UsedUpEnv(CountingEnv):
    """Has four actions, each allowed once, so the last observation allows none."""

    def _declare(self):
        super()._declare()
        shape = tuple(self.batch_size)
        self.action_spec = Categorical(4, shape=shape)
        spec = self.observation_spec
        spec["action_mask"] = Binary(shape=(*shape, 4), dtype=torch.bool)
        self.observation_spec = spec
        self.left = torch.ones(*shape, 4, dtype=torch.bool)

    def _reset(self, tensordict=None, **kwargs):
        asked = None if tensordict is None else tensordict.get("_reset", None)
        self.left = self.left | (True if asked is None else asked)
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict):
        self.left = self.left.scatter(-1, tensordict["action"].unsqueeze(-1), False)
        return super()._step(tensordict)

    def _package(self, flags):
        return super()._package(flags).set("action_mask", self.left.clone())


@pytest.mark.parametrize("size", [(), (2,)], ids=str)
def test_last_observation_may_forbid_all_actions(size):
    env = TransformedEnv(UsedUpEnv(Script(lengths=(4,)), size), ActionMask())
    batch = env.rollout(8, break_when_any_done=False)
    assert not bool(batch["next", "action_mask"][..., [3, 7], :].any())
    for episode in batch["action"].split(4, -1):
        assert torch.equal(episode.sort(-1).values, torch.arange(4).expand(*size, 4))
    collector = SyncDataCollector(env, frames_per_batch=16, total_frames=32)
    assert all(bool(batch["action_mask"].any(-1).all()) for batch in collector)


def test_mask_without_allowed_actions_in_mid_episode_is_refused():
    env = TransformedEnv(UsedUpEnv(Script(lengths=(6,)), ()), ActionMask())
    with pytest.raises(InvalidArgumentError, match="expected a True in each row"):
        env.rollout(6)


def test_projection_maps_surplus_choices_to_actions():
    def chain():
        return [DiscreteActionProjection(5, 9)]

    env = TransformedEnv(ChoiceEnv(Script(ending="never")), Compose(*chain()))
    assert env.action_spec.shape == (9,)
    batch = env.rollout(100)
    given = torch.stack(env.base_env.actions)
    assert given.shape == (100, 5)
    own = batch["action"].long().argmax(-1)
    kept = own < 5
    assert torch.equal(given.long().argmax(-1)[kept], own[kept])
    assert bool((given.sum(-1) == 1).all())
    assert joined(collect_both_ways(ChoiceEnv, chain))["action"].shape[-1] == 9


def test_invalid_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="num_intervals"):
        ActionDiscretizer(0)
    with pytest.raises(InvalidArgumentError, match="2 numbers"):
        TransformedEnv(single(), ActionDiscretizer(torch.tensor([1, 2, 3]))).action_spec  # noqa: B018
    with pytest.raises(InvalidTypeError, match="bounded"):
        TransformedEnv(ChoiceEnv(), ActionDiscretizer(3)).action_spec  # noqa: B018
    with pytest.raises(InvalidArgumentError, match="max_actions"):
        DiscreteActionProjection(5, 3)
    with pytest.raises(InvalidTypeError, match="one-hot"):
        TransformedEnv(single(), DiscreteActionProjection(2, 3)).action_spec  # noqa: B018


class IntegerMaskEnv(ChoiceEnv):
    """Has masks of int8, optionally with a third value."""

    third = False

    def _declare(self):
        super()._declare()
        spec = self.observation_spec
        spec["action_mask"] = Unbounded((*self.batch_size, 5), dtype=torch.int8)
        self.observation_spec = spec

    def _package(self, flags):
        out = super()._package(flags)
        mask = out["action_mask"].to(torch.int8)
        out["action_mask"] = mask * 3 if self.third else mask
        return out


def test_integer_masks_of_zeros_and_ones_are_accepted():
    env = TransformedEnv(IntegerMaskEnv(Script(lengths=(4, 7)), (2,)), ActionMask())
    batch = env.rollout(60, break_when_any_done=False)
    assert batch["action_mask"].dtype is torch.int8
    assert not bool((batch["action"].bool() & ~batch["action_mask"].bool()).any())
    assert not bool((env.action_spec.rand((50,)) & ~env.action_spec.mask).any())
    check_env_specs(env)


def test_integer_mask_with_another_value_is_refused_with_the_value():
    env = IntegerMaskEnv(Script(lengths=(4,)))
    env.third = True
    with pytest.raises(InvalidArgumentError, match=r"action_mask.*got 3 at index"):
        TransformedEnv(env, ActionMask()).reset()


class JointMaskEnv(CountingEnv):
    """Has two choices of five, and a mask of their combinations; no combination is allowed at the end of an episode."""

    def _declare(self):
        super()._declare()
        shape = tuple(self.batch_size)
        self.action_spec = MultiCategorical([5, 5], shape=(*shape, 2))
        spec = self.observation_spec
        spec["action_mask"] = Binary(shape=(*shape, 5, 5), dtype=torch.int8)
        self.observation_spec = spec

    def _package(self, flags):
        out = super()._package(flags)
        mask = (
            torch.eye(5).roll(int(out["observation"].flatten()[2]), 0).expand(*self.batch_size, 5, 5).clone()
        )
        for flag in flags.values():
            mask[flag.reshape(self.batch_size).bool()] = 0
        out["action_mask"] = mask.to(torch.int8)
        return out


@pytest.mark.parametrize("size", [(), (3,)])
def test_joint_mask_of_two_choices_is_sampled_jointly(size):
    env = TransformedEnv(JointMaskEnv(Script(lengths=(4, 7)), size), ActionMask())
    batch = SyncDataCollector(env, frames_per_batch=60, total_frames=-1).next()
    action, mask = batch["action"].reshape(-1, 2), batch["action_mask"].reshape(-1, 5, 5)
    assert bool(mask[torch.arange(len(mask)), action[:, 0], action[:, 1]].all())
    assert len(action.unique(dim=0)) > 4


def test_rename_after_an_action_mask_keeps_the_mask():
    rename = RenameTransform([], [], ["action"], ["act"])
    env = TransformedEnv(ChoiceEnv(Script(lengths=(4, 7))), Compose(ActionMask(), rename))
    batch = env.rollout(40, break_when_any_done=False)
    assert not bool((batch["act"].bool() & ~batch["action_mask"]).any())


def test_mask_that_the_base_environment_sets_passes_a_transform():
    env = TransformedEnv(ManyMasks("one_hot", "late_spec"), StepCounter())
    check_allowed(env.rollout(60, break_when_any_done=False).unsqueeze(0), "one_hot")


def test_noops_after_an_action_mask_are_allowed_actions():
    base = ManyMasks("categorical", "transform")
    taken = []
    step = base._step
    base._step = lambda td: (taken.append((td["action_mask"], td["action"])), step(td))[1]
    env = TransformedEnv(base, Compose(ActionMask(), NoopResetEnv(2, random=False)))
    for _ in range(20):
        env.reset()
    assert len(taken) == 40 and all(bool(mask[action]) for mask, action in taken)


class Inverting(Transform):
    """Has a method for actions that leaves them unchanged; counts the calls for its spec."""

    derived = 0

    def _inv_call(self, tensordict):
        return tensordict

    def transform_observation_spec(self, observation_spec):
        self.derived += 1
        return observation_spec


def test_mask_of_each_step_does_not_derive_the_specs_of_later_transforms_again():
    later = Inverting()
    env = TransformedEnv(ChoiceEnv(Script(lengths=(4, 7))), Compose(ActionMask(), later))
    env.rollout(5, break_when_any_done=False)
    before = later.derived
    batch = env.rollout(40, break_when_any_done=False)
    assert later.derived == before
    assert not bool((batch["action"].bool() & ~batch["action_mask"]).any())
