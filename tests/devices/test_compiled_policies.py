"""Policies that are compiled or captured as CUDA graphs return the same actions and follow weight updates."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.errors import UnsupportedError
from tests.devices.counting import WEIGHT, Counter, acted, check_stream, linear

WAYS: dict[str, dict[str, Any]] = {
    "compiled": {"compile_policy": True},
    "captured": {"cudagraph_policy": True},
    "captured after two calls": {"cudagraph_policy": {"warmup": 2}},
    "both": {"compile_policy": True, "cudagraph_policy": True},
}
PLACES = [("policy_device",), ("device",), ("policy_device", "env_device"), ()]


@pytest.fixture
def accelerator(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device to compile for, in this process only. Other tests cover the compiler for the CPU."""
    if device.type != "cuda":
        pytest.skip("compilers and graphs of CUDA")
    inductor = importlib.import_module("torch._inductor.config")
    monkeypatch.setattr(inductor, "compile_threads", 1)
    return device


def plain(net: nn.Module) -> nn.Module:
    return net


def wrapped(net: nn.Module) -> TensorDictModule:
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def sequence(net: nn.Module) -> TensorDictSequential:
    value = TensorDictModule(lambda x: x.sum(-1, keepdim=True), in_keys=["observation"], out_keys=["value"])
    return TensorDictSequential(wrapped(net), value)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # warnings of the compiler
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
@pytest.mark.parametrize("form", [plain, wrapped, sequence])
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_actions_are_right_and_updates_are_seen(
    accelerator: torch.device, way: str, places: tuple[str, ...], form: Any
) -> None:
    net = linear()
    if not places:
        net.to(accelerator)
    env = Counter(None if places else accelerator, (2,))
    given = dict.fromkeys(places, accelerator)
    collector = SyncDataCollector(env, form(net), frames_per_batch=28, **WAYS[way], **given)
    for number, factor in enumerate((1.0, 2.0, 0.0)):
        with torch.no_grad():
            net.weight.copy_(WEIGHT * factor)
        batch = collector.next()
        assert batch is not None and torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * factor))
        assert batch["action"].unique(dim=-2).shape[-2] > 1 or factor == 0
        if number == 0:
            check_stream(batch, 14, (0, 1))
        if form is sequence:
            assert torch.equal(batch["value"], batch["observation"].sum(-1, keepdim=True))
    collector.update_policy_weights_(TensorDict.from_module(form(linear(WEIGHT * 3))))
    batch = collector.next()
    assert batch is not None and torch.equal(batch["action"].cpu(), acted(batch, WEIGHT * 3))
    collector.shutdown()


def test_cuda_graphs_need_cuda(device: torch.device) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(UnsupportedError, match="CUDA"):
        SyncDataCollector(Counter(device), linear().to(device), frames_per_batch=4, cudagraph_policy=True)
