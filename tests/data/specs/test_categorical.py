"""Specs of one choice among n encode, mask and draw it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.data.specs import Categorical, MultiCategorical, MultiOneHot, OneHot
from gleanrl.data.specs.categorical import checked_count
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, SpecError, UnsupportedError
from tests.data.specs.cases import bools
from tests.data.specs.statistics import frequencies, uniform


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "spec", [Categorical(7), Categorical(7, (2,)), OneHot(7), OneHot(7, (2, 7))], ids=repr
)
def test_each_choice_is_as_likely(spec):
    for column in spec.to_categorical(spec.rand((20000,))).reshape(20000, -1).unbind(-1):
        assert uniform(frequencies(column, 7))


@pytest.mark.parametrize(
    "make", [lambda m: Categorical(5, (3,), mask=m), lambda m: OneHot(5, (3, 5), mask=m)]
)
def test_masked_draws_are_uniform_over_allowed_choices(make):
    mask = bools("11011 00010 11111")
    spec = make(mask)
    index = spec.to_categorical(spec.rand((20000,)))
    for column, allowed in zip(index.unbind(-1), mask, strict=True):
        counts = frequencies(column, 5)
        assert bool((counts[~allowed] == 0).all()) and uniform(counts[allowed])


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_masked_draws_respect_any_mask(n, seed):
    torch.manual_seed(seed)
    mask = torch.rand(4, n) < 0.4
    mask[torch.arange(4), torch.randint(n, (4,))] = True
    for spec in (Categorical(n, (4,), mask=mask), OneHot(n, (4, n), mask=mask)):
        value = spec.rand((3,))
        assert spec.is_in(value) and bool(mask.expand(3, 4, n)[spec.to_one_hot(value)].all())
        assert spec.is_in(spec.project(torch.randint(-3, 12, value.shape)))


def test_a_mask_is_obeyed_replaced_and_removed():
    for spec, value in ((Categorical(3), torch.tensor(1)), (OneHot(3), bools("010"))):
        assert spec.is_in(value) and spec.mask is None
        mask = bools("101")
        spec.update_mask(mask)
        mask[:] = True
        assert spec.mask.tolist() == [True, False, True]
        assert not spec.is_in(value) and "masked" in repr(spec)
        with pytest.raises(SpecError, match="masked.*got"):
            spec.assert_is_in(value)
        assert spec.is_in(spec.project(value)) and spec.cardinality() == 3
        assert len(spec.enumerate(use_mask=True)) == 2 and len(spec.enumerate()) == 3
        spec.update_mask(bools("010"))
        assert spec.is_in(value) and torch.equal(spec.rand(), value)
        spec.update_mask(None)
        assert spec.is_in(spec.rand((50,))) and spec.cardinality() == 3


def test_a_mask_expands_over_the_batch():
    spec = Categorical(3, (2,), mask=bools("011"))
    assert spec.mask.shape == (2, 3) and spec.enumerate(use_mask=True).tolist() == [[1, 1], [2, 2]]
    assert OneHot(3, (2, 3), mask=bools("011")).mask.shape == (2, 3)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(3), InvalidTypeError, "expected dtype torch.bool"),
        (bools("11"), InvalidArgumentError, r"expected shape \(2, 3\).*got \(2,\)"),
        (bools("000"), InvalidArgumentError, r"a True in each row, got none at batch index \(0,\)"),
        (bools("111 000"), InvalidArgumentError, r"batch index \(1,\)"),
    ],
)
def test_bad_masks_change_nothing(mask, error, message):
    for spec in (Categorical(3, (2,), mask=bools("110")), OneHot(3, (2, 3), mask=bools("110"))):
        before = spec.clone()
        with pytest.raises(error, match=message):
            spec.update_mask(mask)
        assert spec == before


def test_one_hot_takes_and_gives_integers():
    spec = OneHot(3)
    assert spec.encode(2).tolist() == [False, False, True] and spec.encode(np.int64(0)).dtype == torch.bool
    assert spec.encode([0, 1]).shape == (2, 3) and spec.encode(torch.tensor(1.0)).tolist() == [
        False,
        True,
        False,
    ]
    assert spec.to_numpy(bools("001")) == 2 and spec.to_numpy(bools("001 100")).tolist() == [2, 0]
    assert OneHot(3, dtype=torch.float32).encode(1).tolist() == [0, 1, 0]
    with pytest.raises(SpecError, match="got 3"):
        spec.encode(3)
    with pytest.raises(SpecError, match="got 1 at index"):
        OneHot(3, mask=bools("101")).encode([0, 1])
    with pytest.raises(SpecError, match="holds exactly"):
        spec.encode(0.5)
    with pytest.raises(SchemaError, match="expected shape"):
        OneHot(3, (2, 3)).encode(1)


@pytest.mark.parametrize(
    "value",
    [
        "000",
        "110",
        torch.tensor([0.0, 2.0, 0.0]),
        torch.tensor([1.0, float("nan"), 0.0]),
        torch.tensor([0.5] * 3),
    ],
)
def test_rows_that_are_not_one_hot_are_outside(value):
    value = bools(value) if isinstance(value, str) else value
    assert not OneHot(3, dtype=value.dtype).is_in(value)


def test_projecting_picks_the_largest_allowed():
    spec = OneHot(3, dtype=torch.float32)
    assert spec.project(torch.tensor([0.1, 0.7, 0.3])).tolist() == [0, 1, 0]
    assert spec.project(torch.zeros(3)).tolist() == [1, 0, 0]
    spec.update_mask(bools("101"))
    assert spec.project(torch.tensor([0.1, 0.7, 0.3])).tolist() == [0, 0, 1]
    spec.update_mask(bools("011"))
    assert spec.project(torch.tensor([float("-inf")] * 3)).tolist() == [0, 1, 0]
    assert OneHot(2, mask=bools("01")).project(bools("10")).tolist() == [False, True]
    with pytest.raises(SpecError, match="no value is nearest to a NaN"):
        spec.project(torch.tensor([0.0, float("nan"), 1.0]))


def test_projecting_integers_takes_the_nearest_allowed():
    assert Categorical(3, (3,)).project(torch.tensor([-5, 9, 1])).tolist() == [0, 2, 1]
    masked = Categorical(5, mask=bools("10010"))
    assert masked.project(torch.tensor([0, 1, 2, 3, 4, 99, -7])).tolist() == [0, 0, 3, 3, 3, 3, 0]
    assert masked.project(torch.tensor(2.7)).tolist() == 3


def test_the_two_encodings_correspond():
    for mask in (None, bools("101 011")):
        codes = Categorical(3, (2,), mask=mask)
        rows = codes.to_one_hot_spec()
        assert rows == OneHot(3, (2, 3), mask=mask) and rows.to_categorical_spec() == codes
        assert codes.to_categorical_spec() is codes and rows.to_one_hot_spec() is rows
        value = codes.rand((4,))
        assert rows.is_in(codes.to_one_hot(value)) and torch.equal(
            rows.to_categorical(codes.to_one_hot(value)), value
        )
        assert codes.to_categorical(value) is value and rows.to_one_hot(codes.to_one_hot(value)).shape == (
            4,
            2,
            3,
        )


def test_conversions_check_unless_safe_is_false():
    for convert in (Categorical(3).to_one_hot, Categorical(3).to_categorical):
        with pytest.raises(SpecError, match="got 7"):
            convert(torch.tensor(7))
        convert(torch.tensor(7), safe=False)
    for convert in (OneHot(3).to_one_hot, OneHot(3).to_categorical):
        with pytest.raises(SpecError, match="expected OneHot"):
            convert(bools("011"))
        convert(bools("011"), safe=False)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Categorical(-2), InvalidArgumentError, "n: expected at least 0, got -2"),
        (lambda: OneHot(-1), InvalidArgumentError, "n: expected at least 0"),
        (lambda: Categorical(2.0), InvalidTypeError, "n: expected an integer"),
        (lambda: OneHot(True), InvalidTypeError, "n: expected an integer"),
        (lambda: Categorical(3, dtype=torch.bool), InvalidArgumentError, "3 choices don't fit in torch.bool"),
        (lambda: Categorical(257, dtype=torch.uint8), InvalidArgumentError, "257 choices"),
        (lambda: Categorical(3).to(torch.bool), InvalidArgumentError, "3 choices"),
        (lambda: Categorical(3, dtype=torch.complex64), InvalidArgumentError, "integer dtype"),
        (lambda: OneHot(3, use_register=True), UnsupportedError, "use_register"),
        (lambda: Categorical(-1, mask=bools("1")), InvalidArgumentError, "fixed number of choices"),
        (lambda: OneHot(3, (2,)), InvalidArgumentError, r"ends with 3, got \(2,\)"),
        (lambda: OneHot(3, ()), InvalidArgumentError, "ends with 3"),
        (lambda: OneHot(3, dtype=torch.complex64), InvalidArgumentError, "complex64"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_sizes_and_properties():
    assert Categorical(256, dtype=torch.uint8).n == 256 == Categorical(256).space.n
    assert Categorical(3, 2).shape == (2,) and OneHot(3, 3).shape == (3,) and OneHot(np.int64(3)).n == 3
    assert Categorical(3, (2, 2)).cardinality() == 3 == OneHot(3, (2, 2, 3)).cardinality()
    assert Categorical(3, None).shape == () and Categorical(3).rand(None).shape == ()


def test_counts_are_positive_integers():
    assert checked_count("n", np.int32(4)) == 4


def test_a_number_of_choices_that_is_not_fixed():
    spec = Categorical(-1)
    assert spec.space.n == -1 and spec == Categorical(-1) != Categorical(3) and spec.zero() == 0
    assert spec.is_in(torch.tensor(1000)) and not spec.is_in(torch.tensor(-1)) and spec.encode(7) == 7
    assert spec.project(torch.tensor([-3, 9])).tolist() == [0, 9]
    for call in (
        spec.rand,
        spec.cardinality,
        spec.enumerate,
        lambda: spec.n,
        lambda: spec.to_one_hot(torch.tensor(1)),
    ):
        with pytest.raises(RuntimeError, match="call set_provisional_n"):
            call()
    spec.set_provisional_n(5)
    assert spec.n == spec.cardinality() == 5 and spec.space.n == -1
    assert uniform(frequencies(spec.rand((5000,)), 5)) and spec.enumerate().tolist() == [0, 1, 2, 3, 4]
    assert spec.to_one_hot(torch.tensor(1)).tolist() == [False, True, False, False, False]
    with pytest.raises(InvalidArgumentError, match="at least 0"):
        spec.set_provisional_n(-1)


def test_all_choices():
    assert Categorical(3).enumerate().tolist() == [0, 1, 2]
    assert Categorical(2, (2,), dtype=torch.int8).enumerate().tolist() == [[0, 0], [1, 1]]
    assert OneHot(2).enumerate().tolist() == [[True, False], [False, True]]
    assert OneHot(2, (3, 2)).enumerate().shape == (2, 3, 2)
    with pytest.raises(UnsupportedError, match="the mask differs within the batch"):
        Categorical(2, (2,), mask=bools("01 11")).enumerate(use_mask=True)


def test_indexing_by_choices():
    values = torch.arange(8.0).reshape(2, 4)
    assert Categorical(4).index(torch.tensor(1), values[0]) == 1 and Categorical(4).index(
        3, values
    ).tolist() == [3, 7]
    assert Categorical(4, (2,)).index(index=torch.tensor([1, 2]), tensor_to_index=values).tolist() == [
        [1, 2],
        [5, 6],
    ]
    assert OneHot(4).index(bools("0100"), values[0]) == 1
    with pytest.raises(SpecError):
        Categorical(4).index(torch.tensor(4), values)


def test_choices_as_real_numbers():
    spec = Categorical(3).to(torch.float32)
    assert (
        spec.rand().dtype == torch.float32
        and spec.is_in(torch.tensor(2.0))
        and not spec.is_in(torch.tensor(0.5))
    )
    assert spec.project(torch.tensor(1.6)) == 2


def test_kinds_of_encodings():
    assert isinstance(MultiCategorical([2, 3]), Categorical) and isinstance(MultiOneHot([2, 3]), OneHot)
    assert not isinstance(OneHot(2), Categorical)


@pytest.mark.parametrize("kind", [Categorical, OneHot])
def test_no_choices_are_an_empty_domain(kind):
    spec = kind(0)
    assert spec.cardinality() == 0 and len(spec.enumerate()) == 0 and not spec.is_in(spec.zero())
    assert spec == spec.clone() and spec.rand((0,)).shape == (0, *spec.shape)
    with pytest.raises(UnsupportedError, match="at least one choice"):
        spec.rand()
    with pytest.raises(SpecError, match="no value is near to"):
        spec.project(spec.zero())
