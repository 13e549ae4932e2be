"""`TensorForms` reports whether tensors are unchanged except for their values."""

from __future__ import annotations

import sys

import pytest
import torch

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import TensorForms

pytestmark = pytest.mark.skipif(EXCHANGE is None, reason="torch doesn't offer the interface")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.requires_grad_(),
        lambda tensor: setattr(tensor, "grad", torch.zeros_like(tensor)),
        lambda tensor: setattr(tensor, "seen", True),
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.resize_(2, 2),
        lambda tensor: tensor.set_(torch.zeros(3, 2)),
    ],
)
def test_changed_tensors_are_noticed(change):
    tensors = [torch.zeros(3), torch.zeros(3, 2), torch.zeros(())]
    made = TensorForms(EXCHANGE, torch.Tensor, tensors)
    assert made.unchanged(tensors)
    tensors[1].fill_(1.0)  # values aren't compared
    assert made.unchanged(tensors)
    change(tensors[1])
    assert not made.unchanged(tensors)


def test_tensors_are_not_held():
    tensor = torch.zeros(3)
    before = sys.getrefcount(tensor)
    made = TensorForms(EXCHANGE, torch.Tensor, [tensor])
    for _ in range(3):
        assert made.unchanged([tensor])
    assert sys.getrefcount(tensor) == before


def test_different_tensors_are_not_unchanged():
    tensors = [torch.zeros(3), torch.zeros(2)]
    made = TensorForms(EXCHANGE, torch.Tensor, tensors)
    assert made.unchanged(tensors)
    assert not made.unchanged(tensors[:1])
    assert not made.unchanged([*tensors, tensors[0]])
    assert not made.unchanged(tensors[::-1])
    assert not made.unchanged([tensors[0], torch.nn.Parameter(tensors[1], requires_grad=False)])
    assert TensorForms(EXCHANGE, torch.Tensor, []).unchanged([])


def test_values_other_than_tensors_are_refused():
    with pytest.raises(ValueError, match="exchange"):
        TensorForms(object(), torch.Tensor, [torch.zeros(1)])
    with pytest.raises((TypeError, RuntimeError)):
        TensorForms(EXCHANGE, torch.Tensor, [1.0])
