"""Every stateful transform continues from a saved state as if it had never stopped, at every cut point."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl._arrays.tensordicts import iter_leaves
from gleanrl.data import Bounded, Unbounded
from gleanrl.envs import ParallelEnv, SerialEnv
from gleanrl.envs.transforms import (
    ActionDiscretizer,
    ActionMask,
    AutoResetEnv,
    AutoResetTransform,
    CatFrames,
    Compose,
    MultiStepTransform,
    NoopResetEnv,
    ObservationNorm,
    RandomCropTensorDict,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    VecNorm,
)
from gleanrl.errors import SchemaError
from tests.envs.transforms.test_actions import ChoiceEnv
from tests.envs.transforms.test_auto_reset import SelfResetting
from tests.envs.transforms.ways import batched, single, team
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(lengths=(3, 1, 5, 2))
RANDOM = ActionDiscretizer.SamplingStrategy.RANDOM


class Momentum(Transform):
    """A user's transform with a buffer, a torch module and a carry."""

    def __init__(self) -> None:
        super().__init__(["observation"])
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.offset = nn.Parameter(torch.zeros(3))
        self.last = 0.0

    def _apply_transform(self, value: Any) -> Any:
        self.steps += 1
        self.last = float(value.sum())
        return value + self.offset + self.steps + self.last

    def get_extra_state(self) -> Any:
        return {"last": self.last}

    def set_extra_state(self, state: Any) -> None:
        self.last = float(state["last"])


@dataclass(frozen=True)
class Case:
    """An environment and its transforms."""

    base: Any
    chain: Any
    wrapper: Any = TransformedEnv

    def make(self) -> Any:
        return self.around(self.base())

    def around(self, base: Any) -> Any:
        transforms = self.chain()
        return self.wrapper(base, Compose(*transforms) if len(transforms) > 1 else transforms[0])


CASES = {
    "counts": Case(batched, lambda: [StepCounter(2)]),
    "counts of agents": Case(team, lambda: [StepCounter(4), RewardSum()]),
    "sums": Case(batched, lambda: [RewardSum()]),
    "sums as rewards": Case(batched, lambda: [RewardSum(reward_spec=True)]),
    "targets": Case(batched, lambda: [TargetReturn(9.0)]),
    "frames": Case(batched, lambda: [CatFrames(3, -1, in_keys=["observation"], out_keys=["stack"])]),
    "maxima": Case(batched, lambda: [TimeMaxPool(["observation"], T=3)]),
    "running statistics": Case(batched, lambda: [VecNorm()]),
    "frozen statistics": Case(batched, lambda: [VecNorm().freeze()]),
    "fixed statistics": Case(batched, lambda: [ObservationNorm(1.0, 2.0, ["observation"])]),
    "scaling": Case(batched, lambda: [RewardScaling(1.0, 2.0)]),
    "random primers": Case(
        batched, lambda: [TensorDictPrimer({"h": Bounded(0.0, 1.0, (2,))}, random=True), StepCounter()]
    ),
    "primers": Case(batched, lambda: [TensorDictPrimer({"h": Unbounded((2,))}), StepCounter()]),
    "random steps": Case(lambda: CountingEnv(Script(lengths=(9,))), lambda: [NoopResetEnv(3), StepCounter()]),
    "random intervals": Case(batched, lambda: [ActionDiscretizer(4, sampling=RANDOM)]),
    "masks": Case(lambda: ChoiceEnv(batch_size=(2,)), lambda: [ActionMask()]),
    "self-resetting": Case(lambda: SelfResetting(SCRIPT, (2,)), lambda: [AutoResetTransform()], AutoResetEnv),
    "a user's": Case(single, lambda: [StepCounter(), Momentum()]),
    "a chain in a chain": Case(
        batched, lambda: [Compose(StepCounter(4), RewardSum()), CatFrames(2, -1, in_keys=["observation"])]
    ),
}


def leaves(td: TensorDict) -> dict[Any, torch.Tensor]:
    return {path: leaf.clone() for path, leaf in iter_leaves(td)}


