"""Policies of every kind run on a device: their inputs, their outputs and their carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions, nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import Categorical, Unbounded
from gleanrl.envs.transforms import TensorDictPrimer
from gleanrl.errors import NonFiniteError, PolicyError
from tests.devices.counting import WEIGHT, Counter, acted, check_stream, leaves_on, linear
from tests.fakes import Script
from tests.fakes_base import TwoActionEnv, TwoKeyEnv

D = "the device under test"
PLACES = [{"device": D}, {"policy_device": D}, {"policy_device": D, "env_device": D}]
CPU = torch.device("cpu")


def make(device: torch.device, places: dict[str, str], policy: Any, **kwargs: Any) -> SyncDataCollector:
    """Return a collector of two streams, seven steps of each in a batch."""
    env = kwargs.pop("env", None)
    given = {"frames_per_batch": 14, **dict.fromkeys(places, device), **kwargs}
    return SyncDataCollector(Counter(None, (2,)) if env is None else env, policy, **given)


def next_of(collector: SyncDataCollector) -> TensorDictBase:
    """Return the next batch."""
    batch = collector.next()
    assert batch is not None
    return batch


def place_of(device: torch.device, places: dict[str, str]) -> torch.device:
    """Return the device of a batch's tensors."""
    return CPU if set(places) == {"policy_device"} else device


def module(function: Any, outs: Any = ("action",), ins: Any = ("observation",)) -> TensorDictModule:
    return TensorDictModule(function, in_keys=list(ins), out_keys=list(outs))


