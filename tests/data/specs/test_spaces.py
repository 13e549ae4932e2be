"""The numbers of a domain."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs.spaces import (
    Allowed,
    BoxSpace,
    DiscreteSpace,
    MultiDiscreteSpace,
    checked_mask,
    draw_below,
    nearest,
    outside,
    require_choice,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError
from tests.data.specs.cases import bools
from tests.data.specs.statistics import frequencies, uniform


def test_spaces_compare_by_content():
    assert DiscreteSpace(3) == DiscreteSpace(3) != DiscreteSpace(4)
    assert DiscreteSpace(3, bools("110")) == DiscreteSpace(3, bools("110")) != DiscreteSpace(3)
    assert DiscreteSpace(3) != DiscreteSpace(3, bools("111")) and DiscreteSpace(3) != 3
    box = BoxSpace(torch.zeros(2), torch.ones(2))
    assert box == box.map(torch.clone) != BoxSpace(torch.zeros(2), torch.ones(2) * 2)
    assert box != BoxSpace(torch.zeros(1), torch.ones(1)) and box != box.map(torch.Tensor.double)
    with pytest.raises(TypeError):
        hash(box)


def test_map_reaches_each_tensor():
    assert DiscreteSpace(3, bools("110")).map(lambda t: ~t) == DiscreteSpace(3, bools("001"))
    assert DiscreteSpace(3).map(lambda t: 1 / 0) == DiscreteSpace(3)


def test_common_bounds():
    assert BoxSpace(torch.zeros(2, 2), torch.ones(2, 2)).common == (0.0, 1.0)
    assert BoxSpace(torch.tensor([0.0, 1.0]), torch.ones(2)).common is None
    assert BoxSpace(torch.zeros(0), torch.ones(0)).common is None
    assert MultiDiscreteSpace(torch.tensor([[2, 3], [2, 3]])).common == (2, 3)
    assert MultiDiscreteSpace(torch.tensor([[2, 3], [3, 2]])).common is None


def test_allowed_positions_come_first():
    allowed = Allowed.of(bools("0101 1000"))
    assert allowed.count.tolist() == [2, 1] and allowed.order[:, 0].tolist() == [1, 0]
    assert allowed.order[0, 1] == 3


def test_padding_puts_columns_of_unlike_length_together():
    space = MultiDiscreteSpace(torch.tensor([3, 1]), bools("0111"))
    assert space.padded.tolist() == [[False, True, True], [True, False, False]] and space.count() == 2
    assert MultiDiscreteSpace(torch.tensor([3, 1])).padded is None


def test_draws_below_a_limit_never_reach_it():
    torch.manual_seed(0)
    limit = torch.tensor([1, 3, 2**52])
    value = draw_below(limit, (20000, 3), None)
    assert bool((value >= 0).all()) and bool((value < limit).all())
    assert uniform(frequencies(value[:, 1], 3)) and uniform(frequencies(value[:, 2] >> 48, 16))


def test_outside_and_nearest():
    index = torch.tensor([-1, 0, 1, 2, 3])
    assert outside(index, 3, None).tolist() == [True, False, False, False, True]
    mask = bools("100")
    assert outside(index, 3, mask).tolist() == [True, False, True, True, True]
    assert nearest(index, 3, None).tolist() == [0, 0, 1, 2, 2] and nearest(index, 3, mask).tolist() == [0] * 5
    assert nearest(torch.tensor([1]), 3, bools("101")).tolist() == [0]
    assert outside(bools("01"), 1, None).tolist() == [False, True]
    space = DiscreteSpace(3, mask)
    assert space.outside(index).tolist() == outside(index, 3, mask).tolist() and space.count(2) == 1


def test_masks_are_checked_and_copied():
    source = bools("10")
    made = checked_mask(source, (3, 2), None)
    source[:] = True
    assert (
        made.tolist() == [[True, False]] * 3 and checked_mask([True, False], (2,), None).dtype == torch.bool
    )
    with pytest.raises(InvalidTypeError):
        checked_mask([1, 0], (2,), None)
    with pytest.raises(InvalidArgumentError):
        checked_mask(source, (3,), None)
    with pytest.raises(InvalidArgumentError, match=r"\(1, 0\)"):
        require_choice(torch.tensor([[[True]], [[False]]]))
