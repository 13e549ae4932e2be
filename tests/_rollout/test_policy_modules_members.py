"""The members of a policy, called one after the other, equal the policy, on tensors and on TensorDicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    WrapModule,
    set_interaction_type,
    set_skip_existing,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from gleanrl._rollout.policy_modules import ModuleSequence, calls_of, members_of
from tests.fakes_modules import (
    NO_POLICIES,
    SIZES,
    WHOLE,
    Base,
    NamedSequence,
    Normal,
    Own,
    OwnDraw,
    OwnSequence,
    by_kind,
    check,
    check_in_turn,
    gaussian,
    module,
    net,
    normal,
    root,
    selected,
    split,
)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_members_of_sequences_equal_the_sequence(size: torch.Size) -> None:
    hidden, head = module(nn.Linear(3, 5), "hidden"), module(nn.Linear(5, 2), "action", "hidden")
    for policy in (
        TensorDictSequential(hidden, head),
        TensorDictSequential(TensorDictSequential(hidden), head),
        TensorDictSequential(hidden, head, inplace=True),
        TensorDictSequential({"first": hidden, "second": head}),
        NamedSequence(hidden, head),
        TensorDictSequential(hidden, head, module(lambda a: a * 2, "action", "action")),
    ):
        check(policy, size)


@pytest.mark.parametrize("kind", [None, InteractionType.MODE, InteractionType.RANDOM], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_members_of_several_distributions_draw_by_their_own_kinds(
    size: torch.Size, kind: InteractionType | None
) -> None:
    with set_interaction_type(kind):
        check(several(), size)
        check(drawing(parameters(), normal(out_keys=["first"]), negative("first")), size)


def counting(policy: nn.Module) -> nn.Module:
    policy.register_forward_hook(lambda module, args, out: out.set("calls", torch.ones(out.batch_size)))
    return policy


def sequence(*modules: Any) -> TensorDictSequential:
    return TensorDictSequential(*modules)


def drawing(*modules: Any, **kwargs: Any) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(*modules, **kwargs)


def negative(of: Any = "action") -> TensorDictModule:
    return module(torch.neg, "negative", of)


def parameters(of: Any = "observation") -> TensorDictModule:
    return module(split, ["loc", "scale"], of)


def scaled() -> TensorDictModule:
    return module(torch.exp, "scale", "loc")


def several(of: str = "observation", out: str = "action") -> ProbabilisticTensorDictSequential:
    """Draw twice, by the kinds that the members name: each member's own, not that of the last."""
    first = normal(out_keys=["first"], default_interaction_type="random")
    return drawing(parameters(of), first, normal(out_keys=[out], default_interaction_type="mean"))


MIXED: dict[str, Callable[[], Any]] = {
    "by hand": lambda: sequence(module(), Base()),
    "by hand, nested": lambda: sequence(sequence(Base(), negative()), Base()),
    "a subclass between": lambda: sequence(Base(), Own(net(), ["action"], ["b"]), negative("b")),
    "a sequence of its own": lambda: sequence(OwnSequence(module()), negative()),
    "a hook": lambda: sequence(counting(module()), negative()),
    "a hook on an inner sequence": lambda: sequence(counting(sequence(module())), negative()),
    "nested keys": lambda: sequence(Base(), module(outs=[("robot", "act")], ins=[("robot", "pose")])),
    "a new group": lambda: sequence(Base(), module(outs=[("new", "act")])),
    "another TensorDict": lambda: sequence(Base(), WrapModule(lambda td: td.select("action")), negative()),
    "selected outputs": lambda: sequence(selected(module(split, ["action", "b"])), negative()),
    "a dropped output": lambda: sequence(module(split, ["action", "_"]), negative()),
    "text": lambda: sequence(Base(), module(lambda text, x: x + len(text), ins=["text", "observation"])),
    "what isn't there": lambda: sequence(
        Base(), module(lambda x, h: x if h is None else h, ins=["action", "h"])
    ),
    "not in place": lambda: sequence(Base(), module(inplace=False)),
    "a group as output": lambda: sequence(Base(), module(lambda x: {"a": x}, ["b"]), negative(("b", "a"))),
    "a draw of its own": lambda: drawing(
        parameters(), OwnDraw(["loc", "scale"], ["action"], distribution_class=Normal)
    ),
    "a draw from what is made by hand": lambda: drawing(Base(), parameters("action"), normal(out_keys=["b"])),
    "a draw within": lambda: sequence(gaussian(), Base()),
    "several distributions": lambda: sequence(several(), Base()),
    "several draws by hand": lambda: drawing(Base(), several("action", "b"), negative()),
    "sampled already": lambda: sequence(WHOLE["sampled already"](), Base()),
    "reads the interaction type": lambda: drawing(
        module(lambda x: x + by_kind(), "loc"), scaled(), normal(default_interaction_type="mean")
    ),
    "by hand, reads the interaction type": lambda: drawing(
        Base(), module(torch.neg, "loc", "action"), scaled(), normal(default_interaction_type="mean")
    ),
    "a draw in front": lambda: drawing(
        *(parameters(), normal(out_keys=["first"]), parameters("first")),
        normal(default_interaction_type="random"),
        return_composite=False,
    ),
    **{f"alone: {name}": made for name, made in WHOLE.items() if name not in NO_POLICIES},
}


def with_text(batch_size: torch.Size) -> TensorDict:
    return root(batch_size).set("text", "left")


@pytest.mark.parametrize("kind", [None, InteractionType.MODE, InteractionType.RANDOM], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_members_of_mixed_sequences_equal_the_sequence(
    name: str, size: torch.Size, kind: InteractionType | None
) -> None:
    with set_interaction_type(kind):
        check_in_turn(MIXED[name](), size, with_text)


def test_a_batch_that_is_locked_or_of_another_size_is_refused_as_by_the_module() -> None:
    policy = TensorDictSequential(Base(), module(lambda x: x[0], ["action"]))
    in_turn = ModuleSequence(members_of(policy, SIZES[1]))
    for run in (policy, in_turn):
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            run(root(SIZES[1]))
    for run in (module(), ModuleSequence(members_of(module(), SIZES[1]))):
        with pytest.raises(RuntimeError, match="locked"):
            run(root(SIZES[1]).lock_())


def test_a_device_is_kept() -> None:
    made = module(lambda x: torch.zeros(4, 2))
    batch = ModuleSequence(members_of(made, SIZES[1]))(root(SIZES[1]).to("meta"))
    assert batch["action"].device.type == "meta"


def test_skip_existing_keeps_the_policy_whole() -> None:
    policy = TensorDictSequential(module(outs="goal"), module(torch.neg, "action", "goal"))
    check(policy, SIZES[1])
    with set_skip_existing(True):
        assert calls_of(policy, SIZES[1]) is None
        check_in_turn(policy, SIZES[1])


def test_hooks_on_all_modules_run() -> None:
    calls = []
    handle = register_module_forward_hook(lambda mod, args, out: calls.append(type(mod).__name__))
    try:
        ModuleSequence(members_of(TensorDictSequential(module(nn.Identity())), SIZES[1]))(root(SIZES[1]))
    finally:
        handle.remove()
    assert calls == ["Identity", "TensorDictModule", "TensorDictSequential"]
