"""Specs of several independent choices encode, mask and draw them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.specs import Categorical, Composite, MultiCategorical, MultiOneHot
from gleanrl.data.specs.categorical import checked_counts
from gleanrl.data.specs.choices import BoxList
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    SpecError,
    UnsupportedError,
)
from tests.data.specs.cases import bools
from tests.data.specs.statistics import frequencies, uniform


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("spec", [MultiCategorical([3, 5]), MultiOneHot([3, 5])], ids=repr)
def test_each_choice_is_as_likely_and_independent(spec):
    first, second = spec.to_categorical(spec.rand((20000,))).unbind(-1)
    assert uniform(frequencies(first * 5 + second, 15))


@pytest.mark.parametrize("kind", [MultiCategorical, MultiOneHot])
def test_masked_draws_are_uniform_over_allowed_choices(kind):
    spec = kind([3, 5], mask=bools("10111010"))
    for column, allowed in zip(
        spec.to_categorical(spec.rand((20000,))).unbind(-1), (bools("101"), bools("11010")), strict=True
    ):
        counts = frequencies(column, len(allowed))
        assert bool((counts[~allowed] == 0).all()) and uniform(counts[allowed])


def test_counts_may_differ_within_a_batch():
    spec = MultiCategorical([[3, 2], [1, 5]])
    assert spec.shape == (2, 2) and spec.cardinality() == 30 and "varying" in repr(spec)
    assert spec.is_in(torch.tensor([[2, 1], [0, 4]])) and not spec.is_in(torch.tensor([[2, 2], [0, 4]]))
    assert spec[0] == MultiCategorical([3, 2]) and spec.nvec.tolist() == [[3, 2], [1, 5]]
    assert spec.project(torch.full((2, 2), 9)).tolist() == [[2, 1], [0, 4]]
    for call in (
        spec.to_one_hot_spec,
        lambda: spec.to_one_hot(spec.rand()),
        lambda: spec.update_mask(torch.ones(5, dtype=torch.bool)),
    ):
        with pytest.raises(UnsupportedError, match="differ within the batch"):
            call()


def test_encoding_takes_and_gives_integers():
    spec = MultiOneHot([3, 2])
    assert spec.encode([2, 0]).tolist() == [False, False, True, True, False]
    assert spec.encode(np.array([[0, 1], [1, 1]])).shape == (2, 5)
    assert spec.to_numpy(spec.encode([2, 0])).tolist() == [2, 0]
    assert MultiCategorical([3, 2]).encode((2, 1)).tolist() == [2, 1]
    for kind in (MultiOneHot, MultiCategorical):
        with pytest.raises(SpecError, match="encode"):
            kind([3, 2]).encode([0, 2])
        with pytest.raises(SchemaError, match="expected shape"):
            kind([3, 2]).encode([0, 0, 0])


@pytest.mark.parametrize("row", ["00010", "11010", "10011", "10000"])
def test_rows_that_are_not_one_hot_in_each_part_are_outside(row):
    assert not MultiOneHot([3, 2]).is_in(bools(row))
    assert MultiOneHot([3, 2]).is_in(MultiOneHot([3, 2]).project(bools(row)))


def test_numbers_other_than_one_are_outside():
    spec = MultiOneHot([2, 2], dtype=torch.float32)
    assert spec.is_in(torch.tensor([1.0, 0, 0, 1])) and not spec.is_in(torch.tensor([2.0, 0, 0, 1]))
    assert not spec.is_in(torch.tensor([float("nan"), 0, 0, 1]))


def test_projecting_picks_the_largest_allowed_of_each_part():
    spec = MultiOneHot([3, 2], dtype=torch.float32, mask=bools("01110"))
    assert spec.project(torch.tensor([0.9, 0.1, 0.3, -5.0, 2.0])).tolist() == [0, 0, 1, 1, 0]
    assert spec.project(torch.full((5,), float("-inf"))).tolist() == [0, 1, 0, 1, 0]


def test_projecting_integers_takes_the_nearest_allowed():
    spec = MultiCategorical([4, 2], mask=bools("100101"))
    assert spec.project(torch.tensor([[1, 0], [2, 9], [-1, 1]])).tolist() == [[0, 1], [3, 1], [0, 1]]


def test_a_mask_is_obeyed_replaced_and_removed():
    spec = MultiCategorical([3, 2], (2, 2), mask=bools("10110"))
    assert spec.mask.shape == (2, 5) and spec.cardinality() == 6
    assert spec.enumerate(use_mask=True)[:, 0].tolist() == [[0, 0], [2, 0]]
    assert spec.is_in(torch.tensor([[0, 0], [2, 0]])) and not spec.is_in(torch.tensor([[1, 0], [2, 0]]))
    spec.update_mask(bools("01001 11111"))
    assert not spec.is_in(torch.tensor([[0, 0], [2, 0]])) and len(spec[0].enumerate(use_mask=True)) == 1
    assert spec[1].is_in(torch.tensor([0, 0]))
    before = spec.clone()
    for mask, error in (
        (bools("11100"), InvalidArgumentError),
        (bools("111"), InvalidArgumentError),
        (torch.ones(5), InvalidTypeError),
    ):
        with pytest.raises(error, match="mask"):
            spec.update_mask(mask)
        assert spec == before
    spec.update_mask(None)
    assert spec.mask is None and spec.cardinality() == 6


def test_the_two_encodings_correspond():
    for mask in (None, bools("10110 01111")):
        codes = MultiCategorical([3, 2], (2, 2), mask=mask)
        rows = codes.to_one_hot_spec()
        assert rows == MultiOneHot([3, 2], (2, 5), mask=mask) and rows.to_categorical_spec() == codes
        assert codes.to_categorical_spec() is codes and rows.to_one_hot_spec() is rows
        value = codes.rand((4,))
        assert rows.is_in(codes.to_one_hot(value)) and torch.equal(
            rows.to_categorical(codes.to_one_hot(value)), value
        )
    with pytest.raises(SpecError, match="to_one_hot"):
        MultiCategorical([2]).to_one_hot(torch.tensor([2]))
    with pytest.raises(SpecError, match="to_categorical"):
        MultiOneHot([2]).to_categorical(bools("11"))
    assert MultiOneHot([2]).to_categorical(bools("11"), safe=False).tolist() == [0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MultiCategorical([]), InvalidArgumentError, "sequence of counts"),
        (lambda: MultiCategorical([2, -1]), InvalidArgumentError, "at least 0"),
        (lambda: MultiCategorical([1.5]), InvalidTypeError, "expected integers"),
        (lambda: MultiCategorical([[1, 2], [3]]), InvalidTypeError, "expected integers"),
        (lambda: MultiCategorical("ab"), InvalidTypeError, "expected integers"),
        (lambda: MultiCategorical([2, 300], dtype=torch.uint8), InvalidArgumentError, "300 choices"),
        (lambda: MultiCategorical([2, 3], (3,)), InvalidArgumentError, "ends with 2"),
        (lambda: MultiCategorical([[2], [3]], (3, 1)), InvalidArgumentError, "counts that expand"),
        (lambda: MultiOneHot([[2], [3]]), InvalidArgumentError, "one dimension"),
        (lambda: MultiOneHot([2, 3], (4,)), InvalidArgumentError, "ends with 5"),
        (lambda: MultiOneHot([2, 3], dtype=torch.complex64), InvalidArgumentError, "complex64"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_counts_do_not_alias_their_source():
    counts = torch.tensor([2, 3])
    spec = MultiCategorical(counts)
    counts += 9
    assert spec.nvec.tolist() == [2, 3] and checked_counts(np.array([4], dtype=np.uint8)).dtype == torch.int64


def test_one_count():
    spec = MultiCategorical(5, remove_singleton=True)
    assert spec == MultiCategorical([5]) and spec.shape == (1,) and spec.is_in(torch.tensor([4]))


def test_all_choices():
    assert MultiCategorical([2, 3]).enumerate().tolist() == [[a, b] for a in range(2) for b in range(3)]
    rows = MultiOneHot([2, 3]).enumerate()
    assert (
        rows.shape == (6, 5)
        and MultiOneHot([2, 3]).is_in(rows)
        and rows.to(torch.int8).sum(-1).tolist() == [2] * 6
    )
    assert MultiCategorical([2, 3], (4, 2)).enumerate().shape == (6, 4, 2)


def test_indexing_by_choices():
    values = torch.arange(6.0).reshape(2, 3)
    assert MultiCategorical([2, 3]).index(torch.tensor([1, 2]), values).tolist() == [[1, 2], [4, 5]]


def test_spaces_and_counts():
    for spec in (MultiCategorical([2, 3]), MultiOneHot([2, 3])):
        assert isinstance(spec.space, BoxList) and [box.n for box in spec.space] == [2, 3]
    assert MultiOneHot([2, 3]).nvec == [2, 3] and torch.zeros(5).split(MultiOneHot([2, 3]).nvec)[1].shape == (
        3,
    )


@pytest.mark.parametrize(
    "index",
    [
        (..., 0),
        (1, 2),
        (slice(None), slice(1, None)),
        (..., [2, 0]),
        (None, slice(1, 3), 1),
        ([3, 1], [0, 2]),
        (0, torch.tensor([True, False, True])),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "spec",
    [
        MultiCategorical([2, 3, 5], (4, 3)),
        MultiCategorical([2, 3, 5], (4, 3), dtype=torch.int32, mask=bools("1001101010")),
        MultiCategorical(torch.arange(1, 13).reshape(4, 3)),
    ],
    ids=["plain", "masked", "varying"],
)
def test_an_index_picks_among_the_choices(spec, index):
    torch.manual_seed(0)
    picked, values = spec[index], spec.rand((50,))
    assert picked.shape == values[0][index].shape and picked.dtype == spec.dtype
    for value, drawn in zip(values, picked.rand((50,)), strict=True):
        assert picked.is_in(value[index])
        value[index] = drawn
        assert spec.is_in(value)


def test_one_choice_is_categorical():
    spec = MultiCategorical([2, 3], mask=bools("10011"))
    assert spec[1] == spec[..., -1] == Categorical(3, mask=bools("011"))
    assert spec[:1] == MultiCategorical([2], mask=bools("10")) and spec[[1, 0]].nvec.tolist() == [3, 2]
    assert spec[None, ..., 0] == spec[None][:, 0] == MultiCategorical([2], mask=bools("10"))
    assert MultiCategorical([2, 3])[..., None].nvec.tolist() == [[2], [3]]
    assert MultiCategorical([2, 3], (-1, 2))[..., 1:].shape == (-1, 1)
    with pytest.raises(UnsupportedError, match="differ within the batch"):
        spec[..., None]
    for index in (2, (0, 0), [2]):
        with pytest.raises(IndexRangeError, match="index: "):
            spec[index]
    with pytest.raises(InvalidArgumentError, match="nvec"):
        spec[:0]


def test_values_of_one_number_lack_the_dimension_of_size_one():
    spec = MultiCategorical(5)
    assert spec.rand((3,)).shape == (3,) and spec.rand().shape == () and spec.is_in(spec.rand((3,)))
    assert spec.is_in(torch.tensor([3])) and spec.is_in(torch.tensor([[1], [4]]))
    assert not spec.is_in(torch.tensor(5)) and not spec.is_in(torch.tensor([5]))
    assert MultiCategorical(5, remove_singleton=False).rand((3,)).shape == (3, 1)
    assert MultiCategorical([5]).rand((3,)).shape == (3, 1)
    assert spec.expand(2, 1).rand((3,)).shape == (3, 2, 1) and torch.stack([spec, spec]).rand().shape == (
        2,
        1,
    )
    assert Composite(action=spec).rand((3,))["action"].shape == (3, 1)


@pytest.mark.parametrize("kind", [MultiCategorical, MultiOneHot])
def test_choice_among_nothing_is_an_empty_domain(kind):
    spec = kind([0, 3])
    assert spec.cardinality() == 0 and len(spec.enumerate()) == 0 and not spec.is_in(spec.zero())
    assert spec == spec.clone() and spec.rand((0,)).shape == (0, *spec.shape)
    with pytest.raises(UnsupportedError, match="at least one choice"):
        spec.rand()
    with pytest.raises(SpecError, match="no value is near to"):
        spec.project(spec.zero())
