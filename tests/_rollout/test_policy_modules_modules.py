"""A policy is decomposed into module calls with the same result, or kept whole where that isn't possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import distributions, nn

from gleanrl._arrays.tensordicts import flatten
from gleanrl._rollout.policy_modules import ProbabilisticCall, calls_of
from gleanrl.errors import PolicyError
from tests.fakes_modules import (
    SIZES,
    WHOLE,
    Named,
    Normal,
    check,
    gaussian,
    module,
    net,
    normal,
    root,
    run,
    split,
)

needs_generators = pytest.mark.skipif(
    "generator" not in inspect.signature(ProbabilisticTensorDictModule.__init__).parameters,
    reason="modules of this tensordict release take no generator",
)

PLAIN: dict[str, Callable[[], TensorDictModule]] = {
    "module": module,
    "two inputs": lambda: module(torch.sub, ins=["observation", "goal"]),
    "inputs by name": lambda: module(lambda *, a, b: a - b, ins={"b": "observation", "a": "goal"}),
    "nested keys": lambda: module(net(), outs=[("robot", "act")], ins=[("robot", "pose")]),
    "tuple": lambda: module(split, ["action", ("stats", "rest")]),
    "dict": lambda: module(lambda x: {"rest": x, "action": x + 1, "unused": x}, ["action", "rest"]),
    "tensordict": lambda: module(lambda x: TensorDict({"action": x, "rest": x * 2}, x.shape[:1]), ["rest"]),
    "array": lambda: module(lambda x: x.numpy() * 2),
    "arrays": lambda: module(lambda x: (x.numpy(), np.ones_like(x)), ["action", "rest"]),
    "a view of the input": lambda: module(lambda x: x[..., :1]),
    "the input itself": lambda: module(lambda x: x),
    "overwrites its input": lambda: module(lambda x: x + 1, ["observation"]),
    "a subclass that changes nothing": lambda: Named(net(), ["observation"], ["action"]),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_calls_of_modules_equal_the_module(name: str, size: torch.Size) -> None:
    check(PLAIN[name](), size)


@pytest.mark.parametrize("kind", [*InteractionType, None], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_calls_of_distributions_equal_the_module(size: torch.Size, kind: InteractionType | None) -> None:
    logits = ProbabilisticTensorDictSequential(
        module(net(3), "logits"), normal(in_keys=["logits"], distribution_class=distributions.Categorical)
    )
    policies = [
        gaussian(),
        gaussian(return_log_prob=True),
        gaussian(in_keys={"loc": "loc", "scale": "scale"}),
    ]
    nested = [("robot", "loc"), ("robot", "scale")]
    for score in (False, True):
        draw = normal(in_keys=nested, out_keys=[("robot", "act")], return_log_prob=score)
        policies.append(ProbabilisticTensorDictSequential(module(split, nested), draw))
    policies.append(TensorDictSequential(module(split, ["loc", "scale"]), normal()))
    policies.append(gaussian(default_interaction_type=InteractionType.RANDOM))
    if kind in (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC):
        policies.append(logits)
    for policy in policies:
        with set_interaction_type(kind):
            check(policy, size)


@pytest.mark.parametrize("given", ["params", ("robot", "params")], ids=str)
@pytest.mark.parametrize("outs", [["action"], ["action", ("hand", "grip")]], ids=str)
def test_calls_of_composite_distributions_equal_the_module(outs: list[Any], given: Any) -> None:
    names = ["action", ("hand", "grip")][: len(outs)]
    distribution = {
        "distribution_map": dict.fromkeys(names, Normal),
        "name_map": {name: name for name in names},
    }

    def parameters(x: torch.Tensor) -> TensorDict:
        out = TensorDict({}, x.shape[:-1])
        for name in names:
            out.set(name, TensorDict({"loc": x, "scale": x.exp()}, x.shape[:-1]))
        return out

    policy = ProbabilisticTensorDictSequential(
        module(parameters, [given]),
        normal(
            in_keys=[given],
            out_keys=outs,
            distribution_class=CompositeDistribution,
            distribution_kwargs=distribution,
        ),
    )
    values = run(policy, SIZES[1])
    expected = policy(root(SIZES[1]))
    for out in outs:
        path = out if isinstance(out, tuple) else (out,)
        assert torch.equal(values[path], expected.get(out)), path


def test_the_interaction_type_is_read_at_every_call() -> None:
    policy = gaussian()
    chain = calls_of(policy, SIZES[0])
    assert chain is not None and isinstance(chain[-1], ProbabilisticCall)
    seen = []
    for kind in (InteractionType.MODE, InteractionType.RANDOM, InteractionType.RANDOM):
        values: Any = flatten(root(SIZES[0]))
        with set_interaction_type(kind):
            for call in chain:
                call(values)
        seen.append(values["action",].tolist())
    assert seen[0] == root(SIZES[0])["observation"][:2].tolist() and seen[1] != seen[0] and seen[1] != seen[2]


def test_parameters_that_the_distribution_lacks_are_explained_by_the_module() -> None:
    policy = gaussian(in_keys={"mean": "loc", "scale": "scale"})
    with set_interaction_type("random"), pytest.raises(TypeError, match="dist_keys"):
        run(policy, SIZES[0])


@needs_generators
def test_private_generator_of_a_module_is_used() -> None:
    drawn = []
    for _ in range(2):
        policy = gaussian(generator=torch.Generator().manual_seed(3))
        with set_interaction_type("random"):
            drawn.append(run(policy, SIZES[1])["action",])
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_generators if "generator" in name else ()) for name in WHOLE],
)
def test_other_policies_are_not_decomposed(name: str) -> None:
    assert calls_of(WHOLE[name](), SIZES[1]) is None


def test_a_hook_on_the_wrapped_network_still_runs() -> None:
    network, calls = net(), []
    network.register_forward_hook(lambda *args: calls.append(1))
    run(module(network), SIZES[0])
    assert calls == [1]


@pytest.mark.parametrize("out", [lambda x: (x, x), lambda x: ()])
def test_unequal_numbers_of_outputs_and_keys_raise(out: Any) -> None:
    with pytest.raises(PolicyError, match=r"out_keys \['action'\]"):
        run(module(out), SIZES[0])


def test_a_network_sees_its_own_changes() -> None:
    layer = nn.Linear(3, 2)
    chain = calls_of(module(layer), SIZES[0])
    assert chain is not None
    with torch.no_grad():
        layer.weight.zero_(), layer.bias.fill_(4)
        values: Any = flatten(root(SIZES[0]))
        chain[0](values)
    assert values["action",].tolist() == [4, 4]
