"""The collector runs the user's policy or a copy, and new weights arrive completely or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl.collectors.policy_weights import PolicyWeights
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, PolicyError, SchemaError
from tests.collectors.helpers import NEVER, Net, Staying, make
from tests.fakes_base import CountingEnv

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    """Return a module with parameters, float buffers and an integer buffer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def elsewhere() -> Staying:
    """Return such a module that must be copied."""
    return Staying(net())


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if not value.is_meta}


def same(module: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    found = weights(module)
    return set(found) == set(expected) and all(torch.equal(found[k], v) for k, v in expected.items())


def change(module: nn.Module) -> None:
    """Change every parameter and every buffer."""
    for value in module.state_dict().values():
        value.add_(1)


class TestWithoutADevice:
    """The user's module itself runs."""

    def test_the_policy_is_the_module_and_its_weights_are_live(self) -> None:
        module = net()
        held = PolicyWeights(module, None)
        change(module)
        held.push()
        assert held.policy is module

    def test_given_weights_are_copied_in(self) -> None:
        module, other = net(), net()
        change(other)
        held = PolicyWeights(module, None)
        held.push(TensorDict.from_module(other))
        assert same(module, weights(other))
        change(other)
        assert not same(module, weights(other))


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_module_on_the_device_runs_itself(device: str) -> None:
    module = net()
    assert PolicyWeights(module, torch.device(device)).policy is module


class TestOnAnotherDevice:
    """A copy runs."""

    def test_the_copy_gets_the_current_weights_until_some_are_pushed(self) -> None:
        module = elsewhere()
        held = PolicyWeights(module, CPU)
        for _ in range(2):
            change(module)
            held.refresh()
            assert same(held.policy, weights(module)), "parameters and buffers, the integer one included"
        held.push()
        before = weights(module)
        change(module)
        held.refresh()
        assert same(held.policy, before)

    def test_the_copy_changes_by_push_only_and_in_place(self) -> None:
        module = elsewhere()
        held = PolicyWeights(module, CPU)
        before, tensors = weights(module), {name: id(p) for name, p in held.policy.named_parameters()}
        pointers = [p.data_ptr() for p in held.policy.parameters()]
        change(module)
        assert held.policy is not module and same(held.policy, before)
        held.push()
        assert same(held.policy, weights(module)), "parameters and buffers, the integer one included"
        assert {name: id(p) for name, p in held.policy.named_parameters()} == tensors
        assert [p.data_ptr() for p in held.policy.parameters()] == pointers
        change(module)
        assert not same(held.policy, weights(module))

    @pytest.mark.parametrize(
        "wrap", [TensorDict.from_module, lambda m: TensorDictParams(TensorDict.from_module(m))]
    )
    def test_given_weights_win_over_the_modules(self, wrap: Any) -> None:
        module, other = elsewhere(), elsewhere()
        change(other)
        held = PolicyWeights(module, torch.device("cpu:0"))
        held.push(wrap(other))
        assert same(held.policy, weights(other)) and not same(module, weights(other))

    def test_weights_of_a_tensordict_module_may_be_detached(self) -> None:
        module = TensorDictModule(elsewhere(), in_keys=["a"], out_keys=["action"])
        held = PolicyWeights(module, CPU)
        change(module)
        held.push(TensorDict.from_module(module).detach().clone())
        assert same(held.policy, weights(module))

    def test_pushed_weights_still_train(self) -> None:
        held = PolicyWeights(elsewhere(), CPU)
        held.push()
        assert all(p.requires_grad and p.grad_fn is None for p in held.policy.parameters())

    def test_module_without_weights_is_not_copied(self) -> None:
        tanh = nn.Tanh()
        held = PolicyWeights(tanh, torch.device("meta"))
        assert held.policy is tanh
        held.push()
        held.push(TensorDict.from_module(nn.Tanh()))

    def test_a_module_that_cannot_be_copied_is_refused_with_advice(self) -> None:
        module = elsewhere()
        module.hidden = torch.zeros(2, requires_grad=True) * 2  # type: ignore[assignment]
        with pytest.raises(
            PolicyError, match="Staying can't be copied to cpu: .*policy_device=None"
        ) as caught:
            PolicyWeights(module, CPU)
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("device", [None, CPU])
class TestWrongWeights:
    """No weight is copied."""

    def check(self, device: Any, given: Any, kind: type[Exception], message: str) -> None:
        held = PolicyWeights(net(), device)
        before = weights(held.policy)
        with pytest.raises(kind, match=message):
            held.push(given)
        assert same(held.policy, before)

    def spoilt(self) -> TensorDict:
        """Return weights whose every value differs from `net()`."""
        module = net()
        change(module)
        return TensorDict.from_module(module).detach().clone()

    def test_missing_key_raises(self, device: Any) -> None:
        given = self.spoilt()
        del given["2", "bias"]
        self.check(device, given, SchemaError, r"missing \[\('2', 'bias'\)\], unexpected \[\]")

    def test_extra_key_raises(self, device: Any) -> None:
        given = self.spoilt()
        given["2", "scale"] = torch.ones(2)
        self.check(device, given, SchemaError, r"missing \[\], unexpected \[\('2', 'scale'\)\]")

    @pytest.mark.parametrize("shape", [(1,), (), (3,), (1, 2)])
    def test_another_shape_raises_even_if_it_broadcasts(self, device: Any, shape: tuple[int, ...]) -> None:
        given = self.spoilt()
        given["2", "bias"] = torch.ones(shape)
        self.check(device, given, SchemaError, r"\('2', 'bias'\) expected shape \(2,\)")

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
    def test_another_dtype_raises(self, device: Any, dtype: torch.dtype) -> None:
        given = self.spoilt()
        given["2", "bias"] = given["2", "bias"].to(dtype)
        self.check(device, given, SchemaError, r"\('2', 'bias'\) expected .*torch.float32, got .*torch\.")

    def test_list_of_weights_raises(self, device: Any) -> None:
        given = list(net().parameters())
        self.check(device, given, InvalidTypeError, "a state dictionary or a module, got list")


@pytest.mark.parametrize(
    "form",
    [lambda m: m, lambda m: m.state_dict(), TensorDict.from_module, lambda m: nn.ModuleDict({"module": m})],
)
def test_weights_come_in_many_forms(form: Any) -> None:
    held, given = PolicyWeights(net(), CPU), net()
    change(given)
    held.push(form(given))
    assert same(held.policy, weights(given))


@pytest.mark.parametrize("policy", [None, lambda td: td])
@pytest.mark.parametrize("device", [None, CPU])
def test_push_to_a_policy_that_is_no_module_raises(policy: Any, device: Any) -> None:
    held = PolicyWeights(policy, device)
    assert held.policy is policy
    held.push()
    with pytest.raises(PolicyError, match="isn't a module"):
        held.push(TensorDict.from_module(net()))


class TestWithoutValues:
    """Parameters on the meta device, and lazy parameters that the first call makes."""

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(3, 2)

    @pytest.mark.parametrize("device", [None, "cpu"])
    def test_meta_policy_needs_pushed_weights(self, device: Any) -> None:
        policy, trained = self.on_meta(), nn.Linear(3, 2)
        collector = make(CountingEnv(NEVER), policy, policy_device=device)
        for missing in (collector.next, collector.state_dict):
            with pytest.raises(PolicyError, match=r"meta device.*update_policy_weights_\(weights\)"):
                missing()
        with pytest.raises(SchemaError, match="'bias'|'weight' is on the meta device"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(TensorDict.from_module(trained))
        batch = collector.next()
        assert batch is not None and torch.allclose(batch["action"], trained(batch["observation"]), atol=1e-5)
        assert all(weight.is_meta for weight in policy.parameters())

    @pytest.mark.parametrize("elsewhere", [False, True])
    @pytest.mark.parametrize(
        "wrap", [lambda m: m, lambda m: TensorDictModule(m, ["observation"], ["action"]), nn.Sequential]
    )
    def test_lazy_parameters_are_materialised_at_construction(self, wrap: Any, elsewhere: bool) -> None:
        lazy = nn.LazyLinear(2)
        policy: Any = wrap(lazy)
        collector = make(CountingEnv(NEVER), policy, policy_device="cpu" if elsewhere else None)
        assert lazy.weight.shape == (2, 3), "made when the collector was"
        assert collector.state_dict()["policy_state_dict"]
        batch = collector.next()
        assert batch is not None and torch.allclose(batch["action"], lazy(batch["observation"]), atol=1e-5)


@pytest.mark.parametrize(
    "named",
    [
        lambda net: {"policy_weights": net},
        lambda net: {"weights": net.state_dict()},
        lambda net: {"policy": TensorDict.from_module(net)},
        lambda net: {"weights_dict": {"policy": net}},
        lambda net: {"weights": net, "model_id": "policy"},
    ],
)
def test_weights_are_accepted_under_other_keywords(named: Any) -> None:
    collector = make(CountingEnv(NEVER), Net(0.5))
    collector.update_policy_weights_(**named(Net(0.25)))
    assert collector.next()["action"].unique().tolist() == [0.25] and collector.policy_version == 1
    collector.shutdown()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"weights": Net(), "policy": Net()}, InvalidArgumentError, "under several names"),
        ({"weights_dict": {"policy": Net()}, "weights": Net()}, InvalidArgumentError, "under several names"),
        ({"weights_dict": {"actor": Net()}}, InvalidArgumentError, "has one policy, 'policy', got .'actor'."),
        ({"weights": Net(), "model_id": "actor"}, InvalidArgumentError, "has one policy"),
        ({"wieghts": Net()}, InvalidTypeError, "unexpected keyword argument 'wieghts'"),
    ],
)
def test_ambiguous_or_missing_weights_are_refused(given: Any, error: Any, message: str) -> None:
    collector = make(CountingEnv(NEVER), Net(0.5))
    with pytest.raises(error, match=message):
        collector.update_policy_weights_(**given)
    assert collector.next()["action"].unique().tolist() == [0.5] and collector.policy_version == 0
    collector.shutdown()


class PartlyOnMeta(nn.Module):
    """Has a layer without values, and uses it if asked to."""

    def __init__(self, uses: bool = False) -> None:
        super().__init__()
        self.used, self.unused, self.uses = nn.Linear(3, 2), nn.Linear(3, 2, device="meta"), uses

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(observation)
        return out + self.unused(observation) if self.uses else out


@pytest.mark.parametrize("device", [None, "cpu"])
def test_unused_parameters_on_the_meta_device_do_not_matter(device: Any) -> None:
    policy = PartlyOnMeta()
    collector = make(CountingEnv(NEVER), policy, policy_device=device)
    for _ in range(2):
        batch = collector.next()
        assert batch is not None
        assert torch.allclose(batch["action"], policy(batch["observation"]), atol=1e-5)
        collector.update_policy_weights_()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="meta"):
        make(CountingEnv(NEVER), PartlyOnMeta(uses=True), policy_device=device)
