"""Outputs, inputs that a policy changes, and actions of other forms are as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Normal

from gleanrl._arrays.schema import Field
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv
from gleanrl.errors import PolicyError
from tests._rollout.test_native_forward import network
from tests._rollout.test_native_modules import SIZES, Setting, floats, module, noise
from tests._rollout.test_native_policies import X, Y, mlp, played, require_torch


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Sequential(nn.Identity(), nn.ELU(inplace=True)),
        lambda: nn.Sequential(nn.Dropout().eval(), nn.SiLU(inplace=True)),
        lambda: nn.Sequential(nn.Sequential(nn.Identity()), nn.LeakyReLU(inplace=True)),
        lambda: nn.Sequential(nn.Flatten(-1), nn.ReLU(inplace=True)),
        lambda: network("return self.relu_(x)", imports=False),
        lambda: network("return self.relu_(x.unsqueeze(-1)).squeeze(-1)", imports=False),
        lambda: network("return self.relu_(x[..., :])", imports=False),
        lambda: network("a, b = x.chunk(2, -1)\nreturn torch.cat([self.relu_(a), b], -1)", imports=False),
        lambda: network("return self.relu_(self.drop(x))", imports=False),
    ],
)
def test_a_policy_that_changes_its_observation_raises(make: Any) -> None:
    for backend in ("auto", "torch"):
        with pytest.raises(PolicyError, match="changed its input"):
            Setting(module(make()), X, Y, backend=backend).play()


def test_a_policy_that_changes_a_reshaped_observation_raises() -> None:
    net = nn.Sequential(nn.Flatten(-2), nn.ReLU(inplace=True))
    with pytest.raises(PolicyError, match="changed its input"):
        Setting(module(net), {("x",): noise(3, 2, 2)}, Y).play()


def test_an_output_that_a_later_member_changes_in_place_equals_torch() -> None:
    policy = TensorDictSequential(
        module(nn.Linear(4, 4), "x", "h"),
        module(nn.ReLU(inplace=True), "h", "g"),
        module(nn.Linear(4, 4), "g", "y"),
    )
    require_torch(Setting(policy, X, {("h",): floats(4), ("g",): floats(4), **Y}))


def test_an_output_that_a_layer_of_a_later_member_changes_in_place_equals_torch() -> None:
    policy = TensorDictSequential(
        module(nn.Linear(4, 4), "x", "h"),
        module(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(4, 4)), "h", "y"),
    )
    require_torch(Setting(policy, X, {("h",): floats(4), **Y}))


def test_in_place_layers_inside_a_network_run_natively() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ELU(inplace=True))
    assert played(net).is_native()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_that_overwrite_observations_equal_torch(size: tuple[int, ...]) -> None:
    swap = network("return z, x", arguments="x, z", imports=False)
    roots = {("x",): noise(*size, 3, 4), ("z",): noise(*size, 3, 4, seed=1)}
    written = {("x",): floats(4), ("z",): floats(4)}
    setting = Setting(module(swap, "x z", "x z"), roots, written, size, actions=())
    require_torch(setting)


def test_an_observation_that_is_overwritten_and_copied_equals_torch() -> None:
    policy = TensorDictSequential(
        module(nn.Linear(4, 4), "x", "h"), module(nn.Identity(), "x", "old"), module(nn.Identity(), "h", "x")
    )
    setting = Setting(policy, X, {("x",): floats(4), ("old",): floats(4), ("h",): floats(4)}, actions=())
    require_torch(setting)


def test_a_key_that_is_written_twice_equals_torch() -> None:
    policy = TensorDictSequential(
        module(nn.Linear(4, 4), "x", "y"), module(nn.Tanh(), "y", "y"), module(nn.Linear(4, 4), "y", "y")
    )
    setting = Setting(policy, X, Y)
    require_torch(setting)
    assert setting.is_native(), setting.said


def test_nested_keys_equal_torch() -> None:
    policy = TensorDictModule(nn.Linear(4, 4), [("robot", "pose")], [("robot", "action")])
    setting = Setting(policy, {("robot", "pose"): noise(3, 4)}, {("robot", "action"): floats(4)})
    require_torch(setting)
    assert setting.is_native(), setting.said


@pytest.mark.parametrize(
    ("dtype", "count", "fits"),
    [
        (torch.bool, 2, True), (torch.bool, 4, False), (torch.uint8, 4, True), (torch.uint8, 400, False),
        (torch.int32, 4, True), (torch.float32, 4, True), (torch.float64, 400, True), (torch.int16, 4, True),
    ],
    ids=str,
)  # fmt: skip
def test_actions_that_a_conversion_would_change_raise_as_in_torch(
    dtype: torch.dtype, count: int, fits: bool
) -> None:
    head = network("return torch.argmax(x, -1)", imports=False)
    x = torch.zeros(3, count)
    x[:, -1] = 1
    for backend in ("auto", "torch"):
        setting = Setting(module(head), {("x",): x}, {("y",): Field(torch.Size([]), dtype)}, backend=backend)
        if fits:
            assert (setting.play()[("y",)] == count - 1).all()
        else:
            with pytest.raises(PolicyError, match="can't hold"):
                setting.play()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_actions_of_other_shapes_are_converted_or_refused_as_in_torch(
    shape: tuple[int, ...], size: tuple[int, ...]
) -> None:
    head = network("return torch.argmax(self.fc(x), -1)", imports=False)
    results = []
    for backend in ("auto", "torch"):
        x = {("x",): noise(*size, 3, 4)}
        setting = Setting(
            module(head), x, {("y",): Field(torch.Size(shape), torch.int64)}, size, backend=backend
        )
        try:
            results.append(setting.play()[("y",)])
        except PolicyError as error:
            results.append(str(error))
    assert str(results[0]) == str(results[1])


# --------------------------------------------------------------------------------------------- limits of a comparison
def test_members_that_torch_computes_are_not_called_for_the_comparison() -> None:
    """They may count calls or keep running statistics outside of a module."""
    calls: list[torch.Tensor] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.clone())
        return x * len(calls)

    counting = TensorDictModule(counted, in_keys=["x"], out_keys=["h"])
    policy = TensorDictSequential(counting, module(mlp(), "h", "y"))
    setting = Setting(policy, X, {("h",): floats(4), **Y})
    found = setting.play()
    assert torch.equal(torch.stack(calls), X[("x",)])
    assert torch.equal(found[("h",)], X[("x",)] * torch.arange(1.0, 4.0).unsqueeze(-1))
    assert setting.said[1] == "Sequential: native"


def test_members_behind_an_output_without_a_column_are_left_to_torch() -> None:
    policy = TensorDictSequential(module(nn.Softmin(-1), "x", "_h"), module(mlp(), "_h", "y"))
    setting = Setting(policy, X, Y)
    require_torch(setting)
    assert "'_h' is no column" in setting.said[1]


def test_a_comparison_leaves_generators_and_modules_unchanged() -> None:
    counting = network("self.calls = self.calls + 1\nreturn self.fc(x) + torch.rand(4)", imports=False)
    policy = TensorDictSequential(module(counting, "x", "h"), module(mlp(), "h", "y"))
    setting = Setting(policy, X, {("h",): floats(4), **Y})
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with torch.no_grad():
        setting._actor.bind(setting.block())
    assert torch.equal(before, torch.get_rng_state()) and counting.calls == 0
    assert setting.said[1] == "Sequential: native"


def test_normal_parameters_of_an_odd_number_equal_torch() -> None:
    policy = module(nn.Sequential(nn.Linear(4, 5), NormalParamExtractor()), "x", "loc scale")
    setting = Setting(policy, X, {("loc",): floats(3), ("scale",): floats(2)})
    require_torch(setting)
    assert setting.is_native(), setting.said


def test_a_distribution_behind_a_member_that_torch_computes_is_native() -> None:
    """The comparison invents parameters, and torch refuses samples of infinite ones."""

    def parameters(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return observation[..., :1], observation[..., :1].abs() + 1

    policy = TensorDictSequential(
        TensorDictModule(parameters, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=Normal,
            default_interaction_type="random",
            return_log_prob=True,
        ),
    )
    collector = SyncDataCollector(GymEnv("Pendulum-v1"), policy, frames_per_batch=10, total_frames=10)
    collector.next()
    assert collector.stats().policy[1] == "ProbabilisticTensorDictModule: native"
    collector.shutdown()
