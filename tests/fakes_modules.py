"""TensorDict modules of many kinds, and checks that their members compute the same values as the whole module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from tensordict.nn.probabilistic import interaction_type
from torch import distributions, nn

from gleanrl._arrays.tensordicts import Path, flatten
from gleanrl._rollout.policy_modules import ModuleSequence, calls_of, members_of

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
    """Supports every interaction type."""

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
    """Return the values after the calls of `policy` have run on `root`."""
    chain = calls_of(policy, batch_size)
    assert chain is not None, "this policy can be taken apart"
    values: dict[Path, Any] = flatten(root(batch_size))
    with torch.no_grad():
        for call in chain:
            call(values)
    return values


def check(policy: Any, batch_size: torch.Size) -> None:
    """Check that the calls write the same values as the policy, from the same random numbers."""
    compare(policy, batch_size, lambda: run(policy, batch_size))
    check_in_turn(policy, batch_size)


def check_in_turn(
    policy: Any, batch_size: torch.Size, root: Callable[[torch.Size], TensorDict] = root
) -> None:
    """Check that the members, run in order on a TensorDict, write the same values as the policy."""
    in_turn = ModuleSequence(members_of(policy, batch_size))
    compare(policy, batch_size, lambda: flatten(in_turn(root(batch_size))), root)


def compare(
    policy: Any,
    batch_size: torch.Size,
    run: Callable[[], dict[Path, Any]],
    root: Callable[[torch.Size], TensorDict] = root,
) -> None:
    """Check that `run` returns the values that the policy computes from a root, with the same random numbers."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        expected = flatten(policy(root(batch_size)))
        after = torch.get_rng_state()
        torch.manual_seed(2)
        got = run()
        assert torch.equal(torch.get_rng_state(), after)
    assert set(got) == set(expected)
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert got[path].dtype == value.dtype and torch.equal(got[path], value), path
        else:
            assert got[path].equal(value), path


class Named(TensorDictModule):
    """A subclass that overrides no method."""


class NamedSequence(TensorDictSequential):
    """A subclass that overrides no method."""


class Own(TensorDictModule):
    """A subclass that overrides `forward`."""

    def forward(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> TensorDictBase:
        return super().forward(tensordict).set("more", torch.ones(tensordict.batch_size))


class OwnCall(TensorDictModule):
    """A subclass that overrides `_call_module`."""

    def _call_module(self, tensors: Any, **kwargs: Any) -> Any:
        return super()._call_module([x * 2 for x in tensors], **kwargs)


class OwnSequence(TensorDictSequential):
    """A subclass that overrides `_run_module`."""

    def _run_module(self, module: Any, tensordict: Any, **kwargs: Any) -> Any:
        return super()._run_module(module, tensordict, **kwargs).set("ran", torch.ones(tensordict.batch_size))


class OwnDraw(ProbabilisticTensorDictModule):
    """A subclass that overrides `forward` and records whether a sample was requested."""

    def forward(self, tensordict: Any, tensordict_out: Any = None, _requires_sample: Any = "missing") -> Any:
        out = super().forward(tensordict, tensordict_out, _requires_sample=bool(_requires_sample))
        return out.set("asked", torch.full(tensordict.batch_size, _requires_sample is True))


class Base(TensorDictModuleBase):
    """A module written by hand."""

    in_keys, out_keys = ["observation"], ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["goal"] + by_kind())


def hooked(policy: nn.Module, pre: bool = False) -> nn.Module:
    if pre:
        policy.register_forward_pre_hook(lambda module, args: None)
    else:
        policy.register_forward_hook(lambda module, args, out: None)
    return policy


def backward_hooked(policy: nn.Module) -> nn.Module:
    policy.register_full_backward_hook(lambda module, before, after: None)
    return policy


def compiled(policy: nn.Module) -> nn.Module:
    policy.compile(backend="eager")
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
    "subclass that calls otherwise": lambda: OwnCall(net(), ["observation"], ["action"]),
    "subclass of the sequence": lambda: OwnSequence(module()),
    "compiled": lambda: compiled(module()),
    "backward hook": lambda: backward_hooked(module()),
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
    "sampled already": lambda: ProbabilisticTensorDictSequential(
        module(split, ["loc", "scale"]), module(torch.zeros_like, "action", "loc"), normal()
    ),
    "a parameter within another one": lambda: normal(in_keys={"loc": "p", "scale": ("p", "scale")}),
    "generator in the batch": lambda: gaussian(generator="seed"),
    "several samples": lambda: gaussian(num_samples=[5]),
}


NO_POLICIES = (
    *("function", "compiled", "backward hook"),
    *("a parameter within another one", "generator in the batch", "several samples"),
)
"""Names of modules that can't run on a root."""


def by_kind() -> int:
    """Return the index of the current interaction type, or -1 if none is set."""
    kind = interaction_type()
    return -1 if kind is None else list(InteractionType).index(kind)
