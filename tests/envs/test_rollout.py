"""`env.rollout` equals a loop over `step_and_maybe_reset`, with chunks of every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase, GymWrapper, SerialEnv, step_mdp
from gleanrl.envs import rollout as module
from gleanrl.envs.transforms import RewardScaling, StepCounter, TransformedEnv
from gleanrl.errors import EnvironmentFailure, InvalidArgumentError, MissingArgumentError, UnsupportedError
from tests.fakes import OracleEnv, RaisingEnv, Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 5, 2))


def by_hand(env: Any, steps: int, stop: bool) -> TensorDict:
    root, rows = env.reset(), []
    for _ in range(steps):
        stepped, root = env.step_and_maybe_reset(root.set("action", torch.ones(*env.batch_size, 2)))
        rows.append(stepped.clone())
        if stop and stepped["next", "done"].any():
            break
    return torch.stack(rows, -1)


def ones(td: TensorDict) -> TensorDict:
    return td.set("action", torch.ones(*td.batch_size, 2))


@pytest.mark.parametrize("chunk", [1, 2, 3, 1024])
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("size", [(), (3,)])
def test_rollout_equals_a_loop(monkeypatch: Any, size: tuple[int, ...], stop: bool, chunk: int) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    got = CountingEnv(SCRIPT, size).rollout(8, ones, break_when_any_done=stop)
    expected = by_hand(CountingEnv(SCRIPT, size), 8, stop)
    assert got.batch_size == expected.batch_size and got.names[-1] == "time"
    for key in expected.keys(True, True):
        assert torch.equal(got[key], expected[key]), key
    assert all(leaf.is_contiguous() for leaf in got.values(True, True))


@pytest.mark.parametrize("make", [lambda: CountingEnv(SCRIPT), lambda: GymWrapper(OracleEnv(script=SCRIPT))])
def test_rollout_stops_without_resetting(make: Any) -> None:
    env = make()
    first, second = env.rollout(20), env.rollout(20)
    assert (first.shape[0], second.shape[0]) == (3, 5), "no episode is skipped between two rollouts"
    assert first["next", "done"].squeeze(-1).tolist() == [False, False, True]


@pytest.mark.parametrize("key", ["truncated", "own"])
@pytest.mark.parametrize("gradients", [True, False])
def test_rollout_stops_at_any_flag(key: str, gradients: bool) -> None:
    def env(*limits: int) -> EnvBase:
        base = [CountingEnv(Script(lengths=(length,))) for length in limits]
        return TransformedEnv(SerialEnv(2, base), StepCounter(4, truncated_key=key, update_done=False))

    with torch.set_grad_enabled(gradients):
        assert env(20, 20).rollout(9).shape == (2, 4) and env(20, 3).rollout(9).shape == (2, 3)
        assert env(20, 20).rollout(9, break_when_any_done=False).shape == (2, 9)
        waited = env(20, 3).rollout(9, break_when_all_done=True)
    assert waited["next", "observation"][..., 2].tolist() == [[1, 2, 3, 4], [1, 2, 3, 3]]


def test_a_policy_is_called_once_a_step() -> None:
    seen: list[float] = []

    def policy(td: TensorDict) -> TensorDict:
        seen.append(float(td["observation"][-1]))
        return ones(td).set("extra", td["observation"] * 2)

    data = CountingEnv(Script(lengths=(50,))).rollout(6, policy)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and torch.equal(data["extra"], data["observation"] * 2)


def test_callback_sees_each_whole_step() -> None:
    env, steps = CountingEnv(SCRIPT), []
    data = env.rollout(3, ones, callback=lambda e, td: steps.append((e, td.clone())))
    assert len(steps) == 3 and all(e is env for e, _ in steps)
    for t, (_, step) in enumerate(steps):
        assert all(torch.equal(step[key], data[key][t]) for key in data.keys(True, True))


def test_rollout_continues_from_a_given_root() -> None:
    env = CountingEnv(Script(lengths=(50,)))
    root = env.step(ones(env.reset()))["next"].exclude("reward")
    data = env.rollout(4, ones, auto_reset=False, tensordict=root)
    assert data["observation"][:, -1].tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(MissingArgumentError, match="tensordict"):
        env.rollout(4, auto_reset=False)


def test_return_contiguous_and_set_truncated_change_the_result() -> None:
    env = CountingEnv(Script(lengths=(50,)))
    lazy = env.rollout(3, return_contiguous=False)
    assert isinstance(lazy, LazyStackedTensorDict) and lazy.batch_size == (3,)
    marked = env.rollout(3, set_truncated=True)
    assert marked["next", "truncated"].squeeze(-1).tolist() == [False, False, True]
    assert torch.equal(marked["next", "done"], marked["next", "truncated"])
    assert not marked["next", "terminated"].any()
    out = marked.clone().zero_()
    assert env.rollout(3, out=out) is out and out["next", "observation"][-1, -1] == 3
    with pytest.raises(UnsupportedError, match="truncated"):
        CountingEnv(SCRIPT, flags=("done",)).rollout(2, set_truncated=True)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_invalid_max_steps_is_refused(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_steps"):
        CountingEnv(SCRIPT).rollout(steps)


def test_failure_names_the_environment() -> None:
    env = GymWrapper(RaisingEnv(script=Script(lengths=(50,)), at=2))
    with pytest.raises(EnvironmentFailure, match="environment 0"):
        env.rollout(5)


@pytest.mark.parametrize("size", [(), (2,)])
def test_a_rollout_from_a_root_that_is_done_begins_with_a_reset(size: tuple[int, ...]) -> None:
    env = CountingEnv(SCRIPT, size)
    stepped = env.rollout(3, ones)[..., -1]
    assert stepped["next", "done"].reshape(-1)[0]
    data = env.rollout(2, ones, auto_reset=False, tensordict=step_mdp(stepped))
    first = data["observation"].reshape(-1, 2, 3)[0]
    assert first.tolist() == [[0, 1, 0], [0, 1, 1]]
    if size:  # the other stream continues
        assert data["observation"][1].tolist() == [[1, 0, 3], [1, 0, 4]]
    assert not data["done"].any()


class Pendulum(EnvBase):
    """A pendulum with differentiable dynamics."""

    def __init__(self, mass: torch.Tensor | float = 1.0) -> None:
        super().__init__()
        self.mass = mass
        self.observation_spec = Composite(angle=Unbounded((1,)), speed=Unbounded((1,)))
        self.action_spec, self.reward_spec = Bounded(-2.0, 2.0, (1,)), Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"angle": torch.full((1,), 0.5), "speed": torch.zeros(1)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        angle, speed, torque = (tensordict[key] for key in ("angle", "speed", "action"))
        speed = speed + 0.05 * (15 * angle.sin() + 3 * torque / self.mass)
        angle = angle + 0.05 * speed
        return TensorDict({"angle": angle, "speed": speed, "reward": -(angle**2), "done": angle > 50}, [])


def controller() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def module_of(net: nn.Module) -> TensorDictModule:
    return TensorDictModule(
        lambda angle, speed: net(torch.cat([angle, speed], -1)),
        in_keys=["angle", "speed"],
        out_keys=["action"],
    )


def serial() -> EnvBase:
    return SerialEnv(2, Pendulum)


def scaled() -> EnvBase:
    return TransformedEnv(Pendulum(), RewardScaling(0.0, 1.0))


class TestGradients:
    """Gradients flow through a rollout in grad mode."""

    @pytest.mark.parametrize("make", [Pendulum, serial, scaled])
    def test_gradients_equal_a_loop(self, make: Callable[[], EnvBase]) -> None:
        net, env, steps = controller(), make(), 12
        rewards, root = [], env.reset()
        for _ in range(steps):
            stepped = env.step(module_of(net)(root))
            rewards.append(stepped["next", "reward"])
            root = step_mdp(stepped)
        expected = torch.autograd.grad(torch.stack(rewards).mean(), list(net.parameters()))
        data = env.rollout(steps, module_of(net))
        found = torch.autograd.grad(data["next", "reward"].mean(), list(net.parameters()))
        torch.testing.assert_close(found, expected)

    def test_gradients_reach_parameters_of_the_environment(self) -> None:
        mass = torch.tensor(1.0, requires_grad=True)
        torch.manual_seed(0)
        Pendulum(mass).rollout(5)["angle"].sum().backward()
        assert mass.grad is not None and mass.grad != 0

    def test_gradients_reach_the_root(self) -> None:
        root = Pendulum().reset()
        root["angle"].requires_grad_()
        start = root["angle"]
        data = Pendulum().rollout(4, auto_reset=False, tensordict=root)
        data["next", "angle"][-1].sum().backward()
        assert start.grad is not None and start.grad > 1

    @pytest.mark.parametrize("known", [True, False])
    def test_a_policy_that_learns_in_an_environment_that_is_not_differentiable(self, known: bool) -> None:
        net = nn.Linear(3, 2)
        module = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
        env = GymWrapper(OracleEnv(script=Script(lengths=(3,))))
        data = env.rollout(7, module if known else named(module), break_when_any_done=False)
        data["action"].sum().backward()
        expected = data["observation"].sum(0)
        assert torch.equal(net.weight.grad, expected.expand(2, 3))
        with torch.no_grad():
            plain = env.rollout(7, module, break_when_any_done=False)
        assert (
            data["observation"][:, 2].tolist() == plain["observation"][:, 2].tolist() == [0, 1, 2] * 2 + [0]
        )

    def test_no_gradients_without_parameters_or_grad_mode(self) -> None:
        frozen = controller().requires_grad_(False)
        assert not any(
            leaf.requires_grad for leaf in flatten(Pendulum().rollout(3, module_of(frozen))).values()
        )
        with torch.no_grad():
            data = Pendulum().rollout(3, module_of(controller()))
        assert not any(leaf.requires_grad for leaf in flatten(data).values())
        collector = SyncDataCollector(Pendulum(), module_of(controller()), frames_per_batch=3, total_frames=3)
        assert not any(leaf.requires_grad for leaf in flatten(next(iter(collector))).values())

    @pytest.mark.parametrize("policy", [None, "module"])
    @pytest.mark.parametrize("make", [Pendulum, serial, scaled])
    def test_data_are_equal_without_gradients(self, make: Callable[[], EnvBase], policy: str | None) -> None:
        found = []
        for mode in (True, False):
            net, env = controller(), make()
            steps: list[TensorDictBase] = []
            with torch.set_grad_enabled(mode):
                data = env.rollout(
                    9, policy and module_of(net), callback=lambda env, step, to=steps: to.append(step.clone())
                )
            assert torch.equal(torch.stack(steps, -1)["action"], data["action"])
            found.append(data)
        assert found[0].names == found[1].names
        left, right = map(flatten, found)
        assert left.keys() == right.keys() and all(torch.equal(left[path], right[path]) for path in left)


def named(function: Any) -> Any:
    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return function(tensordict)

    return policy