@pytest.mark.parametrize("places", PLACES)
class TestInputs:
    """Every policy's input is on its device, and its output moves to the device of the batch."""

    def check(self, device: torch.device, places: dict[str, str], policy: Any, **kwargs: Any) -> None:
        collector = make(device, places, policy, **kwargs)
        batch = next_of(collector)
        assert torch.equal(batch["action"].cpu(), acted(batch))
        assert leaves_on(batch) == {place_of(device, places)}
        check_stream(batch, 7, (0, 1))
        collector.shutdown()

    def test_function_gets_the_observation_on_its_device(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        weight, seen = WEIGHT.to(device), set()

        def policy(observation: torch.Tensor) -> torch.Tensor:
            seen.add(observation.device)
            return observation @ weight.T

        self.check(device, places, policy)
        assert seen == {device}

    @pytest.mark.parametrize("trust", [False, True])
    def test_function_gets_a_tensordict_on_its_device(
        self, device: torch.device, places: dict[str, str], trust: bool
    ) -> None:
        weight, seen = WEIGHT.to(device), set()

        def policy(tensordict: TensorDictBase) -> TensorDictBase:
            seen.update(leaves_on(tensordict))
            return tensordict.set("action", tensordict["observation"] @ weight.T)

        self.check(device, places, policy, trust_policy=trust)
        assert seen == {device}

    def test_module_gets_its_input_on_its_device(self, device: torch.device, places: dict[str, str]) -> None:
        self.check(device, places, linear())

    def test_tensordict_module_gets_its_input_on_its_device(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        self.check(device, places, module(linear()))

    def test_sequence_of_many_kinds_gets_its_input_on_its_device(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        class Doubled(TensorDictModuleBase):
            in_keys, out_keys = ["half"], ["action"]

            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                return tensordict.set("action", tensordict["half"] * 2)

        self.check(device, places, TensorDictSequential(module(linear(WEIGHT / 2), ["half"]), Doubled()))

    def test_hooks_stay_with_the_policy(self, device: torch.device, places: dict[str, str]) -> None:
        policy, calls = linear(), []
        policy.register_forward_hook(lambda net, given, out: calls.append(out.device))
        self.check(device, places, policy)
        assert set(calls) == {device}

    def test_policy_of_a_factory_gets_its_input_on_its_device(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        self.check(device, places, None, policy_factory=lambda: linear().to(device))

    @pytest.mark.parametrize("there", [False, True])
    def test_lazy_parameters_are_materialised_on_their_device(
        self, device: torch.device, places: dict[str, str], there: bool
    ) -> None:
        lazy = nn.LazyLinear(2, bias=False, device=device if there else None)
        collector = make(device, places, lazy)
        assert tuple(lazy.weight.shape) == (2, 3), "made when the collector was"
        assert lazy.weight.device == (device if there else CPU)
        with torch.no_grad():
            lazy.weight.copy_(WEIGHT)
        batch = next_of(collector)
        assert torch.equal(batch["action"].cpu(), acted(batch))

    def test_meta_policy_needs_pushed_weights(self, device: torch.device, places: dict[str, str]) -> None:
        with torch.device("meta"):
            policy = nn.Linear(3, 2, bias=False)
        collector = make(device, places, policy)
        with pytest.raises(PolicyError, match="meta device"):
            collector.next()
        for given in (linear(), TensorDict.from_module(linear().to(device))):
            collector.update_policy_weights_(given)
            batch = next_of(collector)
            assert torch.equal(batch["action"].cpu(), acted(batch))
        assert {p.device for p in collector.policy.parameters()} == {device}


@pytest.mark.parametrize("places", [{"device": D}, {"policy_device": D}])
class TestOutputs:
    """Every output becomes a column, whatever its dtype."""

    def test_tuples_and_extra_keys_become_columns(self, device: torch.device, places: dict[str, str]) -> None:
        class Several(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = linear()

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return self.net(x), x.sum(-1, keepdim=True), x.argmax(-1), x > 1, x.half()

        outs = ["action", "value", ("info", "best"), ("info", "above"), "half"]
        batch = next_of(make(device, places, module(Several(), outs)))
        seen = batch["observation"]
        assert torch.equal(batch["action"].cpu(), acted(batch))
        assert torch.equal(batch["value"], seen.sum(-1, keepdim=True))
        assert torch.equal(batch["info", "best"].cpu(), seen.cpu().argmax(-1))
        assert torch.equal(batch["info", "above"], seen > 1) and batch["info", "above"].dtype is torch.bool
        assert torch.equal(batch["half"], seen.half()) and batch["half"].dtype is torch.float16
        assert leaves_on(batch) == {place_of(device, places)}

    def test_extra_keys_are_zero_in_random_frames(self, device: torch.device, places: dict[str, str]) -> None:
        policy = TensorDictSequential(module(linear()), module(lambda x: x + 1, ["value"]))
        collector = make(device, places, policy, init_random_frames=14)
        first, second = next_of(collector), next_of(collector)
        assert not first["value"].any() and torch.equal(second["value"], second["observation"] + 1)
        assert leaves_on(first) == leaves_on(second) == {place_of(device, places)}

    def test_several_observations_and_actions_become_columns(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        places = {**places, "env_device": "cpu"}  # this environment computes on the CPU
        given = {name: device for name in places if name != "env_device"} | {"env_device": "cpu"}

        def policy(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert observation.device == device
            return observation[..., :2] * 2, observation[..., 2].long() % 3

        script = Script(lengths=(4,))
        batch = next_of(SyncDataCollector(TwoActionEnv(script), policy, frames_per_batch=6, **given))
        assert batch["arm"].tolist() == (batch["observation"][:, :2] * 2).tolist()
        assert batch["gripper"].tolist() == [0, 1, 2, 0, 0, 1]

        def acts(clock: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            return torch.cat([clock, place[..., :1]], -1)

        batch = next_of(SyncDataCollector(TwoKeyEnv(script), acts, frames_per_batch=6, **given))
        assert batch["action"][:, 0].tolist() == [0, 1, 2, 3, 0, 1]

    def test_actions_of_another_dtype_are_converted(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        class Choosing(Counter):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.action_spec = Categorical(3, (*self.batch_size, 1))

        policy = module(lambda x: x[..., 2].clamp(max=2))  # float, and without the last dimension
        batch = next_of(make(device, places, policy, env=Choosing(None, (2,))))
        assert batch["action"].dtype is torch.int64 and batch["action"].shape == (2, 7, 1)
        assert batch["action"].cpu().equal(batch["observation"].cpu()[..., 2:].clamp(max=2).long())
        halves = make(device, places, module(lambda x: x[..., 2] / 2), env=Choosing(None, (2,)))
        with pytest.raises(PolicyError, match=r"holds 0.5 for environment 0 at step 1"):
            halves.next()

    def test_non_finite_outputs_raise(self, device: torch.device, places: dict[str, str]) -> None:
        nan = module(lambda x: torch.where(x[..., :2] == 2, float("nan"), 0.0))
        with pytest.raises(PolicyError, match="NaN|nan"):
            make(device, places, nan).next()

        class Broken(Counter):
            def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
                out = super()._step(tensordict)
                return out.set("reward", torch.where(out["reward"] == 2, float("inf"), out["reward"]))

        with pytest.raises(NonFiniteError, match="reward"):
            make(device, places, linear(), env=Broken(None, (2,))).next()
        marked = next_of(make(device, places, linear(), env=Broken(None, (2,)), nonfinite="mark"))
        mark = marked["collector", "nonfinite"]
        assert torch.equal(mark.cpu(), marked["next", "observation"].cpu()[..., 2] == 2)

    def test_private_entries_are_not_delivered(self, device: torch.device, places: dict[str, str]) -> None:
        policy = TensorDictSequential(module(linear()), module(torch.neg, ["_noise"]))
        assert "_noise" not in next_of(make(device, places, policy)).keys()


@pytest.mark.parametrize("places", [{"device": D}, {"policy_device": D}])
class TestDraws:
    """Policies draw from torch's generator of their device."""

    def actor(self, **kwargs: Any) -> ProbabilisticTensorDictSequential:
        def parameters(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[..., :2], x[..., 1:] + 1

        draw = ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=distributions.Normal, **kwargs
        )
        return ProbabilisticTensorDictSequential(module(parameters, ["loc", "scale"]), draw)

    def test_equal_seeds_give_equal_draws(self, device: torch.device, places: dict[str, str]) -> None:
        def build(seed: int) -> list[TensorDictBase]:
            collector = make(device, places, self.actor(return_log_prob=True), total_frames=28)
            torch.manual_seed(seed)
            return list(collector)

        (a, b), (c, d), (e, _) = build(1), build(1), build(2)
        assert torch.equal(a["action"], c["action"]) and torch.equal(b["action"], d["action"])
        assert not torch.equal(a["action"], b["action"]) and not torch.equal(a["action"], e["action"])
        keys = [key for key in a.keys() if "log_prob" in key]
        expected = distributions.Normal(a["loc"], a["scale"]).log_prob(a["action"])
        assert len(keys) == 1 and torch.allclose(
            a[keys[0]], expected.sum(-1) if a[keys[0]].ndim == 2 else expected
        )
        assert torch.equal(a["loc"], a["observation"][..., :2])

    @pytest.mark.parametrize("kind", ["mean", "mode", "deterministic"])
    def test_without_exploration_the_mean_acts(
        self, device: torch.device, places: dict[str, str], kind: str
    ) -> None:
        batch = next_of(make(device, places, self.actor(), exploration_type=kind))
        assert torch.equal(batch["action"], batch["observation"][..., :2])

    def test_discrete_distributions_draw_their_actions(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        class Choosing(Counter):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.action_spec = Categorical(3, self.batch_size)

        sure = module(lambda x: nn.functional.one_hot(x[..., 2].long() % 3, 3) * 1e4, ["logits"])
        draw = ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=distributions.Categorical
        )
        policy = ProbabilisticTensorDictSequential(sure, draw)
        batch = next_of(make(device, places, policy, env=Choosing(None, (2,))))
        assert torch.equal(batch["action"].cpu(), batch["observation"].cpu()[..., 2].long() % 3)

    def test_stepped_exploration_module_applies_to_the_next_batch(
        self, device: torch.device, places: dict[str, str]
    ) -> None:
        class Greedy(TensorDictModuleBase):
            in_keys, out_keys = ["action"], ["action"]

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("eps", torch.ones(()))

            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                action = tensordict["action"]
                explores = torch.rand(action.shape[:-1], device=action.device)[..., None] < self.eps
                return tensordict.set("action", torch.where(explores, torch.full_like(action, 99.0), action))

            def step(self) -> None:
                self.eps.sub_(1.0)

        greedy = Greedy()
        collector = make(device, places, TensorDictSequential(module(linear()), greedy))
        assert next_of(collector)["action"].unique().tolist() == [99.0]
        greedy.step()
        batch = next_of(collector)
        assert torch.equal(batch["action"].cpu(), acted(batch))


@pytest.mark.parametrize("places", PLACES)
class TestState:
    """A policy's carry stays on its device."""

    def test_state_under_a_private_key_is_carried(self, device: torch.device, places: dict[str, str]) -> None:
        def policy(tensordict: TensorDictBase) -> TensorDictBase:
            before = tensordict.get("hidden", None)
            assert before is None or before.device == device
            seen = tensordict["observation"]
            hidden = seen if before is None else before + seen
            return tensordict.update({"hidden": hidden, "action": hidden[..., :2]})

        collector = make(device, places, policy)
        both = torch.cat([next_of(collector), next_of(collector)], -1).cpu()
        assert torch.equal(both["hidden"], both["observation"].cumsum(-2))
        assert torch.equal(both["action"], both["hidden"][..., :2])

    @pytest.mark.parametrize("primed", [False, True])
    def test_a_state_below_next_is_zero_after_a_reset(
        self, device: torch.device, places: dict[str, str], primed: bool
    ) -> None:
        class Cell(TensorDictModuleBase):
            in_keys, out_keys = ["observation", "state"], ["action", ("next", "state")]

            def __init__(self) -> None:
                super().__init__()
                self.net = linear()

            def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
                seen = tensordict["observation"]
                state = tensordict.get("state", torch.zeros_like(seen)) + seen + 1
                return tensordict.update({"action": self.net(state), ("next", "state"): state})

        env = Counter(None, (2,))
        if primed:  # otherwise the collector primes it
            env = env.append_transform(TensorDictPrimer(state=Unbounded((3,))))
        collector = make(device, places, Cell(), env=env)
        batch = torch.cat([next_of(collector), next_of(collector)], -1).cpu()
        state, clock = torch.zeros(2, 3), batch["observation"][..., 2]
        for t in range(batch.shape[-1]):
            state = state * (clock[:, t, None] > 0)
            assert torch.equal(batch["state"][:, t], state)
            state = state + batch["observation"][:, t] + 1
            assert torch.equal(batch["next", "state"][:, t], state)
        assert torch.equal(batch["action"], batch["next", "state"] @ WEIGHT.T)
