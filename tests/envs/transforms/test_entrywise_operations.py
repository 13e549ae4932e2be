"""The declared arithmetic of a transform equals its results, rounding by rounding."""

from __future__ import annotations

import pytest
import torch

from gleanrl.envs.transforms.entrywise import CONVERSIONS, Operation, affine, scaled

TORCH = {"add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div}


@pytest.mark.parametrize("standardizes", [True, False])
@pytest.mark.parametrize("dtype", CONVERSIONS)
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (1001,)])
def test_sequence_of_operations_equals_the_formula(standardizes, dtype, shape):
    """Results don't depend on the number of values. Fused operations of torch round a block's end differently."""
    torch.manual_seed(0)
    value = torch.randn(shape, dtype=dtype)
    numbers = {"loc": torch.randn((), dtype=dtype), "scale": torch.rand((), dtype=dtype) + 0.1}
    out = value
    for operation in affine(numbers, standardizes, dtype):
        out = TORCH[operation.name](out, operation.numbers)
    assert torch.equal(out, scaled(value, numbers["loc"], numbers["scale"], standardizes))
    alone = torch.stack([scaled(one, *numbers.values(), standardizes) for one in value])
    assert torch.equal(out, alone)


@pytest.mark.parametrize(
    "numbers",
    [
        {"loc": None, "scale": None},
        {"loc": torch.zeros(()), "scale": torch.ones((), dtype=torch.float64)},
        {"loc": torch.zeros((), dtype=torch.float64), "scale": torch.ones((), dtype=torch.float64)},
        {"loc": torch.zeros((), dtype=torch.int64), "scale": torch.ones((), dtype=torch.int64)},
    ],
)
def test_numbers_of_another_dtype_or_none_are_left_to_torch(numbers):
    assert affine(numbers, True, torch.float32) is None
    assert affine(numbers, False, torch.float32) is None


def test_operations_read_the_present_tensors():
    numbers = {"loc": torch.zeros(()), "scale": torch.ones(())}
    shift, _ = affine(numbers, True, torch.float32)
    numbers["loc"] = torch.tensor(5.0)
    assert shift.numbers is numbers["loc"]
    assert Operation("float32").numbers is None
