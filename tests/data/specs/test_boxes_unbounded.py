"""Specs without bounds accept and draw all values of their dtype."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Unbounded, UnboundedContinuous, UnboundedDiscrete
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError
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
        (lambda: Unbounded(dtype=torch.complex64), "complex64"),
        (lambda: Unbounded(dtype=torch.uint64), "uint64"),
    ],
)
def test_bad_dtypes(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_domain_argument_and_class_correspond():
    assert Unbounded(2).domain == "continuous" and Unbounded(2, dtype=torch.int8).domain == "discrete"
    pixels = UnboundedContinuous((3,), dtype=torch.uint8)
    assert pixels == Unbounded((3,), dtype=torch.uint8, domain="continuous") and pixels.domain == "continuous"
    assert type(UnboundedDiscrete((3,), dtype=torch.float32)) is UnboundedDiscrete
    assert type(pixels.to(torch.float32)) is UnboundedContinuous


def test_sizes_that_may_be_any():
    spec = Unbounded((2, -1))
    assert spec.shape == (2, -1) and spec.is_in(torch.zeros(3, 2, 5)) and not spec.is_in(torch.zeros(3, 5))
    assert spec.zero().shape == spec.rand().shape == (2, 1) and spec.rand((3,)).shape == (3, 2, 1)
    assert spec.encode(torch.zeros(2, 4)).shape == (2, 4) and spec.project(torch.zeros(2, 4)).shape == (2, 4)
    assert spec[0].shape == (-1,) and spec.expand(4, 2, -1).shape == (4, 2, -1) and spec.numel() == 2
    assert spec.unsqueeze(0).shape == (1, 2, -1) and spec.flatten().shape == (-1,) and spec == spec.clone()
    assert torch.stack([spec, spec]).shape == (2, 2, -1) and spec[0][None].shape == (1, -1)
    for call in (lambda: spec.unbind(1), lambda: Unbounded((2, -2)), lambda: Unbounded((-1,)).expand(-1, 5)):
        with pytest.raises(InvalidArgumentError):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_complex_values_are_refused_instead_of_losing_their_imaginary_parts(dtype):
    spec, value = Unbounded((2,), dtype=dtype), torch.tensor([1 + 2j, 3 + 0j])
    for given in (value, value.numpy(), value.tolist()):
        with pytest.raises(InvalidTypeError, match="expected.*numbers, got .*complex"):
            spec.encode(given)
    with pytest.raises(SpecError, match="project: .*complex64"):
        spec.project(value)
