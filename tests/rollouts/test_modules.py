"""A policy's calls do what the policy does; what can't be taken apart isn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from torch import distributions, nn

from gleanrl.errors import PolicyError
from gleanrl.rollouts.modules import ProbabilisticCall, calls_of
from gleanrl.tree import Path, flatten

SIZES = [torch.Size([]), torch.Size([4])]


def net(size: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, size))


def module(
    function: Any = None, outs: Any = "action", ins: Any = "observation", **kwargs: Any
) -> TensorDictModule:
    return TensorDictModule(function or net(), in_keys=ins, out_keys=outs, **kwargs)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., :2], x[..., 1:].exp()


class Normal(distributions.Normal):
    """Offers every interaction type."""

    median = property(lambda self: self.loc + 1)
    deterministic_sample = property(lambda self: self.loc + 2)


def normal(**kwargs: Any) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        kwargs.pop("in_keys", ["loc", "scale"]),
        kwargs.pop("out_keys", ["action"]),
        distribution_class=kwargs.pop("distribution_class", Normal),
        **kwargs,
    )


def gaussian(**kwargs: Any) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(module(split, ["loc", "scale"]), normal(**kwargs))


def root(batch_size: torch.Size) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    observation = torch.randn(*batch_size, 3, generator=generator)
    robot = TensorDict({"pose": observation + 1}, batch_size)
    return TensorDict({"observation": observation, "goal": observation * 2, "robot": robot}, batch_size)


def run(policy: Any, batch_size: torch.Size) -> dict[Path, Any]:
    """Return what the calls of `policy` make of `root`."""
    chain = calls_of(policy, batch_size)
    assert chain is not None, "this policy can be taken apart"
    values: dict[Path, Any] = flatten(root(batch_size))
    with torch.no_grad():
        for call in chain:
            call(values)
    return values


def check(policy: Any, batch_size: torch.Size) -> None:
    """The calls leave the very values that the policy leaves, drawn from the same random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        with torch.no_grad():
            expected = flatten(policy(root(batch_size)))
        after = torch.get_rng_state()
        torch.manual_seed(2)
        got = run(policy, batch_size)
        assert torch.equal(torch.get_rng_state(), after)
    assert set(got) == set(expected)
    for path, value in expected.items():
        assert got[path].dtype == value.dtype and torch.equal(got[path], value), path


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
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_modules(name: str, size: torch.Size) -> None:
    check(PLAIN[name](), size)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sequences(size: torch.Size) -> None:
    hidden, head = module(nn.Linear(3, 5), "hidden"), module(nn.Linear(5, 2), "action", "hidden")
    for policy in (
        TensorDictSequential(hidden, head),
        TensorDictSequential(TensorDictSequential(hidden), head),
        TensorDictSequential(hidden, head, inplace=True),
        TensorDictSequential({"first": hidden, "second": head}),
        TensorDictSequential(hidden, head, module(lambda a: a * 2, "action", "action")),
    ):
        check(policy, size)


@pytest.mark.parametrize("kind", [*InteractionType, None], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_distributions(size: torch.Size, kind: InteractionType | None) -> None:
    logits = ProbabilisticTensorDictSequential(
        module(net(3), "logits"), normal(in_keys=["logits"], distribution_class=distributions.Categorical)
    )
    policies = [
        gaussian(),
        gaussian(return_log_prob=True),
        gaussian(in_keys={"loc": "loc", "scale": "scale"}),
    ]
    policies.append(TensorDictSequential(module(split, ["loc", "scale"]), normal()))
    policies.append(gaussian(default_interaction_type=InteractionType.RANDOM))
    if kind in (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC):
        policies.append(logits)
    for policy in policies:
        with set_interaction_type(kind):
            check(policy, size)


@pytest.mark.parametrize("outs", [["action"], ["action", ("hand", "grip")]], ids=str)
def test_composite_distributions(outs: list[Any]) -> None:
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
        module(parameters, ["params"]),
        normal(
            in_keys=["params"],
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


def test_a_generator_of_its_own() -> None:
    drawn = []
    for _ in range(2):
        policy = gaussian(generator=torch.Generator().manual_seed(3))
        with set_interaction_type("random"):
            drawn.append(run(policy, SIZES[1])["action",])
    assert torch.equal(*drawn)


class Own(TensorDictModule):
    """A subclass may do anything."""

    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        return super().forward(tensordict).set("more", torch.ones(tensordict.batch_size))


class OwnSequence(TensorDictSequential):
    """A subclass may do anything."""


class Base(TensorDictModuleBase):
    """A module written by hand."""

    in_keys, out_keys = ["observation"], ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict


def hooked(policy: nn.Module, pre: bool = False) -> nn.Module:
    if pre:
        policy.register_forward_pre_hook(lambda module, args: None)
    else:
        policy.register_forward_hook(lambda module, args, out: None)
    return policy


def replaced(policy: nn.Module) -> nn.Module:
    policy.forward = lambda td: td  # type: ignore[method-assign]
    return policy


def selected(policy: Any) -> Any:
    return policy.select_out_keys("action")


WHOLE: dict[str, Callable[[], Any]] = {
    "function": lambda: net(),
    "by hand": Base,
    "subclass": lambda: Own(net(), ["observation"], ["action"]),
    "subclass of the sequence": lambda: OwnSequence(module()),
    "subclass inside": lambda: TensorDictSequential(module(), Own(net(), ["observation"], ["b"])),
    "hook": lambda: hooked(module()),
    "pre-hook": lambda: hooked(module(), pre=True),
    "hook on the sequence": lambda: hooked(TensorDictSequential(module())),
    "hook inside": lambda: TensorDictSequential(hooked(module())),
    "hook on the distribution": lambda: ProbabilisticTensorDictSequential(
        module(split, ["loc", "scale"]), hooked(normal())
    ),
    "forward replaced": lambda: replaced(module()),
    "method": lambda: module(net(), method="forward"),
    "not in place": lambda: module(net(), inplace=False),
    "not in place, empty": lambda: module(net(), inplace="empty"),
    "dropped output": lambda: module(split, ["action", "_"]),
    "selected outputs": lambda: selected(module(split, ["action", "b"])),
    "selected outputs of a sequence": lambda: selected(TensorDictSequential(module(split, ["action", "b"]))),
    "sequence not in place": lambda: TensorDictSequential(module(), inplace=False),
    "partial tolerant": lambda: TensorDictSequential(module(), partial_tolerant=True),
    "several distributions": lambda: ProbabilisticTensorDictSequential(
        module(split, ["loc", "scale"]), normal(out_keys=["first"]), normal(out_keys=["action"])
    ),
    "sampled already": lambda: ProbabilisticTensorDictSequential(
        module(split, ["loc", "scale"]), module(torch.zeros_like, "action", "loc"), normal()
    ),
    "nested parameters": lambda: normal(in_keys={"loc": ("p", "loc"), "scale": ("p", "scale")}),
    "generator in the batch": lambda: gaussian(generator="seed"),
    "several samples": lambda: gaussian(num_samples=[5]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_left_whole(name: str) -> None:
    assert calls_of(WHOLE[name](), SIZES[1]) is None


def test_a_hook_on_the_wrapped_network_still_runs() -> None:
    network, calls = net(), []
    network.register_forward_hook(lambda *args: calls.append(1))
    run(module(network), SIZES[0])
    assert calls == [1]


@pytest.mark.parametrize("out", [lambda x: (x, x), lambda x: ()])
def test_outputs_and_keys_in_unequal_number(out: Any) -> None:
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
