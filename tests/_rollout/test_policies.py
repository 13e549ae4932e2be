"""The rules by which a callable becomes a policy, as one table, and the draws of the random policy."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, tensorclass
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Schema
from gleanrl._rollout.plan import action_fields
from gleanrl._rollout.policies import AllowedRows, MaskWatch, RandomPolicy, wrap_policy
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Categorical, Composite, OneHot
from gleanrl.envs import SerialEnv
from gleanrl.errors import GleanError, InvalidTypeError, PolicyError
from tests.fakes_base import CountingEnv, TwoActionEnv
from tests.fakes_masks import ENCODINGS, SOURCES, MaskedEnv, check_allowed, chosen, masked

ONE, TWO, NESTED = ["observation"], ["place", "clock"], [("robot", "pose")]
GROUPS = ["goal", ("arm", "goal"), ("arm", "angle"), ("arm", "speed"), ("leg", "angle")]


@tensorclass
class Record:
    """A tensorclass."""

    observation: torch.Tensor


class Method:
    """Offers its policy as a method and as a call."""

    def act(self, observation: Any) -> Any:
        return observation

    def on_td(self, tensordict: Any) -> Any:
        return tensordict

    def __call__(self, place: Any, clock: Any = None) -> Any:
        return place


class Typed:
    """Takes one TensorDict under another name; the annotation is a string."""

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        return data


class TypedModule(nn.Module):
    def forward(self, data: TensorDictBase, scale: float = 1.0) -> TensorDictBase:
        return data


class TwoInputs(nn.Module):
    def forward(self, clock: Any, place: Any) -> Any:
        return clock


def unknown(data: Unknown) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return data


def dotted(data: tensordict.TensorDict) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return data


def record(data: Record) -> Any:
    return data


def tensor(data: torch.Tensor) -> Any:
    return data


class Own(TensorDictModuleBase):
    in_keys, out_keys = ["observation"], ["action"]


AS_IT_IS = [
    lambda td: td,
    lambda tensordict: tensordict,
    lambda tensordict, scale=1.0: tensordict,
    lambda td=None: td,
    lambda td, **kwargs: td,
    Typed(),
    TypedModule(),
    dotted,
    record,
    Method().on_td,
    functools.partial(lambda scale, td: td, 2.0),
    Own(),
    TensorDictModule(nn.Identity(), ["x"], ["y"]),
    RandomPolicy(None),
]


@pytest.mark.parametrize("policy", AS_IT_IS, ids=range(len(AS_IT_IS)))
@pytest.mark.parametrize("keys", [ONE, TWO])
def test_tensordict_policies_are_not_wrapped(policy: Any, keys: Any) -> None:
    assert wrap_policy(policy, CountingEnv(), keys) is policy


# (policy, observation keys, in_keys, parameter names of the inputs or None for positions)
WRAPPED: list[tuple[Any, Any, Any, Any]] = [
    (lambda observation: observation, ONE, ["observation"], ["observation"]),
    (lambda observation, scale=2.0: observation, ONE, ["observation"], ["observation"]),
    (lambda *, observation: observation, ONE, ["observation"], ["observation"]),
    (lambda observation, /: observation, ONE, ["observation"], None),
    (lambda clock, place: clock, TWO, ["clock", "place"], ["clock", "place"]),
    (lambda place: place, TWO, ["place"], ["place"]),
    (lambda place, clock=None: place, TWO, ["place", "clock"], ["place", "clock"]),
    (lambda scale=1.0, clock=None: clock, TWO, ["clock"], ["clock"]),
    (lambda anything: anything, ONE, ["observation"], None),
    (lambda anything, scale=1.0: anything, ONE, ["observation"], None),
    (lambda *args: args[0], ONE, ["observation"], None),
    (lambda anything: anything, NESTED, [("robot", "pose")], None),
    (lambda pose: pose, NESTED, [("robot", "pose")], None),
    (lambda robot: robot, NESTED, [("robot", "pose")], None),  # the only observation, whatever the name
    (lambda observation, robot=None: observation, NESTED, [("robot", "pose")], None),
    (lambda arm: arm["angle"], GROUPS, ["arm"], ["arm"]),
    (lambda arm, /: arm["angle"], GROUPS, ["arm"], None),
    (lambda goal, speed=None, arm=None: goal, GROUPS, ["goal"], ["goal"]),
    (lambda goal, speed: goal, GROUPS, ["goal", ("arm", "speed")], ["goal", "speed"]),
    (lambda arm, leg: arm["angle"], GROUPS, ["arm", "leg"], ["arm", "leg"]),
    (tensor, ONE, ["observation"], None),
    (unknown, ONE, ["observation"], None),
    (Method().act, ONE, ["observation"], ["observation"]),
    (Method(), TWO, ["place", "clock"], ["place", "clock"]),
    (functools.partial(lambda scale, place: place, 2.0), TWO, ["place"], ["place"]),
    (TwoInputs(), TWO, ["clock", "place"], ["clock", "place"]),
    (nn.Linear(3, 2), ONE, ["observation"], None),
    (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), ONE, ["observation"], None),
]


@pytest.mark.parametrize(("policy", "keys", "ins", "names"), WRAPPED, ids=range(len(WRAPPED)))
def test_callables_are_wrapped_with_their_keys(policy: Any, keys: Any, ins: Any, names: Any) -> None:
    for env in (CountingEnv(), TwoActionEnv()):
        found = wrap_policy(policy, env, keys)
        assert type(found) is TensorDictModule and found.module is policy
        assert found.in_keys == ins and found._kwargs == names and found.out_keys == env.action_keys


class Keyed:
    in_keys, out_keys = ["observation"], ["action"]


class KeyedOne(Keyed):
    def __call__(self, observation: Any) -> Any:
        return observation


class KeyedTwo(Keyed):
    def __call__(self, observation: Any, more: Any) -> Any:
        return observation


REFUSED: list[tuple[Any, Any, type[BaseException], str]] = [
    (3, ONE, InvalidTypeError, "callable, got int"),
    (lambda observation, mystery: 0, ONE, InvalidTypeError, "'mystery'.*'observation'"),
    (lambda mystery: 0, TWO, InvalidTypeError, "'mystery'.*'place', 'clock'"),
    (lambda: 0, ONE, InvalidTypeError, "observation"),
    (lambda a, b: 0, ONE, InvalidTypeError, "'a', 'b'"),
    (lambda *args: 0, TWO, InvalidTypeError, "args"),
    (lambda pose, goal: 0, NESTED, InvalidTypeError, "pose"),
    (lambda angle: 0, GROUPS, InvalidTypeError, "'angle'.*name the parameters goal, arm, speed, leg, or"),
    (lambda gaol, speed: 0, GROUPS, InvalidTypeError, "did you mean 'goal'"),
    (KeyedOne(), ONE, PolicyError, "KeyedOne.*TensorDictModuleBase"),
    (KeyedTwo(), ONE, InvalidTypeError, "KeyedTwo.*TensorDictModuleBase"),
]


@pytest.mark.parametrize(("policy", "keys", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_unsupported_callables_are_refused(
    policy: Any, keys: Any, error: type[BaseException], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        wrap_policy(policy, CountingEnv(), keys)
    assert isinstance(caught.value, GleanError)
    assert isinstance(caught.value, RuntimeError if error is PolicyError else TypeError)


def test_random_methods_of_environments_are_policies() -> None:
    env = TwoActionEnv()
    for policy in (None, env.rand_step, env.rand_action):
        found = wrap_policy(policy, env, ONE)
        assert isinstance(found, RandomPolicy) and found.action_spec is env.full_action_spec

    def rand_step(observation: Any) -> Any:
        return observation

    assert isinstance(wrap_policy(rand_step, env, ONE), TensorDictModule), "the name alone isn't enough"


class TestRandomPolicy:
    def test_leading_dimensions_come_first(self) -> None:
        spec = Bounded(low=-1.0, high=1.0, shape=(3, 2), dtype=torch.float32)
        drawn = RandomPolicy(spec, ("agents", "act")).draw((5, 4))
        assert {path: value.shape for path, value in drawn.items()} == {("agents", "act"): (5, 4, 3, 2)}
        assert drawn["agents", "act"].unique().numel() > 100

    def test_every_leaf_of_a_composite_spec_is_drawn(self) -> None:
        hand = Composite(grip=Categorical(3, shape=(4,)), shape=(4,))
        spec = Composite(arm=Bounded(-1.0, 1.0, (4, 2)), hand=hand, shape=(4,))
        drawn = RandomPolicy(spec).draw((6,))
        assert {p: v.shape for p, v in drawn.items()} == {("arm",): (6, 4, 2), ("hand", "grip"): (6, 4)}
        td = TensorDict({"other": torch.zeros(4)}, [4])
        out = RandomPolicy(spec)(td)
        assert out is td and td["hand", "grip"].shape == (4,) and "other" in td.keys()

    def test_draws_follow_the_global_generator(self) -> None:
        policy = RandomPolicy(Bounded(-1.0, 1.0, (2,)))
        torch.manual_seed(3)
        first = policy.draw((4,))["action",]
        torch.manual_seed(3)
        assert torch.equal(policy.draw((4,))["action",], first)


def test_random_policy_without_a_spec_uses_the_environments():
    policy = RandomPolicy()
    with pytest.raises(PolicyError, match="no action_spec"):
        policy(TensorDict({}, []))
    env = CountingEnv()
    assert wrap_policy(policy, env, ["observation"]) is policy
    assert set(policy(TensorDict({}, [])).keys()) == set(env.action_keys)
    own = RandomPolicy(env.action_spec)
    own.set_action_spec_from_env(TwoActionEnv())
    assert own.action_spec is not None
    assert set(own(TensorDict({}, [])).keys()) == {"action"}


def test_actions_after_a_first_mask_in_mid_batch_are_uniform():
    torch.manual_seed(0)
    collector = SyncDataCollector(
        MaskedEnv("categorical", "mid_spec"), None, frames_per_batch=400, total_frames=4000
    )
    batch = torch.cat(list(collector))
    collector.shutdown()
    masks = batch["action_mask"].unique(dim=0)
    assert len(masks) > 2
    for mask in masks:
        taken = batch["action"][(batch["action_mask"] == mask).all(-1)].bincount(minlength=4)
        assert not bool(taken[~mask].any())
        expected = taken.sum() / mask.sum()
        chi2 = float(((taken[mask] - expected) ** 2 / expected).sum())
        assert chi2 < 20, (mask, taken)  # at most 3 degrees of freedom: p < 0.0002


def test_user_mask_of_a_random_policy_is_kept():
    only = Categorical(4, mask=torch.tensor([True, False, False, False]))
    env = MaskedEnv("categorical", "transform")  # returns masks, but its spec has none
    assert not bool(env.rollout(30, RandomPolicy(only), break_when_any_done=False)["action"].any())


@pytest.mark.parametrize("source", SOURCES)
def test_random_policy_of_all_actions_obeys_the_masks_of_the_environment(source):
    policy = RandomPolicy(masked("one_hot", source).action_spec)
    batch = masked("one_hot", source).rollout(60, policy, break_when_any_done=False)
    check_allowed(batch.unsqueeze(0), "one_hot")


def test_random_policy_with_fewer_actions_draws_from_its_spec():
    env = masked("categorical")
    batch = env.rollout(60, RandomPolicy(Categorical(1)), break_when_any_done=False)
    assert not bool(batch["action"].any())


STEPS = 200


def drawn(env, seed, rows):
    """Return a prepared block of random actions, and the drawn actions."""
    size = tuple(env.batch_size)
    block = Block(Schema(action_fields(env, len(size))), size, STEPS)
    torch.manual_seed(0)
    block.fill(
        ("action",),
        env.action_spec.rand((STEPS,)) if not size else env.full_action_spec.rand((STEPS,))["action"],
    )
    before = block.column(("action",)).clone()
    block.redraw_seed = seed
    allowed = AllowedRows(env, block)
    for t in rows:
        allowed.prepare(t)
    return block.column(("action",)), before


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_only_forbidden_prepared_actions_are_redrawn(encoding):
    env = MaskedEnv(encoding, "late_spec")
    _, unmasked = drawn(env, 1, range(STEPS))
    mask = env.mask(0)
    block = Block(Schema(action_fields(env, 0)), (), STEPS)
    block.fill(("action",), unmasked)
    block.redraw_seed = 1
    allowed = AllowedRows(env, block)
    env.full_action_spec["action"].update_mask(mask)
    for t in range(100):
        allowed.prepare(t)
    found = block.column(("action",))
    assert torch.equal(found[100:], unmasked[100:])
    was = (chosen(encoding, unmasked[:100]) & ~mask).flatten(1).any(1)
    assert bool(was.any())
    assert torch.equal(found[:100][~was], unmasked[:100][~was])
    assert not bool((chosen(encoding, found[:100]) & ~mask).any())


def test_members_of_a_batch_get_the_redraws_of_their_place_in_it():
    envs = [MaskedEnv("one_hot", "late_spec") for _ in range(2)]
    batch = SerialEnv(2, envs)
    batch.reset()
    found, before = drawn(batch, 5, range(STEPS))
    for place, env in enumerate(batch.members):
        block = Block(Schema(action_fields(env, 0)), (), STEPS)
        block.fill(("action",), before[place])
        block.redraw_seed = 5 + place
        allowed = AllowedRows(env, block)
        for t in range(STEPS):
            allowed.prepare(t)
        assert torch.equal(block.column(("action",)), found[place])
    batch.close()


def test_watch_notices_added_and_removed_masks():
    env = MaskedEnv("one_hot", "late_spec")
    watch = MaskWatch(env)
    assert not watch.present()
    env.full_action_spec["action"].update_mask(env.mask(0))
    assert watch.present()
    env.full_action_spec["action"].update_mask(None)
    assert not watch.present()
    other = OneHot(4, mask=env.mask(0))
    assert not watch.present()
    env.action_spec = other
    assert watch.present()


class Overriding(MaskedEnv):
    """Says by an attribute whether its actions are masked."""

    masks = False

    def live_action_spec(self):
        return self.masked if self.masks else self.full_action_spec


def test_watch_reads_an_overridden_live_spec_each_time():
    env = Overriding("one_hot", "late_spec")
    env.masked = env.full_action_spec.clone()
    env.masked["action"].update_mask(env.mask(0))
    watch = MaskWatch(env)
    assert not watch.present()
    env.masks = True
    assert watch.present()