def equal(a: Any, b: Any) -> bool:
    """Return whether two states, or two lists of rows, are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype is b.dtype
            and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        )
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def go_on(env: Any, root: TensorDict, steps: range) -> tuple[TensorDict, list[Any]]:
    """Step and reset; return the next root and copies of all rows."""
    rows = []
    for t in steps:
        action = env.full_action_spec.rand(generator=torch.Generator().manual_seed(t))
        stepped, root = env.step_and_maybe_reset(root.copy().update(action))
        rows += [leaves(action), leaves(stepped["next"]), leaves(root)]
    return root, rows


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def forgetful(env: Any, root: TensorDict) -> TensorDict:
    """Return the root without the keys that transforms carry."""
    carried = [key for transform in env.transform.modules() for key in getattr(transform, "carried", ())]
    return root.exclude(*carried)


def saved(case: Case, cut: int) -> tuple[Any, TensorDict, dict[str, Any]]:
    """Return an environment after `cut` steps, its root and its state."""
    torch.manual_seed(0)
    env = case.make()
    root, _ = go_on(env, env.reset(), range(cut))
    return env, root, through_a_file(env.state_dict())


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_fresh_transform_continues_from_a_saved_state(name, cut):
    case = CASES[name]
    env, root, state = saved(case, cut)
    fresh = case.around(copy.deepcopy(env.base_env))
    torch.manual_seed(1)
    fresh.load_state_dict(state)
    assert equal(fresh.state_dict(), state)
    want = go_on(env, root, range(cut, cut + 9))[1]
    torch.manual_seed(2)
    assert equal(go_on(fresh, forgetful(fresh, root), range(cut, cut + 9))[1], want)


def corruptions(state: Any) -> list[Any]:
    """Return states with one wrong entry each."""
    out: list[Any] = [None, "rubbish", {**state, "foreign": torch.zeros(())}]
    out += [{key: value for key, value in state.items() if key != name} for name in state]
    for name, value in state.items():
        out += [{**state, name: wrong} for wrong in wrongs(name, value)]
    return out


def wrongs(name: str, value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        keys = [key for key in value if key != "last"]
        inner = [{**value, key: wrong} for key in keys for wrong in wrongs(str(key), value[key])]
        missing = [{k: v for k, v in value.items() if k != key} for key in value if len(value) > 1]
        return ["rubbish", *inner, *missing]
    if isinstance(value, torch.Tensor):
        return [
            "rubbish",
            value.to(torch.complex64),
            *([] if name.endswith(("loc", "scale")) else [value[None]]),
        ]
    return ["rubbish", 3.5]


@pytest.mark.parametrize("name", CASES)
def test_a_state_that_doesnt_fit_is_refused_and_changes_nothing(name):
    case = CASES[name]
    state = saved(case, 8)[2]
    env = saved(case, 5)[0]
    before = env.state_dict()
    for wrong in corruptions(state):
        with pytest.raises(SchemaError):
            env.load_state_dict(wrong)
        assert equal(env.state_dict(), before), wrong
    env.load_state_dict(state)
    assert equal(env.state_dict(), state)


def test_non_strict_load_takes_the_entries_it_knows():
    one, other = RewardScaling(1.0, 2.0), RewardScaling(3.0, 4.0)
    other.load_state_dict({"loc": one.loc, "foreign": 1}, strict=False)
    assert (float(other.loc), float(other.scale)) == (1.0, 4.0)


def test_loading_a_carry_needs_an_environment():
    env = Case(batched, lambda: [StepCounter()]).make()
    env.rollout(2)
    with pytest.raises(SchemaError, match="to its environment first"):
        StepCounter().load_state_dict(env.transform.state_dict())


def test_module_around_transforms_is_saved_by_torch():
    def around():
        return nn.Sequential(RewardScaling(0.0, 1.0), Compose(RandomCropTensorDict(2), VecNorm()))

    one, other = around(), around()
    one[0].loc.fill_(3.0)
    one[1][0](TensorDict({"a": torch.arange(9)}, [9]))
    state = one.state_dict()
    assert list(state) == ["0.loc", "0.scale", "1.transforms.0.generator", "1.transforms.1.statistics"]
    other.load_state_dict(state)
    assert equal(other.state_dict(), state)
    with pytest.raises(RuntimeError, match="generator state"):
        other.load_state_dict({**state, "1.transforms.0.generator": 3})


def test_states_are_copies():
    transform = RewardScaling(1.0, 2.0)
    state = transform.state_dict()
    transform.load_state_dict(state)
    transform.loc.fill_(9.0)
    assert float(state["loc"]) == 1.0


def test_random_crops_continue_from_a_saved_state():
    batch = TensorDict({"a": torch.arange(30).reshape(3, 10)}, [3, 10])
    one, other = RandomCropTensorDict(2), RandomCropTensorDict(2)
    one(batch.clone())
    other.load_state_dict(through_a_file(one.state_dict()))
    assert [one(batch.clone())["a"].tolist() for _ in range(5)] == [
        other(batch.clone())["a"].tolist() for _ in range(5)
    ]


def test_held_back_steps_continue_from_a_saved_state():
    torch.manual_seed(0)
    whole = batched().rollout(20, break_when_any_done=False)
    one, other = MultiStepTransform(3, 0.5), MultiStepTransform(3, 0.5)
    one.inv(whole[:, :10])
    state = through_a_file(one.state_dict())
    other.load_state_dict(state)
    assert equal(leaves(one.inv(whole[:, 10:])), leaves(other.inv(whole[:, 10:])))
    before = other.state_dict()
    required = {name: value for name, value in state["held"].items() if name != "seams"}
    unmarked = {name: value for name, value in before["held"].items() if name != "seams"}
    other.load_state_dict({"held": unmarked})  # states of former releases have no seams
    assert equal(other.state_dict(), before)
    broken = [{name: required[name] for name in required if name != gone} for gone in required]
    broken += [
        {**state["held"], name: wrong}
        for name in state["held"]
        for wrong in ("x", [1], {"a": torch.zeros(2)})
    ]
    for held in [None, *broken]:
        with pytest.raises(SchemaError):
            other.load_state_dict({"held": held})
        assert equal(other.state_dict(), before)


class TestRandomness:
    """Random numbers come from a generator that the transform owns."""

    def test_draws_follow_torchs_seed_and_leave_its_generator_alone(self):
        def rows(draws: int) -> tuple[Any, float]:
            torch.manual_seed(3)
            env = Case(batched, lambda: [ActionDiscretizer(4, sampling=RANDOM)]).make()
            root = go_on(env, env.reset(), range(1))[0]
            out = go_on(env, root, range(draws))[1]
            return out, float(torch.rand(()))

        one, after = rows(5)
        again, later = rows(8)
        assert equal(again[: len(one)], one)
        assert after == later

    def test_seed_of_the_transform_decides_alone(self):
        def drawn(seed: int | None) -> Any:
            env = TransformedEnv(
                batched(), TensorDictPrimer({"h": Bounded(0.0, 1.0, (2,))}, random=True, seed=seed)
            )
            return env.reset()["h"]

        assert torch.equal(drawn(5), drawn(5))
        assert not torch.equal(drawn(None), drawn(None))

    def test_a_state_before_the_first_draw_draws_nothing(self):
        torch.manual_seed(0)
        want = float(torch.rand(()))
        torch.manual_seed(0)
        state = NoopResetEnv(3).state_dict()
        assert state == {"generator": None}
        assert float(torch.rand(())) == want

    @pytest.mark.slow
    def test_batches_in_one_process_and_in_several_agree_once_they_are_seeded(self):
        def make() -> Any:
            return TransformedEnv(
                CountingEnv(Script(lengths=(9,))),
                Compose(NoopResetEnv(5), TensorDictPrimer({"h": Bounded(0.0, 1.0, (2,))}, random=True)),
            )

        found = []
        for kind in (SerialEnv, ParallelEnv):
            env = kind(2, make)
            env.set_seed(7)
            found.append(leaves(env.reset()))
            env.close()
        assert equal(*found)
        assert not torch.equal(found[0][("h",)][0], found[0][("h",)][1])
