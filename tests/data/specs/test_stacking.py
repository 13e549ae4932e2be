"""`torch.stack` for specs."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Categorical, Composite, Stacked, StackedComposite, Unbounded, stack_specs
from gleanrl.errors import IndexRangeError, InvalidArgumentError, InvalidTypeError, UnsupportedError


def test_equal_specs_give_one_of_their_kind():
    assert torch.stack([Unbounded((2,))] * 3) == Unbounded((3, 2))
    assert (
        torch.stack([Unbounded((2,))] * 3, 1) == Unbounded((2, 3)) == torch.stack([Unbounded((2,))] * 3, -1)
    )
    assert torch.stack((Composite(a=Categorical(2)),) * 2, dim=0) == Composite(
        a=Categorical(2, (2,)), shape=(2,)
    )
    assert torch.stack([Categorical(2)]) == Categorical(2, (1,))


def test_unlike_specs_give_a_stack():
    leaf = torch.stack([Unbounded((2,)), Unbounded((3,))])
    assert type(leaf) is Stacked and leaf == stack_specs([Unbounded((2,)), Unbounded((3,))])
    assert type(torch.stack([Composite(), Composite(a=None)])) is StackedComposite
    assert torch.stack([Categorical(2, (4,)), Categorical(3, (4,))], -1).stack_dim == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: stack_specs([]), InvalidArgumentError, "at least one"),
        (lambda: torch.stack([Unbounded(), torch.zeros(1)]), InvalidTypeError, "expected specs"),
        (lambda: torch.stack([Unbounded(), Composite()]), InvalidTypeError, "leaf specs"),
        (lambda: torch.stack([Unbounded()] * 2, out=torch.zeros(1)), UnsupportedError, "out"),
        (lambda: torch.stack([Unbounded()] * 2, 2), IndexRangeError, "dimension 2 is out of range"),
        (
            lambda: torch.stack([Categorical(3).to_one_hot_spec()] * 2, 1),
            InvalidArgumentError,
            "one value's encoding",
        ),
    ],
)
def test_what_cannot_be_stacked(call, error, message):
    with pytest.raises(error, match=message):
        call()
