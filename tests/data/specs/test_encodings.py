"""What integers and one-hot vectors share, of one choice and of several."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Categorical, MultiCategorical, MultiOneHot, OneHot
from gleanrl.data.specs.encodings import ending_with
from gleanrl.errors import InvalidArgumentError, SpecError
from tests.data.specs.cases import bools

BOTH = [(Categorical, OneHot, 3), (MultiCategorical, MultiOneHot, [2, 1])]


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_each_encoding_has_the_other(integers, rows, n):
    for shape in ((), (4,)):
        mask = bools("101")
        batch = integers(n, mask=mask).expand(*shape, *integers(n).shape)
        twin = batch.to_one_hot_spec()
        assert type(twin) is rows and twin.to_categorical_spec() == batch
        assert twin.to_one_hot_spec() is twin and batch.to_categorical_spec() is batch
        value = batch.rand((5,))
        assert torch.equal(twin.to_categorical(batch.to_one_hot(value)), value)


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_all_zeros_are_read_as_the_first_choice(integers, rows, n):
    for spec in (rows(n), rows(n, dtype=torch.int64), rows(n, mask=bools("011")), rows(n).expand(2, 3)):
        zero, first = spec.zero((4,)), spec.to_categorical_spec().zero((4,))
        assert (
            torch.equal(spec.to_categorical(zero), first) and spec.to_numpy(zero).tolist() == first.tolist()
        )
        assert torch.equal(spec.to_one_hot(zero), zero) and not spec.is_in(zero)
        for read in (spec.to_numpy, spec.to_categorical, spec.to_one_hot):
            with pytest.raises(SpecError, match=f"{read.__name__}: expected .*got"):
                read(zero, safe=True)
            with pytest.raises(SpecError, match=f"{read.__name__}: expected .*got"):
                read(spec.one())
    assert spec.is_in(spec.encode(spec.to_numpy(spec.zero())))


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_a_batch_of_size_zero_can_be_drawn_and_checked(integers, rows, n):
    for spec in (integers(n, mask=bools("101")), integers(n), rows(n)):
        empty = spec.expand(2, *spec.shape)[:0]
        if spec.space.index_dims == ():
            assert empty.is_in(empty.rand((3,)))


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_dtypes_that_cannot_hold_the_values_are_refused(integers, rows, n):
    with pytest.raises(InvalidArgumentError, match="integer dtype"):
        integers(n).to(torch.complex64)
    with pytest.raises(InvalidArgumentError, match="uint64"):
        rows(n).to(torch.uint64)
    assert rows(n).to(torch.float16).rand().dtype == torch.float16


def test_helpers():
    assert ending_with("x", 3, None) == (3,) == ending_with("x", 3, 3) and ending_with("x", 3, (2, 3)) == (
        2,
        3,
    )
    with pytest.raises(InvalidArgumentError, match=r"ends with 3, got \(2,\)"):
        ending_with("x", 3, (2,))
