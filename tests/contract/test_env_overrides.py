"""Every way of stepping an environment calls the methods that a user's class overrides."""

from __future__ import annotations

from types import MethodType

import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv
from gleanrl.envs.transforms import Compose, RewardScaling, StepCounter, TransformedEnv
from tests.fakes import OracleEnv, Script

SCRIPT = Script(lengths=(3, 2))
STEPS = 6


def paid(out):
    """Return the outcome of a step with ten times the reward."""
    return out.set("reward", out.get("reward") * 10)


def shifted(out):
    """Return the result of a reset with shifted observations."""
    return out.set("observation", out.get("observation") + 100)


class Rewarding:
    def _step(self, tensordict):
        return paid(super()._step(tensordict))


class Restarting:
    def _reset(self, tensordict=None, **kwargs):
        return shifted(super()._reset(tensordict, **kwargs))


class RewardingInside(Rewarding, GymWrapper):
    pass


class RestartingInside(Restarting, GymWrapper):
    pass


class RewardingBehind(Rewarding, TransformedEnv):
    pass


class RestartingBehind(Restarting, TransformedEnv):
    pass


class PublicStep(TransformedEnv):
    def step(self, tensordict):
        stepped = super().step(tensordict)
        paid(stepped["next"])
        return stepped


class Translating(GymWrapper):
    def _output_transform(self, result):
        observation, reward, *rest = super()._output_transform(result)
        return observation, reward * 10, *rest


class TranslatingResets(GymWrapper):
    def _reset_output_transform(self, result):
        observation, info = super()._reset_output_transform(result)
        return observation + 100, info


class RewardingChain(Compose):
    def _step(self, tensordict, next_tensordict):
        return paid(super()._step(tensordict, next_tensordict).copy())


class RewardingTransform(RewardScaling):
    def _call(self, tensordict):
        return super()._call(tensordict.copy())

    def _apply_transform(self, value):
        return value * 10


def base(kind=GymWrapper):
    return kind(OracleEnv(script=SCRIPT))


def patched():
    env = TransformedEnv(base(), StepCounter())
    env._step = MethodType(lambda self, td: paid(TransformedEnv._step(self, td)), env)
    return env


def patched_transform():
    transform = RewardScaling(0.0, 1.0)
    transform._call = lambda td: paid(td.copy()) if "reward" in td.keys() else td
    return TransformedEnv(base(), transform)


REWARDS = {
    "step of a wrapper": lambda: base(RewardingInside),
    "step of a wrapper, transformed": lambda: TransformedEnv(base(RewardingInside), StepCounter()),
    "step of a transformed environment": lambda: RewardingBehind(base(), StepCounter()),
    "public step": lambda: PublicStep(base(), StepCounter()),
    "output of step": lambda: base(Translating),
    "chain": lambda: TransformedEnv(base(), RewardingChain(StepCounter())),
    "transform": lambda: TransformedEnv(base(), RewardingTransform(0.0, 1.0)),
    "this very environment": patched,
    "this very transform": patched_transform,
}
RESETS = {
    "reset of a wrapper": lambda: base(RestartingInside),
    "reset of a transformed environment": lambda: RestartingBehind(base(), StepCounter()),
    "output of reset": lambda: base(TranslatingResets),
}


def by_hand(env):
    """Step and reset in the order of the protocol."""
    rows, root = [], env.reset()
    for _ in range(STEPS):
        stepped, root = env.step_and_maybe_reset(env.rand_action(root))
        rows.append(stepped)
    return torch.stack(rows, -1)


def rolled_out(make):
    env = make()
    try:
        return env.rollout(STEPS, break_when_any_done=False)
    finally:
        env.close()


def collected(make):
    collector = SyncDataCollector(make, None, frames_per_batch=STEPS, total_frames=STEPS)
    try:
        return collector.rollout()
    finally:
        collector.shutdown()


def member(kind):
    def route(make):
        return rolled_out(lambda: kind(1, make))[0]

    return route


ROUTES = {
    "rollout": rolled_out,
    "collector": collected,
    "member of a SerialEnv": member(SerialEnv),
    "member of a ParallelEnv": member(ParallelEnv),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("make", REWARDS)
def test_every_way_of_stepping_calls_an_overridden_step(make, route):
    plain = by_hand(base())["next", "reward"]
    assert torch.equal(by_hand(REWARDS[make]())["next", "reward"], plain * 10)
    assert torch.equal(ROUTES[route](REWARDS[make])["next", "reward"], plain * 10)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("make", RESETS)
def test_every_way_of_stepping_calls_an_overridden_reset(make, route):
    expected = by_hand(RESETS[make]())["observation"]
    assert expected[0, 2] == 100 and expected[1, 2] == 1
    assert torch.equal(ROUTES[route](RESETS[make])["observation"], expected)


class RewardingSerial(Rewarding, SerialEnv):
    pass


class RewardingParallel(Rewarding, ParallelEnv):
    pass


class RewardingMembers(SerialEnv):
    def _step_members(self, roots):
        return [paid(outcome) for outcome in super()._step_members(roots)]


@pytest.mark.parametrize("kind", [RewardingSerial, RewardingParallel, RewardingMembers])
@pytest.mark.parametrize("route", [rolled_out, collected])
def test_batches_of_environments_call_overridden_methods(kind, route):
    steps = STEPS // 2 if route is collected else STEPS
    rewards = route(lambda: kind(2, base))["next", "reward"]
    plain = by_hand(base())["next", "reward"][:steps]
    assert torch.equal(rewards, torch.stack([plain * 10] * 2))
