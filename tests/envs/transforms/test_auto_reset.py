"""Environments that reset themselves are collected, and lost last observations are marked."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Composite, Unbounded
from gleanrl.envs.transforms import (
    AutoResetEnv,
    AutoResetTransform,
    StepCounter,
    TransformedEnv,
    VecGymEnvTransform,
)
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.envs.transforms.ways import batches, joined
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 2, 4))


class SelfResetting(CountingEnv):
    """Begins the next episode in the step that ends one. A partial reset does nothing."""

    final = False

    def _reset(self, tensordict=None, **kwargs):
        if tensordict is not None and "_reset" in tensordict.keys():
            raise AssertionError("it resets itself")
        return super()._reset(None)

    def _step(self, tensordict):
        out = super()._step(tensordict)
        ended = out["done"].reshape(-1)
        last = out["observation"].clone()
        self._episode += ended
        self._clock[ended] = 0
        fresh = self._package({key: torch.zeros_like(ended) for key in self.flags})
        out["observation"] = fresh["observation"]
        if self.final:
            out["final"] = TensorDict({"observation": last}, self.batch_size)
        return out


class WithFinal(SelfResetting):
    final = True

    def _declare(self):
        super()._declare()
        spec = self.observation_spec
        spec["final"] = Composite(observation=Unbounded((*self.batch_size, 3)), shape=self.batch_size)
        self.observation_spec = spec

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict)
        out["final"] = TensorDict(
            {"observation": torch.full((*self.batch_size, 3), torch.nan)}, self.batch_size
        )
        return out


def plain(size):
    return joined(batches(CountingEnv(SCRIPT, size), sizes=(12,))[1])


@pytest.mark.parametrize("size", [(), (3,)])
def test_roots_continue_and_lost_observations_are_marked(size):
    batch = joined(batches(AutoResetEnv(SelfResetting(SCRIPT, size)), sizes=(5, 7))[1])
    want = plain(size)
    assert torch.equal(batch["observation"], want["observation"])
    done = batch["next", "done"][..., 0]
    assert bool(batch["next", "observation"][done].isnan().all())
    assert torch.equal(batch["next", "observation"][~done], want["next", "observation"][~done])
    assert torch.equal(batch["next", "done"], want["next", "done"])


def test_fill_values_can_be_changed_or_disabled():
    env = AutoResetEnv(SelfResetting(SCRIPT), AutoResetTransform(fill_float=-5.0))
    batch = joined(batches(env, sizes=(6,))[1])
    assert batch["next", "observation"][2].tolist() == [-5.0] * 3
    env = AutoResetEnv(SelfResetting(SCRIPT), AutoResetTransform(replace=False))
    batch = joined(batches(env, sizes=(6,))[1])
    assert batch["next", "observation"][2].tolist() == [0.0, 1.0, 0.0]


def test_partial_reset_in_mid_episode_is_refused():
    env = AutoResetEnv(SelfResetting(SCRIPT, (3,)))
    root = env.reset()
    with pytest.raises(UnsupportedError, match="one by one"):
        env.reset(root.set("_reset", torch.tensor([[True], [False], [False]])))
    assert env.reset()["observation"][:, 1].tolist() == [1.0, 1.0, 1.0]


def test_a_limit_of_steps_ends_all_or_none():
    env = AutoResetEnv(SelfResetting(Script(lengths=(5,))))
    env.append_transform(StepCounter(2))
    batch = env.rollout(4, break_when_any_done=False)
    assert batch["observation"][:, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    env = AutoResetEnv(SelfResetting(Script(lengths=(9, 2)), (3,)))
    env.append_transform(StepCounter(5))
    with pytest.raises(UnsupportedError, match="one by one"):
        env.rollout(9, break_when_any_done=False)


@pytest.mark.parametrize("size", [(), (3,)])
def test_vec_gym_env_transform_restores_last_observations(size):
    env = TransformedEnv(WithFinal(SCRIPT, size), VecGymEnvTransform())
    assert set(env.observation_spec.keys()) == {"observation"}
    batch = joined(batches(env, sizes=(5, 7))[1])
    want = plain(size)
    for key in ("observation", ("next", "observation"), ("next", "done")):
        assert torch.equal(batch[key], want[key])


class Pixels(SelfResetting):
    def _declare(self):
        super()._declare()
        self.observation_spec = Composite(
            observation=Unbounded((*self.batch_size, 3), dtype=torch.uint8), shape=self.batch_size
        )

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict)
        return out.set("observation", out["observation"].to(torch.uint8))

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.set("observation", out["observation"].to(torch.uint8))


def test_lost_observations_of_unsigned_integers_are_filled_with_zeros():
    batch = Pixels(Script(lengths=(3,)), auto_reset=True).rollout(4, break_when_any_done=False)
    assert batch["observation"][:, 2].tolist() == [0, 1, 2, 0]
    assert batch["next", "observation"][:, 2].tolist() == [1, 2, 0, 1]
    env = AutoResetEnv(Pixels(Script(lengths=(3,))), AutoResetTransform(fill_int=7))
    assert env.rollout(4)["next", "observation"][2].tolist() == [7, 7, 7]


@pytest.mark.parametrize("fill", [-1, 256])
def test_fill_value_that_the_dtype_cannot_hold_is_refused_at_the_start(fill):
    with pytest.raises(InvalidArgumentError, match=f"fill_int: .*0 to 255 for torch.uint8, got {fill}"):
        AutoResetEnv(Pixels(SCRIPT), AutoResetTransform(fill_int=fill)).reset()
