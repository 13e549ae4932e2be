"""One call infers a policy's outputs and leaves the root unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import nn

from gleanrl._arrays.schema import Field
from gleanrl._rollout.infer_outputs import probe, spare
from gleanrl.collectors import SyncDataCollector
from gleanrl.errors import PolicyError
from tests.fakes import Script
from tests.fakes_base import CountingEnv

ACTION = {("action",): Field(torch.Size([2]), torch.float32)}


class TestProbe:
    root = TensorDict({"observation": torch.ones(4, 3), "mask": torch.ones(4), "hits": torch.ones(4)}, [4])

    def test_probe_finds_the_columns_and_leaves_the_root_unchanged(self) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            td["observation"].mul_(2)  # in place
            td.set("mask", td["mask"].clone())  # another tensor, equal
            td.update({"extra": torch.zeros(4, 2, dtype=torch.int32), "_private": torch.zeros(4)})
            return td.set("action", torch.zeros(4, 2, requires_grad=torch.is_grad_enabled()))

        before = self.root.clone()
        fields, values = probe(policy, self.root, ACTION)
        assert (self.root == before).all() and self.root.keys() == before.keys()
        assert next(iter(fields)) == ("action",), "actions come first"
        assert fields == {
            **ACTION,
            ("observation",): Field(torch.Size([3]), torch.float32),
            ("mask",): Field(torch.Size([]), torch.float32),
            ("extra",): Field(torch.Size([2]), torch.int32),
        }
        assert values["action",].requires_grad and (values["observation",] == 2).all()

    def test_probe_finds_outputs_in_a_lazy_stack(self) -> None:
        root = LazyStackedTensorDict.lazy_stack([*self.root.unbind(0)], 0)
        found, _ = probe(
            lambda td: td.set("action", torch.zeros(4, 2)).set("hits", td["hits"] + 1), root, ACTION
        )
        assert set(found) == {("action",), ("hits",)}

    def test_equal_copies_count_only_if_out_keys_name_them(self) -> None:
        def policy(td: TensorDictBase) -> TensorDictBase:
            out = td.clone().set("action", torch.zeros(4, 2))
            return out.set("hits", out["hits"] + 1)

        assert set(probe(policy, self.root, ACTION)[0]) == {
            ("action",),
            ("observation",),
            ("mask",),
            ("hits",),
        }
        policy.out_keys = ["action", "mask"]
        assert set(probe(policy, self.root, ACTION)[0]) == {("action",), ("mask",), ("hits",)}

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (lambda td: td.set("act", td["mask"]), r"no \['action'\] among its outputs \['act'\]"),
            (lambda td: td.set(("next", "action"), td["mask"]), "contains 'next'"),
            (lambda td: td["mask"], "got Tensor"),
            (lambda td: None, "got NoneType"),
        ],
    )
    def test_invalid_outputs_are_refused(self, policy: Any, message: str) -> None:
        with pytest.raises(PolicyError, match=message):
            probe(policy, self.root, ACTION)


def test_spare_copies_modules_where_possible() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not me")

    layer, stubborn, function = nn.Linear(1, 1), Stubborn(1, 1), lambda td: td
    copied = spare(layer)
    assert copied is not layer and torch.equal(copied.weight, layer.weight)
    assert copied.weight.data_ptr() != layer.weight.data_ptr()
    assert spare(stubborn) is stubborn and spare(function) is function


class Silent(TensorDictModuleBase):
    """Declares no out_keys."""

    in_keys = ["observation"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        value = tensordict["observation"].sum(-1, keepdim=True)
        out: TensorDictBase = tensordict.update(
            {"action": tensordict["observation"][..., :2], "value": value}
        )
        return out


class Brief(Silent):
    """Declares fewer out_keys than it writes."""

    out_keys = ["action"]


class Vain(Silent):
    """Declares other out_keys than it writes."""

    out_keys = ["value"]


@pytest.mark.parametrize("policy", [Silent(), Brief(), Vain(), TensorDictSequential(Brief())])
@pytest.mark.parametrize("size", [(), (2,)])
def test_trial_finds_outputs_beyond_out_keys(policy: Any, size: tuple[int, ...]) -> None:
    env = CountingEnv(Script(ending="never"), size)
    batch = next(iter(SyncDataCollector(env, policy, frames_per_batch=8)))
    assert torch.equal(batch["value"], batch["observation"].sum(-1, keepdim=True))
    rollout = CountingEnv(Script(ending="never"), size).rollout(3, policy)
    assert torch.equal(rollout["value"], rollout["observation"].sum(-1, keepdim=True))
