"""Numbers of choices have limits, masks and one-hot vectors."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs.choices import (
    Allowed,
    BoxList,
    CategoricalBox,
    ChoiceSpace,
    checked_mask,
    draw_below,
    require_choice,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.data.specs.cases import bools
from tests.data.specs.statistics import frequencies, uniform


def test_common_limits():
    assert ChoiceSpace(torch.tensor([[2, 3], [2, 3]])).common == (2, 3) and ChoiceSpace(4).common == (4,)
    varying = ChoiceSpace(torch.tensor([[2, 3], [3, 2]]))
    assert varying.common is None
    with pytest.raises(UnsupportedError, match="differ within the batch"):
        _ = varying.parts


def test_allowed_positions_come_first():
    allowed = Allowed.of(bools("0101 1000"))
    assert allowed.count.tolist() == [2, 1] and allowed.order[:, 0].tolist() == [1, 0]
    assert allowed.order[0, 1] == 3


def test_masks_by_index_are_as_wide_as_the_largest_limit():
    space = ChoiceSpace(torch.tensor([3, 1]), bools("0111"))
    assert space.by_index.tolist() == [[False, True, True], [True, False, False]]
    assert ChoiceSpace(torch.tensor([3, 1])).by_index is None
    mask = bools("01")
    assert ChoiceSpace(2, mask).by_index is mask


def test_draws_below_a_limit_never_reach_it():
    torch.manual_seed(0)
    limit = torch.tensor([1, 3, 2**52])
    value = draw_below(limit, (20000, 3), None)
    assert bool((value >= 0).all()) and bool((value < limit).all())
    assert uniform(frequencies(value[:, 1], 3)) and uniform(frequencies(value[:, 2] >> 48, 16))


def test_outside_and_nearest():
    index = torch.tensor([-1, 0, 1, 2, 3])
    free, masked = ChoiceSpace(3), ChoiceSpace(3, bools("100"))
    assert free.outside(index).tolist() == [True, False, False, False, True]
    assert masked.outside(index).tolist() == [True, False, True, True, True]
    assert free.nearest(index).tolist() == [0, 0, 1, 2, 2] and masked.nearest(index).tolist() == [0] * 5
    assert ChoiceSpace(3, bools("101")).nearest(torch.tensor([1])).tolist() == [0]
    assert ChoiceSpace(1).outside(bools("01")).tolist() == [False, True]


def test_all_indices():
    assert ChoiceSpace(3).count() == 3 and ChoiceSpace(3).all(False, None).tolist() == [0, 1, 2]
    masked = ChoiceSpace(torch.tensor([[2, 3]] * 2), bools("10011 10011"))
    assert masked.count() == 6 and len(masked.all(False, None)) == 6
    assert masked.all(True, None).tolist() == [[0, 1], [0, 2]]
    varying = ChoiceSpace(torch.tensor([[2, 3], [3, 2]]))
    assert varying.count() == 36
    with pytest.raises(UnsupportedError, match="differ within the batch"):
        varying.all(False, None)


def test_sequences_of_spaces():
    boxes = BoxList([CategoricalBox(2), CategoricalBox(3)])
    assert (
        len(boxes) == 2
        and [box.n for box in boxes] == [2, 3]
        and boxes == BoxList.from_nvec(torch.tensor([2, 3]))
    )
    assert [len(row) for row in BoxList.from_nvec(torch.tensor([[2, 3], [3, 2]])).boxes] == [2, 2]
    assert boxes.clone() == boxes and type(boxes.to("cpu")) is BoxList


def test_no_limit():
    space = CategoricalBox(-1)
    assert space.outside(torch.tensor([-1, 0, 2**62])).tolist() == [True, False, False]
    assert space.nearest(torch.tensor([-1, 2**62])).tolist() == [0, 2**62]


def test_one_hot_vectors():
    one, two = ChoiceSpace(3), ChoiceSpace(torch.tensor([2, 3]))
    row = one.one_hot(torch.tensor([1, 0]), torch.bool)
    assert row.tolist() == [[False, True, False], [True, False, False]] and one.peaks(
        row.to(torch.int8)
    ).tolist() == [
        1,
        0,
    ]
    row = two.one_hot(torch.tensor([1, 2]), torch.float32)
    assert row.tolist() == [0, 1, 0, 0, 1] and two.peaks(row).tolist() == [1, 2]
    assert one.miscounted(bools("110 010 000"), 1).tolist() == [True, False, True]
    assert one.miscounted(bools("110 010 000"), 0).tolist() == [True, False, False]
    assert two.miscounted(bools("10110 01001 01000"), 1).tolist() == [True, False, True]
    assert two.miscounted(bools("10110 01001 01000"), 0).tolist() == [True, False, False]
    assert one.index_dims == () and two.index_dims == (2,)


def test_masks_of_booleans_and_of_zeros_and_ones_are_expanded():
    source = bools("10")
    assert checked_mask(source, (3, 2)).tolist() == [[True, False]] * 3
    for dtype in (torch.int8, torch.uint8, torch.int64):
        assert torch.equal(checked_mask(source.to(dtype), (2,)), source)
    with pytest.raises(InvalidTypeError, match="float32"):
        checked_mask(source.float(), (2,))
    with pytest.raises(InvalidArgumentError, match=r"got 2 at index \(1,\)"):
        checked_mask(torch.tensor([1, 2], dtype=torch.int8), (2,))
    with pytest.raises(InvalidArgumentError):
        checked_mask(source, (3,))
    with pytest.raises(InvalidArgumentError, match=r"\(1, 0\)"):
        require_choice(torch.tensor([[False], [True]]))
