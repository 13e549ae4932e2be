"""Specs without bounds."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Unbounded, UnboundedContinuous, UnboundedDiscrete
from gleanrl.errors import InvalidArgumentError
from tests.data.specs.cases import INF, INT64
from tests.data.specs.statistics import frequencies, uniform


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_the_dtype_chooses_the_class():
    assert type(Unbounded()) is UnboundedContinuous and Unbounded().shape == (1,)
    assert Unbounded().dtype == torch.float32 and UnboundedDiscrete().dtype == torch.int64
    assert type(Unbounded(3, dtype=torch.bool)) is UnboundedDiscrete and Unbounded(3).shape == (3,)
    assert Unbounded((2,)).to(torch.int32) == UnboundedDiscrete((2,), dtype=torch.int32)


def test_everything_of_the_dtype_is_inside():
    value = torch.tensor([float("nan"), INF, -1e38])
    assert Unbounded((3,)).is_in(value)
    assert Unbounded((2,)).space.low.tolist() == [-INF, -INF]
    assert UnboundedDiscrete((1,)).space.high.tolist() == [INT64.max]


def test_draws():
    value = Unbounded((2,)).rand((20000,))
    assert abs(value.mean()) < 0.05 and abs(value.std() - 1) < 0.05
    assert uniform(frequencies(Unbounded((1,), dtype=torch.uint8).rand((20000,)), 256))
    assert uniform(frequencies(Unbounded((1,), dtype=torch.bool).rand((20000,)), 2))
    whole = UnboundedDiscrete((1,)).rand((20000,)).to(torch.float64)
    assert uniform(frequencies(((whole / 2.0**64 + 0.5) * 16).clamp(0, 15), 16))


def test_projecting_converts():
    assert Unbounded((2,)).project(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    spec = Unbounded((3,), dtype=torch.uint8)
    assert spec.project(torch.tensor([-5.0, 2.4, 1e20])).tolist() == [0, 2, 255]
    assert Unbounded((2,), dtype=torch.bool).project(torch.tensor([0.0, -3.0])).tolist() == [False, True]


def test_cardinality():
    assert Unbounded().cardinality() == INF
    assert Unbounded((2,), dtype=torch.uint8).cardinality() == 2**16
    assert Unbounded((3,), dtype=torch.bool).cardinality() == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnboundedContinuous(dtype=torch.int64), "floating-point dtype, got torch.int64"),
        (lambda: UnboundedDiscrete(dtype=torch.float32), "an integer dtype, got torch.float32"),
        (lambda: Unbounded(dtype=torch.complex64), "complex64"),
        (lambda: Unbounded(dtype=torch.uint64), "uint64"),
    ],
)
def test_bad_dtypes(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()
