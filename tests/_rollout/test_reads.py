"""Policies with known reads get only these entries; all other policies get the whole row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import as_path
from gleanrl._rollout.actors import PolicyActor
from tests._rollout.blocks import ACTION, T, drive, layout, make_block


class EGreedyModule(TensorDictModuleBase):
    """Imitates the TorchRL module of this name, which reads its in_keys only; records the keys of its input."""

    __module__ = "torchrl.modules.tensordict_module.exploration"

    def __init__(self, *reads: Any) -> None:
        super().__init__()
        self.in_keys, self.out_keys = [*reads], ["action", "count"]
        self.shown: list[set[Any]] = []

    action_mask_key: Any = None

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.shown.append({*td.keys(True, True)})
        size = td.batch_size
        return td.set("action", torch.ones(*size, 2)).set("count", torch.ones(*size, 1))

    forward.__module__ = __module__


COUNTED = {**ACTION, ("count",): Field(torch.Size([1]), torch.float32)}


def actor_of(policy: Any) -> PolicyActor:
    return PolicyActor(policy, COUNTED, layout(COUNTED, (3,)))


def shown(module: EGreedyModule, actor: PolicyActor) -> list[set[Any]]:
    module.shown.clear()
    drive(actor, make_block(COUNTED, (3,)))
    return module.shown


@pytest.mark.parametrize("reads", [["observation"], [("robot", "clock"), "done"], []], ids=str)
def test_what_is_read_is_shown(reads: list[Any]) -> None:
    module = EGreedyModule(*reads)
    actor = actor_of(module)
    assert shown(module, actor) == [{*reads}] * T
    assert actor.seen == [as_path(key) for key in reads]


def test_what_a_member_before_wrote_isnt_read_from_the_row() -> None:
    first = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])
    module = EGreedyModule("action", "done")
    assert (
        shown(module, actor_of(TensorDictSequential(first, module)))
        == [{"observation", "action", "done"}] * T
    )


@pytest.mark.parametrize("reads", ["robot", "elsewhere", "count"])
def test_where_a_row_hasnt_got_what_is_read_all_is_shown(reads: str) -> None:
    module = EGreedyModule(reads)
    actor = actor_of(module)
    everything = {"observation", ("robot", "clock"), "done"}
    assert shown(module, actor) == [everything, *[everything | {"count"}] * (T - 1)]
    assert actor.seen is None


def test_it_is_found_out_for_each_block() -> None:
    module = EGreedyModule("observation")
    actor = actor_of(module)
    assert shown(module, actor) == [{"observation"}] * T
    everything = {"observation", ("robot", "clock"), "done"}
    hook = module.register_forward_hook(lambda *_: None)
    assert shown(module, actor) == [everything | {"count"}] * T
    hook.remove()
    assert shown(module, actor) == [{"observation"}] * T


def test_subclasses_and_others_of_that_name_may_look_at_anything() -> None:
    derived, elsewhere = (
        type(name, (EGreedyModule,), {"__module__": home})
        for name, home in (
            ("Derived", EGreedyModule.__module__),
            ("EGreedyModule", "somewhere.else"),
        )
    )
    for cls in (derived, elsewhere):
        module = cls("observation")
        assert len(shown(module, actor_of(module))[0]) == 3


def test_groups_of_sizes_of_their_own_are_shown_whatever_is_read() -> None:
    module = EGreedyModule("observation")
    block, row = make_block(COUNTED, (3,)), layout(COUNTED, (3,))
    actor = PolicyActor(module, COUNTED, replace(row, groups={("robot",): (3, 2)}))
    drive(actor, block)
    assert ("robot", "clock") in module.shown[0]


def test_a_mask_that_is_named_later_is_read() -> None:
    module = EGreedyModule("observation")
    module.action_mask_key = "done"
    assert shown(module, actor_of(module)) == [{"observation", "done"}] * T


def test_a_forward_that_was_replaced_may_look_at_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    module = EGreedyModule("observation")
    actor, own = actor_of(module), module.forward
    module.forward = lambda td: own(td)
    assert len(shown(module, actor)[0]) == 3
    del module.forward
    assert shown(module, actor) == [{"observation"}] * T
    monkeypatch.setattr(EGreedyModule, "forward", replaced)
    assert len(shown(module, actor)[0]) > 1


def replaced(self: EGreedyModule, td: TensorDictBase) -> TensorDictBase:
    self.shown.append({*td.keys(True, True)})
    return td.set("action", torch.ones(3, 2)).set("count", td["done"].float())
