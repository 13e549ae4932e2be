"""A policy's carry is copied out, checked and copied in as state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl._rollout.protocol import PolicyCarry
from gleanrl.errors import SchemaError

SIZE = torch.Size([3])


def filled() -> PolicyCarry:
    carry = PolicyCarry(SIZE)
    carry.outputs = ((("hidden",), torch.ones(3, 2)), (("a", "_noise"), torch.zeros(3)))
    return carry


def test_saved_carry_continues_and_shares_no_memory() -> None:
    carry, other = filled(), PolicyCarry(SIZE)
    state, value = carry.state_dict(), carry.snapshot()
    carry.outputs[0][1].add_(1)
    other.load_state_dict(state)
    assert [path for path, _ in other.outputs] == [("hidden",), ("a", "_noise")]
    other.outputs[0][1].add_(2)
    assert bool((value[0][1] == 1).all()) and bool((torch.as_tensor(state[0][1]) == 1).all())
    carry.adopt(value)
    carry.outputs[0][1].add_(1)
    assert bool((value[0][1] == 1).all())
    carry.clear()
    assert carry.snapshot() == ()


@pytest.mark.parametrize(
    "state",
    [
        None,
        3,
        {"hidden": torch.ones(3)},
        [3],
        [[("hidden",), torch.ones(2, 2)]],
        [[("hidden",), 3.0]],
        [[[], torch.ones(3)]],
        [[(1,), torch.ones(3)]],
        [[("hidden",), torch.ones(3), 1]],
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state: Any) -> None:
    carry = filled()
    with pytest.raises(SchemaError, match="a policy's outputs|the policy's outputs|of a policy"):
        carry.load_state_dict(state)
    assert len(carry.outputs) == 2
