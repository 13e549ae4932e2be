"""Binary specs hold independent zeros and ones."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Binary, Categorical, OneHot
from gleanrl.errors import InvalidArgumentError, InvalidTypeError
from tests.data.specs.statistics import frequencies, uniform


def test_shape_and_dtype():
    assert Binary(3).shape == (3,) and Binary(3).dtype == torch.int8 and Binary(3, (2, 3)).n == 2
    assert Binary(shape=4).n == 2 == Binary(3).space.n
    assert Binary(3).to(torch.bool) == Binary(3, dtype=torch.bool)
    assert Binary(3).cardinality() == 8 == len(Binary(3).enumerate()) and Binary(shape=()).cardinality() == 2
    assert Binary(2).enumerate().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert Binary(2, (3, 2)).enumerate()[1].tolist() == [[0, 1]] * 3
    assert Binary(shape=()).enumerate().tolist() == [0, 1]


def test_elements_are_choices_among_two():
    spec = Binary(3)
    assert isinstance(spec, Categorical) and spec.to_categorical_spec() is spec
    assert spec.to_one_hot(torch.tensor([0, 1, 1], dtype=torch.int8)).tolist() == [
        [True, False],
        [False, True],
        [False, True],
    ]
    assert spec.to_one_hot_spec() == OneHot(2, (3, 2))
    spec.update_mask(torch.tensor([False, True]))
    assert (
        spec.rand((9,)).all()
        and spec.project(torch.zeros(3)).tolist() == [1, 1, 1]
        and "masked" in repr(spec)
    )


def test_each_pattern_is_as_likely():
    torch.manual_seed(0)
    value = Binary(3).rand((20000,)).to(torch.int64)
    assert uniform(frequencies((value * torch.tensor([4, 2, 1])).sum(-1), 8))


def test_the_domain():
    spec = Binary(3, dtype=torch.float32)
    assert spec.is_in(torch.tensor([0.0, 1.0, 1.0]))
    for bad in (0.5, 2.0, -1.0, float("nan")):
        assert not spec.is_in(torch.tensor([0.0, bad, 1.0]))
    assert spec.project(torch.tensor([0.4, 7.0, -1.0])).tolist() == [0, 1, 0]
    assert Binary(2, dtype=torch.bool).project(torch.tensor([3, -2])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Binary(), InvalidArgumentError, "got neither"),
        (lambda: Binary(3, (4,)), InvalidArgumentError, "ends with 3"),
        (lambda: Binary(-1), InvalidArgumentError, "at least 0"),
        (lambda: Binary("a"), InvalidTypeError, "expected an integer"),
        (lambda: Binary(2, dtype=torch.complex64), InvalidArgumentError, "complex64"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_no_elements_have_one_value():
    spec = Binary(0)
    assert spec.shape == (0,) and spec.cardinality() == 1 and spec.enumerate().shape == (1, 0)
    assert spec.is_in(spec.rand()) and spec.rand((3,)).shape == (3, 0)
