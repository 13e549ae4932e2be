"""Modules that change other modules, views that change in place, and parameters that the comparison must not touch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictSequential
from torch import Tensor, nn

from tests._rollout.test_native_forward import network
from tests._rollout.test_native_modules import Setting, floats, module, noise
from tests._rollout.test_native_policies import X, Y, require_torch


class Shift(nn.Module):
    """Changes another layer's bias at each call, as a noisy network does."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.others[0].bias.add_(1.0)
        return x


def test_weights_that_another_member_changes_take_effect_at_the_same_step() -> None:
    head = nn.Linear(4, 4)
    policy = TensorDictSequential(module(Shift(head), "x", "h"), module(head, "h", "y"))
    setting = Setting(policy, X, {**Y, ("h",): floats(4)})
    bias = head.bias.detach().clone()
    actions = setting.play()[("y",)]
    assert setting.said[-1] == "Linear: native"
    steps = actions - nn.functional.linear(X[("x",)], head.weight.detach(), bias)
    assert torch.allclose(steps, torch.arange(1.0, 4.0).unsqueeze(-1).expand(3, 4), atol=1e-5)


class Replace(Shift):
    """Gives another layer a hook at its second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.others[0].register_forward_hook(lambda layer, inputs, out: out * 0)
        return x


def test_hooks_that_another_member_adds_take_effect_at_the_same_step() -> None:
    head = nn.Linear(4, 4)
    setting = Setting(TensorDictSequential(module(Replace(head), "x", "h"), module(head, "h", "y")), X, Y)
    actions = setting.play()[("y",)]
    assert bool(actions[0].any()) and not bool(actions[1:].any())


class First(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, -1)[0]


@pytest.mark.parametrize(
    "head", [nn.ELU(inplace=True), nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))], ids=str
)
def test_layers_that_change_a_view_in_place_are_left_to_torch(head: nn.Module) -> None:
    layer = nn.Linear(4, 8)
    nn.init.zeros_(layer.weight)
    nn.init.ones_(layer.bias)  # positive values don't change, so the comparison can't find the fault
    second = nn.Sequential(First(), head, nn.Linear(4, 2))
    setting = Setting(
        TensorDictSequential(module(layer, "x", "h"), module(second, "h", "y")), X,
        {("y",): floats(2), ("h",): floats(8)}, actions=(("y",),),
    )  # fmt: skip
    require_torch(setting)
    with torch.no_grad():
        layer.bias.fill_(-1.0)
    require_torch(setting)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((3,), -8.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.p[..., :2]


def test_the_comparison_changes_no_parameter() -> None:
    policy = module(nn.Sequential(Own(), nn.LeakyReLU(0.5, inplace=True)))
    before = copy.deepcopy(policy)
    setting = Setting(policy, X, {("y",): floats(2)})
    with torch.no_grad():
        setting.native.members([])  # an empty policy has nothing to compare
        actions = setting.play()[("y",)]
        expected = [before.module(None).clone() for _ in range(3)]
    assert torch.equal(actions, torch.stack(expected))


def test_a_mapping_of_scales_that_changes_takes_effect() -> None:
    extractor = NormalParamExtractor()
    net = nn.Sequential(nn.Linear(4, 4), extractor)
    setting = Setting(module(net, "x", "y z"), X, {("y",): floats(2), ("z",): floats(2)})
    require_torch(setting)
    assert setting.is_native()
    extractor.scale_mapping.min_val = 3.0
    require_torch(setting)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.LeakyReLU(), "negative_slope"),
        (nn.ELU(), "alpha"),
        (nn.Softplus(), "threshold"),
        (nn.LayerNorm(4), "eps"),
    ],
    ids=str,
)
def test_a_tensor_as_the_number_of_a_layer_may_change(layer: nn.Module, name: str) -> None:
    number = torch.tensor(0.5)
    setattr(layer, name, number)
    setting = Setting(module(layer), X, Y)
    require_torch(setting)
    number.fill_(3.0)
    require_torch(setting)
    assert setting.said == (
        f"{type(layer).__name__}: torch ({type(layer).__name__} with {name} of type Tensor)",
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(type(net), "scale", property(lambda net: 7.0)),
        lambda net: setattr(
            type(net),
            "__getattribute__",
            lambda net, name: 7.0 if name == "scale" else nn.Module.__getattribute__(net, name),
        ),
        lambda net: setattr(type(net), "_call_impl", lambda net, x: x * 7.0),
        lambda net: setattr(net, "_call_impl", lambda x: x * 7.0),
    ],
    ids=["property", "getattribute", "call of the class", "call"],
)
def test_changes_of_a_class_or_its_call_take_effect(change: Callable[[Any], None]) -> None:
    net = network("return self.fc(x) * self.scale", imports=False)
    setting = Setting(module(net), X, Y)
    setting.play()
    assert setting.is_native()
    change(net)
    require_torch(setting)
    assert not setting.is_native()


def test_parameters_whose_memory_was_freed_are_left_to_torch() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    setting = Setting(module(net), X, Y)
    setting.play()
    net[0].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        setting.play()
    assert "was freed" in setting.said[0]


def test_outputs_that_share_memory_are_left_to_torch_beside_members_of_torch() -> None:
    class Spoil(nn.Module):
        def forward(self, g: Tensor) -> Tensor:
            return g.relu_() * torch.ones(())

    policy = TensorDictSequential(
        module(nn.Linear(4, 4), "x", "h"), module(nn.Identity(), "h", "g"), module(Spoil(), "g", "y")
    )
    setting = Setting(
        policy, {("x",): noise(3, 4)}, {("y",): floats(4), ("h",): floats(4)}, actions=(("y",),)
    )
    require_torch(setting)
