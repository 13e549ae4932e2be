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
def test_known_reads_are_passed_only(reads: list[Any]) -> None:
    module = EGreedyModule(*reads)
    actor = actor_of(module)
    assert shown(module, actor) == [{*reads}] * T
    assert actor.seen == [as_path(key) for key in reads]


def test_output_of_an_earlier_member_is_not_read_from_the_row() -> None:
    first = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])
    module = EGreedyModule("action", "done")
    assert (
        shown(module, actor_of(TensorDictSequential(first, module)))
        == [{"observation", "action", "done"}] * T
    )


@pytest.mark.parametrize("reads", ["robot", "elsewhere", "count"])
def test_missing_read_key_passes_the_whole_row(reads: str) -> None:
    module = EGreedyModule(reads)
    actor = actor_of(module)
    everything = {"observation", ("robot", "clock"), "done"}
    assert shown(module, actor) == [everything, *[everything | {"count"}] * (T - 1)]
    assert actor.seen is None


def test_reads_are_determined_for_each_block() -> None:
    module = EGreedyModule("observation")
    actor = actor_of(module)
    assert shown(module, actor) == [{"observation"}] * T
    everything = {"observation", ("robot", "clock"), "done"}
    hook = module.register_forward_hook(lambda *_: None)
    assert shown(module, actor) == [everything | {"count"}] * T
    hook.remove()
    assert shown(module, actor) == [{"observation"}] * T


def test_subclasses_and_namesakes_get_the_whole_row() -> None:
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


def test_groups_with_longer_batch_sizes_are_always_passed() -> None:
    module = EGreedyModule("observation")
    block, row = make_block(COUNTED, (3,)), layout(COUNTED, (3,))
    actor = PolicyActor(module, COUNTED, replace(row, groups={("robot",): (3, 2)}))
    drive(actor, block)
    assert ("robot", "clock") in module.shown[0]


def test_mask_key_set_later_is_read() -> None:
    module = EGreedyModule("observation")
    module.action_mask_key = "done"
    assert shown(module, actor_of(module)) == [{"observation", "done"}] * T


def test_replaced_forward_gets_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
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
