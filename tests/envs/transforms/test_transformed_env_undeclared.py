"""Undeclared entries of a transform are collected with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import SerialEnv
from gleanrl.envs.transforms import Compose, RewardScaling, StepCounter, Transform, TransformedEnv
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 1, 4))


class Adds(Transform):
    """Adds undeclared entries in `_call`."""

    calls = 0

    def _call(self, next_tensordict):
        self.calls += 1
        noise = torch.rand(next_tensordict["observation"].shape)
        next_tensordict["noise"] = noise
        return next_tensordict.set("twice", next_tensordict["observation"] * 2)


class AddsAtResetsToo(Adds):
    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


@pytest.mark.parametrize(
    "made", [Adds, AddsAtResetsToo, lambda: Adds()._call], ids=["call", "both", "function"]
)
def test_an_entry_that_no_spec_declares_is_collected_with_one_warning(made):
    def member():
        return TransformedEnv(CountingEnv(SCRIPT), Compose(StepCounter(), made()))

    at_reset = made is not Adds
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        env = member()
        rollout = env.rollout(5, break_when_any_done=False)
        batch = torch.cat(list(SyncDataCollector(member(), frames_per_batch=4, total_frames=8)))
        members = SerialEnv(2, member).rollout(5, break_when_any_done=False)
    told = [str(w.message) for w in caught if "no spec declares" in str(w.message)]
    assert len(told) == 1 and "twice" in told[0] and "transform_observation_spec" in told[0]
    for data in (rollout, batch, members):
        assert torch.equal(data["next", "twice"], data["next", "observation"] * 2)
        fresh = (data["observation"][..., 2] == 0).unsqueeze(-1)
        assert torch.equal(data["twice"], data["observation"] * 2 * (1 if at_reset else ~fresh))
    assert env.observation_spec["twice"].shape == (3,)


@pytest.mark.filterwarnings("ignore:.*no spec declares")
def test_the_trial_leaves_no_trace():
    transform = Adds()
    env = TransformedEnv(CountingEnv(SCRIPT), transform)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert "noise" in env.observation_spec.keys()
    assert torch.equal(torch.rand(2), expected)
    assert transform.calls == 0 and env.base_env.masks == []


@pytest.mark.filterwarnings("ignore:.*no spec declares")
def test_later_transforms_see_the_undeclared_entry():
    scaled = RewardScaling(0, 3.0, in_keys=["twice"])
    env = TransformedEnv(CountingEnv(SCRIPT), Compose(AddsAtResetsToo(), scaled))
    data = env.rollout(3)
    assert torch.equal(data["next", "twice"], data["next", "observation"] * 6)


def test_undeclared_entry_of_a_transform_that_fails_on_zeros_is_named():
    class Divides(Transform):
        def _call(self, next_tensordict):
            if not next_tensordict["observation"].any():
                raise ValueError("nothing there")
            return next_tensordict.set("more", next_tensordict["observation"])

    with pytest.raises(Exception, match="'more'"):
        TransformedEnv(CountingEnv(SCRIPT), Divides()).rollout(3)
