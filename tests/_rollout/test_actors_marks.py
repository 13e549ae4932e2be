"""Marks show whether a policy changed its input in place."""

from __future__ import annotations

import pytest
import torch

from gleanrl._rollout import actors as module
from gleanrl._rollout.actors import marks
from tests.ways import both_ways

way = both_ways(module)


class Apart(torch.Tensor):
    """A tensor subclass."""


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.zeros(3, 2),
        lambda: torch.zeros(3, 2).t()[1:],
        lambda: torch.zeros(0),
        lambda: torch.zeros(2, requires_grad=True),
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(2).as_subclass(Apart),
    ],
)
def test_marks_are_numbers_of_changes_and_addresses(tensor):
    tensors = (torch.zeros(3), tensor())
    with torch.no_grad():
        tensors[1].fill_(1.0)
    mark = marks()
    mark.take(tensors)
    assert mark.taken() == [(one._version, one.data_ptr()) for one in tensors]
    assert mark.unchanged(tensors)
    assert mark.unchanged(tensors)
    with torch.no_grad():
        tensors[0][1:].fill_(2.0)  # a view of it
    assert not mark.unchanged(tensors)
    mark.take(tensors)
    assert mark.unchanged(tensors)
    assert not mark.unchanged(tensors[:1])
    tensors[0].set_(torch.zeros(3))
    assert not mark.unchanged(tensors)
    mark.take(())
    assert mark.unchanged(())
    assert mark.taken() == []


@pytest.mark.usefixtures("way")
def test_marks_raise_the_underlying_error():
    with torch.inference_mode():
        tensor = torch.zeros(1)
    with pytest.raises(RuntimeError, match="version"):
        marks().take((tensor,))
    with pytest.raises(AttributeError):
        marks().take((1,))
