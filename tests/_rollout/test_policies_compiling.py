"""Compiled policies return the same actions, compile each callable once, and report a missing compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl._rollout.policies import Compiler, compiler_of
from gleanrl.collectors import SyncDataCollector
from gleanrl.errors import InvalidTypeError, UnsupportedError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

EAGER = {"backend": "eager"}
SCRIPT = Script(ending="never")


def taken(policy: Any, **kwargs: Any) -> TensorDictBase:
    (batch,) = SyncDataCollector(CountingEnv(SCRIPT), policy, frames_per_batch=5, total_frames=5, **kwargs)
    return batch


class Counting:
    """A backend that counts its compilations."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


class OnTensorDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", self.net(tensordict.get("observation")))


@pytest.mark.parametrize(
    ("make", "graphs"),
    [
        (net, 1),
        (lambda: TensorDictModule(net(), ["observation"], ["action"]), 1),
        (
            lambda: TensorDictSequential(
                TensorDictModule(net(), ["observation"], ["hidden"]),
                TensorDictModule(nn.Tanh(), ["hidden"], ["action"]),
            ),
            2,
        ),
        (OnTensorDicts, 1),
    ],
    ids=["module", "TensorDictModule", "sequence", "on TensorDicts"],
)
def test_compiled_policy_returns_the_same_actions(make: Callable[[], Any], graphs: int) -> None:
    torch._dynamo.reset()
    backend = Counting()
    compiled, plain = taken(make(), compile_policy={"backend": backend, "fullgraph": False}), taken(make())
    assert torch.allclose(compiled["action"], plain["action"]) and backend.graphs >= graphs


def test_each_callable_is_compiled_once_and_weights_stay_shared() -> None:
    compiler, module = Compiler(EAGER, None), net()
    assert compiler(module) is compiler(module) is not compiler(net())
    with torch.no_grad():
        module.weight.fill_(1.0)
        assert torch.equal(compiler(module)(torch.ones(3)), module(torch.ones(3)))


def test_compile_policy_argument_is_parsed() -> None:
    assert compiler_of(None, None) is None and compiler_of(False, False) is None
    assert isinstance(compiler_of(EAGER, None), Compiler) and isinstance(compiler_of(True, None), Compiler)
    with pytest.raises(InvalidTypeError, match="compile_policy: .*got 'inductor'"):
        compiler_of("inductor", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("asked", [True, {"warmup": 2}])
def test_cuda_graphs_need_cuda(asked: Any) -> None:
    with pytest.raises(UnsupportedError, match="cudagraph_policy: .* need a CUDA device"):
        taken(net(), cudagraph_policy=asked)


def test_missing_compiler_gives_advice() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler")

    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=r"compile_policy: .*C\+\+ compiler.*(?s:.*)no compiler"):
        taken(net(), compile_policy={"backend": broken})
