"""A loaded collector resumes in mid-episode bit for bit, or reports why it can't."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Unbounded
from gleanrl.envs import GymEnv, GymWrapper, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    NoopResetEnv,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    VecNorm,
)
from tests.collectors.helpers import SCRIPT
from tests.envs.test_simulator_state import Iterating
from tests.fakes_base import CountingEnv


def coin(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy that draws with torch's global generator."""
    shape = tensordict["observation"].shape[:-1]
    return tensordict.set("action", nn.functional.one_hot(torch.randint(2, shape), 2))


def cart(*transforms: Any) -> Any:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms))


class Recurrent(nn.Module):
    """Acts by a carried state and by random numbers."""

    def forward(self, observation: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tanh(state + observation + torch.randn(()))
        return nn.functional.one_hot((state.sum(-1) > 0).long(), 2), state


def recurrent() -> TensorDictModule:
    return TensorDictModule(
        Recurrent(), in_keys=["observation", "state"], out_keys=["action", ("next", "state")]
    )


ENVS: dict[str, Callable[[], Any]] = {
    "single": lambda: GymEnv("CartPole-v1"),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=2),
    "vector of its own": lambda: GymEnv("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point"),
    "serial": lambda: SerialEnv(2, lambda: cart(StepCounter(max_steps=7), RewardSum())),
    "transformed serial": lambda: TransformedEnv(
        SerialEnv(2, lambda: GymEnv("CartPole-v1")),
        Compose(InitTracker(), RewardSum(), CatFrames(3, dim=-1, in_keys=["observation"])),
    ),
    "transforms that draw and learn": lambda: cart(NoopResetEnv(3, random=True), VecNorm()),
    "by TensorDicts": lambda: cart(StepCounter(max_steps=7), lambda tensordict: tensordict),
}


def make(env: Any, policy: Any = coin, frames: int = 12, total: int = 96, **kwargs: Any) -> SyncDataCollector:
    return SyncDataCollector(env, policy, frames_per_batch=frames, total_frames=total, **kwargs)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def check_goes_on(build: Callable[[], SyncDataCollector], batches: int = 3) -> None:
    """Check that a fresh collector, loaded after `batches` batches, delivers the same batches as the saved one."""
    torch.manual_seed(0)
    first = build()
    first.set_seed(5)
    for _ in range(batches):
        first.next()
    state = through_a_file(first.state_dict())
    expected = [batch.clone() for batch in first]
    torch.manual_seed(99)
    second = build()
    second.load_state_dict(state)
    found = [batch.clone() for batch in second]
    assert len(found) == len(expected) > 0
    for one, other in zip(expected, found, strict=True):
        assert flatten(one).keys() == flatten(other).keys()
        for path, leaf in flatten(one).items():
            assert torch.equal(leaf, flatten(other)[path]), path  # type: ignore[arg-type]
    before, after = first.stats(), second.stats()
    assert after.cut == 0
    assert (before.stepped, before.episodes, before.mean_return) == (
        after.stepped,
        after.episodes,
        after.mean_return,
    )


@pytest.mark.parametrize("env", ENVS)
def test_loaded_collector_continues_the_stream(env: str) -> None:
    check_goes_on(lambda: make(ENVS[env]()))


@pytest.mark.parametrize("batches", [0, 1, 7])
def test_loaded_collector_continues_at_every_cut(batches: int) -> None:
    check_goes_on(lambda: make(GymEnv("CartPole-v1")), batches)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"policy": None},
        {"init_random_frames": 60},
        {"max_frames_per_traj": 5, "track_policy_version": True},
        {"trajs_per_batch": 2, "total": 240},
        {"split_trajs": True},
        {"reset_at_each_iter": True},
        {"return_same_td": True},
    ],
    ids=str,
)
def test_loaded_collector_continues_with_every_option(kwargs: dict[str, Any]) -> None:
    check_goes_on(lambda: make(SerialEnv(2, ENVS["single"]), **kwargs))


def test_loaded_collector_continues_the_policys_carry() -> None:
    check_goes_on(lambda: make(cart(TensorDictPrimer(state=Unbounded((4,)))), recurrent()))


def test_loaded_collector_continues_held_back_trajectories() -> None:
    def build() -> SyncDataCollector:
        return make(CountingEnv(SCRIPT, (2,)), None, 6, 60, trajs_per_batch=3)

    check_goes_on(build, 1)


def cut(build: Callable[[], SyncDataCollector], reason: str) -> SyncDataCollector:
    first = build()
    batch = first.next()
    second = build()
    with pytest.warns(UserWarning, match=reason):
        second.load_state_dict(through_a_file(first.state_dict()))
    after = second.next()
    assert batch is not None and after is not None
    ids = [set(b["collector", "traj_ids"].flatten().tolist()) for b in (batch, after)]
    assert not ids[0] & ids[1] and second.stats().cut == after.numel() // after.shape[-1]
    assert second.stats().delivered == 24
    return second


def test_unsupported_environment_state_ends_and_counts_trajectories() -> None:
    second = cut(lambda: make(GymWrapper(Iterating()), None), "1 trajectories end .*range_iterator")
    third = make(GymWrapper(Iterating()), None)
    with pytest.warns(UserWarning, match="1 trajectories end"):
        third.load_state_dict(second.state_dict())
    assert third.stats().cut == 2


def test_state_of_another_environment_ends_trajectories() -> None:
    torch.manual_seed(3)
    first = make(GymEnv("CartPole-v1"), None)
    first.set_seed(3)
    batch = first.next()
    assert batch is not None and not batch["next", "done"][-1]
    second = make(GymEnv("Pendulum-v1"), None)
    with pytest.warns(UserWarning, match=r"1 trajectories end .*shape: expected .*, the state has .*\[4\]"):
        second.load_state_dict(first.state_dict())
    assert second.next() is not None and second.stats().cut == 1


def test_collector_that_loads_an_earlier_state_uses_new_ids() -> None:
    collector = make(CountingEnv(SCRIPT), None)
    state = collector.state_dict()
    first = collector.next()
    collector.load_state_dict(state)
    again = collector.next()
    assert first is not None and again is not None
    assert (first["observation"] == again["observation"]).all()
    ids = [set(b["collector", "traj_ids"].flatten().tolist()) for b in (first, again)]
    assert not ids[0] & ids[1]


def test_state_after_a_failure_begins_with_the_reset() -> None:
    def build() -> SyncDataCollector:
        return make(GymEnv("CartPole-v1"))

    torch.manual_seed(3)
    first = build()
    first.next()
    first.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = build()
        second.load_state_dict(first.state_dict())
    one, other = first.next(), second.next()
    assert one is not None and other is not None and (one["observation"][0] == other["observation"][0]).all()
