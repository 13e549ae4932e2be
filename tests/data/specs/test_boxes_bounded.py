"""Bounded specs have the declared domain, draw from it, and check constructor arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.data.specs import Bounded, BoundedContinuous, BoundedDiscrete
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SpecError
from tests.data.specs.cases import INF, INT64
from tests.data.specs.statistics import frequencies, uniform


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_the_dtype_chooses_the_class():
    assert type(Bounded(0, 1)) is BoundedContinuous and Bounded(0, 1).dtype == torch.float32
    assert type(Bounded(0, 1, dtype=torch.uint8)) is BoundedDiscrete
    assert type(Bounded(0, 1, (2,)).to(torch.int64)) is BoundedDiscrete
    assert Bounded(0, 1, dtype=torch.int64).to(torch.float64) == Bounded(0, 1, dtype=torch.float64)


def test_shapes_come_from_the_bounds_or_the_argument():
    assert Bounded(0, 1).shape == () and Bounded(0, 1, 3).shape == (3,)
    assert Bounded(torch.zeros(3), 1).shape == (3,) and Bounded(np.zeros((2, 1)), np.ones(3)).shape == (2, 3)
    spec = Bounded([0, 1], 2, (4, 2))
    assert spec.low.tolist() == [[0, 1]] * 4 and spec.space.high.shape == (4, 2)


def test_bounds_do_not_alias_their_source():
    low = torch.zeros(2)
    spec = Bounded(low, 1)
    low += 9
    assert spec.low.tolist() == [0, 0]


def test_clone_has_separate_bounds():
    spec = Bounded(torch.zeros(2), 1)
    twin = spec.clone()
    twin.low.fill_(0.5)
    assert spec.low.tolist() == [0, 0] and twin.low.tolist() == [0.5, 0.5]


def test_the_ends_belong_to_the_domain_and_nan_does_not():
    spec = Bounded(-1, 1, (2,))
    assert spec.is_in(torch.tensor([-1.0, 1.0])) and not spec.is_in(torch.tensor([-1.0, 1.0001]))
    for value in (float("nan"), INF):
        assert not spec.is_in(torch.tensor([0.0, value]))
    free = Bounded(-INF, INF, (1,))
    assert free.is_in(torch.tensor([INF])) and not free.is_in(torch.tensor([float("nan")]))
    with pytest.raises(SpecError, match=r"nan at index \(0,\)"):
        free.project(torch.tensor([float("nan")]))


@given(
    st.floats(-(2.0**90), 2.0**90, width=32),
    st.floats(0, 2.0**90, width=32),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_floats_never_leave_their_bounds(low, span, dtype):
    high = float(np.float32(low + span))
    value = Bounded(low, max(low, high), (500,), dtype=dtype).rand()
    assert bool((value >= low).all()) and bool((value <= max(low, high)).all())


def test_rounding_does_not_lead_beyond_the_bounds():
    # In float16, 0.1 and 0.3 are so coarse that low + u * (high - low) sometimes rounds above high.
    for low, high in ((0.1, 0.3), (1000.5, 1001.5), (-3, 5e-5)):
        spec = Bounded(low, high, dtype=torch.float16)
        value = spec.rand((20000,))
        assert value.max() <= spec.high and value.min() >= spec.low


def test_uniform_draws_cover_the_interval():
    for spec in (Bounded(-2, 2, (1,)), Bounded(torch.tensor([-2.0, 1.0]), torch.tensor([2.0, 4.0]))):
        value = spec.rand((20000,))
        bins = ((value - spec.low) / (spec.high - spec.low) * 16).clamp(max=15)
        for column in bins.unbind(-1):
            assert uniform(frequencies(column, 16))
    wide = Bounded(-3e38, 3e38, (1,)).rand((20000,)).double()
    assert uniform(frequencies(((wide / 6e38 + 0.5) * 16).clamp(0, 15), 16))


def test_infinite_bounds_give_normal_and_exponential_draws():
    spec = Bounded(torch.tensor([3.0, -INF, -INF]), torch.tensor([INF, -3.0, INF]))
    above, below, free = spec.rand((20000,)).unbind(-1)
    assert above.min() >= 3 and abs(above.mean() - 4) < 0.05
    assert below.max() <= -3 and abs(below.mean() + 4) < 0.05
    assert abs(free.mean()) < 0.05 and abs(free.std() - 1) < 0.05


@pytest.mark.parametrize(
    "spec",
    [
        Bounded(-3, 4, (2,), dtype=torch.int64),
        Bounded(0, 255, (1,), dtype=torch.uint8),
        Bounded(-128, 127, (1,), dtype=torch.int8),
        Bounded(INT64.max - 9, INT64.max, (1,), dtype=torch.int64),
        Bounded(INT64.min, INT64.min + 9, (1,), dtype=torch.int64),
        Bounded(torch.tensor([0, 10]), torch.tensor([6, 16]), dtype=torch.int32),
    ],
    ids=repr,
)
def test_integers_are_uniform_and_include_both_ends(spec):
    value = (spec.rand((20000,)).to(torch.int64) - spec.low.to(torch.int64)).unbind(-1)
    size = int(spec.high.flatten()[0]) - int(spec.low.flatten()[0]) + 1
    for column in value:
        counts = frequencies(column, size)
        assert len(counts) == size and uniform(counts)


@pytest.mark.parametrize(
    ("low", "high"),
    [(INT64.min, INT64.max), (INT64.min, INT64.max - 1), (-(2**62) - 5, 2**62 + 7), (-1, INT64.max)],
)
def test_the_range_of_int64_does_not_overflow(low, high):
    alone = Bounded(low, high, (1,), dtype=torch.int64).rand((20000,))
    beside = Bounded(torch.tensor([low, 0]), torch.tensor([high, 9]), dtype=torch.int64).rand((20000,))
    assert uniform(frequencies(beside[:, 1], 10))
    for value in (alone[:, 0], beside[:, 0]):
        assert int(value.min()) >= low and int(value.max()) <= high
        place = (value.to(torch.float64) - low) / (float(high) - low)
        assert uniform(frequencies((place * 16).clamp(0, 15), 16))


def test_projecting_clamps_and_rounds():
    spec = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 0.5]))
    assert spec.project(torch.tensor([5.0, -2.0])).tolist() == [1, 0]
    assert spec.project(torch.tensor([[-INF, INF]])).tolist() == [[-1, 0.5]]
    assert spec.project(torch.tensor([7, 7])).dtype == torch.float32
    whole = Bounded(-3, 3, (4,), dtype=torch.int8)
    assert whole.project(torch.tensor([2.6, -1e30, 300.0, 0.2])).tolist() == [3, -3, 3, 0]
    assert whole.project(torch.tensor([2**40, -(2**40), 1, 2])).tolist() == [3, -3, 1, 2]


def test_cardinality():
    assert Bounded(0, 1).cardinality() == INF
    assert Bounded(-1, 1, (2,), dtype=torch.int8).cardinality() == 9
    assert Bounded(INT64.min, INT64.max, dtype=torch.int64).cardinality() == 2**64


def test_repr_shows_the_bounds():
    assert repr(Bounded(-1, 1, (2,))) == "BoundedContinuous(low=-1.0, high=1.0, shape=(2,), dtype=float32)"
    assert "low=0..3, high=9" in repr(Bounded([0, 3], 9, dtype=torch.int64))
    assert repr(Bounded(0, 1, (0,))) == "BoundedContinuous(shape=(0,), dtype=float32)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"low": 1, "high": 0}, InvalidArgumentError, r"low 1.0 and high 0.0 at index \(\)"),
        ({"low": [0, 2], "high": [1, 1]}, InvalidArgumentError, r"at index \(1,\)"),
        ({"low": float("nan"), "high": 0}, InvalidArgumentError, "low: a bound can't be NaN"),
        ({"low": INF, "high": INF}, InvalidArgumentError, "finite number between"),
        ({"low": -INF, "high": -INF}, InvalidArgumentError, "finite number between"),
        ({"low": 0, "high": 1e39}, InvalidArgumentError, "high: 1e.39 is too large"),
        ({"low": 0.5, "high": 3, "dtype": torch.int64}, InvalidArgumentError, "low: .*int64 holds exactly"),
        ({"low": -INF, "high": 3, "dtype": torch.int64}, InvalidArgumentError, "low: .*int64 holds exactly"),
        ({"low": 0, "high": 256, "dtype": torch.uint8}, InvalidArgumentError, "high: .*uint8 holds exactly"),
        ({"low": torch.zeros(2), "high": torch.ones(3)}, InvalidArgumentError, "expand"),
        ({"low": torch.zeros(2), "high": 1, "shape": (3,)}, InvalidArgumentError, "expand"),
        ({"low": "a", "high": 1}, InvalidTypeError, "low: expected a number"),
        ({"low": 0, "high": None}, InvalidTypeError, "high: expected a number"),
        (
            {"low": 0, "high": 1, "domain": "real"},
            InvalidArgumentError,
            "'continuous' or 'discrete', got 'real'",
        ),
        ({"low": 0, "high": 1, "dtype": torch.uint64}, InvalidArgumentError, "uint64"),
        ({"low": 0, "high": 1, "dtype": torch.complex64}, InvalidArgumentError, "complex64"),
    ],
)
def test_bad_bounds(arguments, error, message):
    with pytest.raises(error, match=message):
        Bounded(**arguments)


def test_domain_argument_and_class_correspond():
    assert Bounded(0, 1).domain == "continuous" and Bounded(0, 1, dtype=torch.int8).domain == "discrete"
    pixels = Bounded(0, 255, (3,), dtype=torch.uint8, domain="continuous")
    assert type(pixels) is BoundedContinuous and pixels.domain == "continuous" and pixels.dtype == torch.uint8
    assert pixels == BoundedContinuous(0, 255, (3,), dtype=torch.uint8) and pixels.is_in(pixels.rand((5,)))
    assert type(BoundedDiscrete(0, 1)) is BoundedDiscrete and BoundedDiscrete(0, 1).dtype == torch.float32


def test_booleans():
    spec = Bounded(0, 1, (2,), dtype=torch.bool)
    drawn = spec.rand((50,))
    assert drawn.dtype == torch.bool and drawn.any() and not drawn.all() and spec.is_in(drawn)
    assert spec.cardinality() == 4 and not Bounded(0, 0, (2,), dtype=torch.bool).rand((50,)).any()


def test_older_names_of_the_bounds():
    assert Bounded(minimum=-1, maximum=1, shape=(3,)) == Bounded(-1, 1, (3,))


def test_new_ends_are_obeyed():
    spec = Bounded(0, 1, (2,))
    assert spec.is_in(spec.rand((9,)))
    spec.space.low, spec.space.high = torch.full((2,), 5.0), 6
    assert spec.low.tolist() == [5, 5] and spec.high.tolist() == [6, 6] and (spec.rand((20,)) >= 5).all()
    assert spec.is_in(torch.tensor([5.5, 6.0])) and spec.project(torch.zeros(2)).tolist() == [5, 5]
    with pytest.raises(
        InvalidArgumentError, match=r"space.low: expected a number, or a tensor that expands to shape \(2,\)"
    ):
        spec.space.low = torch.zeros(3)
    given = Bounded(torch.zeros(2), torch.ones(2))
    assert given.space.common == (0, 1)
    given.space.low[0] = -5
    assert given.space.common is None and given.is_in(torch.tensor([-3.0, 0.0]))


def test_a_large_spec_with_one_bound_for_all_elements_keeps_it_once() -> None:
    frame = Bounded(0, 255, (40, 60, 3), dtype=torch.uint8)
    for spec in (frame, frame.clone(), frame.clone().clone().expand(2, 40, 60, 3)):
        assert [end.untyped_storage().nbytes() for end in spec.space.ends] == [1, 1]
        assert spec.space.common == (0, 255)
        value = spec.rand()
        assert spec.is_in(value) and spec == spec.clone()
    other = frame.clone()
    other.space.low = 7
    assert frame.space.common == (0, 255) and other.space.common == (7, 255)
    with pytest.raises(InvalidArgumentError, match=r"got low 3.0 and high 2.0 at index \(0, 0, 0\)"):
        Bounded(3.0, 2.0, (40, 60, 3))
    with pytest.raises(InvalidArgumentError, match="finite number between"):
        Bounded(float("inf"), float("inf"), (40, 60, 3))
