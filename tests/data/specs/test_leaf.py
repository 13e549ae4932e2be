"""All leaf specs share this behaviour."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from gleanrl.data.specs import Binary, Bounded, Categorical, MultiOneHot, OneHot, Unbounded
from gleanrl.data.specs.leaf import first_offender, tensor_copy
from gleanrl.errors import InvalidTypeError, SchemaError, SpecError
from tests.data.specs.cases import LEAVES


@pytest.fixture(params=LEAVES)
def spec(request):
    torch.manual_seed(0)
    return LEAVES[request.param]()


def test_a_spec_has_at_most_four_classes_of_the_library(spec):
    assert len([cls for cls in type(spec).__mro__ if cls.__module__.startswith("gleanrl.")]) <= 4


def test_drawn_values_are_in_the_domain(spec):
    for shape in ((), (200,), [3, 2], torch.Size((0, 2))):
        value = spec.rand(shape)
        assert value.shape == (*shape, *spec.shape) and value.dtype == spec.dtype
        assert spec.is_in(value) and spec.contains(value)
        spec.assert_is_in(value)
    assert spec.sample((2,)).shape == (2, *spec.shape)


def test_a_generator_is_the_only_source_of_randomness(spec):
    state = torch.get_rng_state()
    first = spec.rand((50,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, spec.rand((50,), generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(1)
    assert torch.equal(first, spec.rand((50,)))


def test_zero_and_one_have_shape_and_dtype(spec):
    for make, again, number in ((spec.zero, spec.zeros, 0), (spec.one, spec.ones, 1)):
        for shape in ((), (2, 3)):
            value = make(shape)
            assert value.shape == (*shape, *spec.shape) and value.dtype == spec.dtype
            assert bool((value == number).all()) and torch.equal(value, again(shape))


def test_projecting_lands_in_the_domain(spec):
    value = spec.rand((4,))
    assert spec.project(value) is value
    for far in (
        torch.randn(5, *spec.shape) * 100,
        torch.randint(-300, 300, (5, *spec.shape)),
        spec.zero((2,)),
    ):
        before = far.clone()
        projected = spec.project(far)
        assert spec.is_in(projected) and torch.equal(far, before)
        assert spec.project(projected) is projected


def test_project_changes_only_values_outside_the_domain(spec):
    good, bad = spec.rand((3,)), torch.full((1, *spec.shape), 77).to(spec.dtype)
    projected = spec.project(torch.cat([good, bad]))
    assert torch.equal(projected[:3], good) and spec.is_in(projected)


def test_numpy_there_and_back(spec):
    for shape in ((), (7,)) if "Stacked" not in repr(spec) else ((),):
        value = spec.rand(shape)
        array = spec.to_numpy(value)
        assert isinstance(array, np.ndarray)
        back = spec.encode(array)
        assert torch.equal(back, value) and back.dtype == value.dtype
        assert torch.equal(spec.encode(array.tolist()), value)


def test_encode_returns_private_memory(spec):
    array = spec.to_numpy(spec.rand()).copy()
    encoded = spec.encode(array)
    kept = encoded.clone()
    array[...] = 0 if array.dtype != bool else ~array
    assert torch.equal(encoded, kept)
    tensor = torch.from_numpy(spec.to_numpy(spec.rand()).copy())
    assert spec.encode(tensor).data_ptr() != tensor.data_ptr()


def test_wrong_shapes_dtypes_and_types_are_outside(spec):
    other = torch.float32 if spec.dtype != torch.float32 else torch.float64
    assert not spec.is_in(spec.rand().to(other))
    assert not spec.expand(2, *spec.shape).is_in(torch.zeros((9, 9, 9), dtype=spec.dtype))
    for value in (None, 1, [1], spec.rand().numpy()):
        assert not spec.is_in(value)
        with pytest.raises(SpecError, match="expected"):
            spec.project(value)
    with pytest.raises(SpecError, match=r"expected .*(?s:.*)got dtype"):
        spec.assert_is_in(spec.rand().to(other))


def test_a_wrong_shape_is_not_projected(spec):
    spec = spec.expand(2, *spec.shape)
    with pytest.raises(SpecError, match="got shape"):
        spec.project(torch.zeros((9, 9, 9)))
    with pytest.raises((SchemaError, SpecError), match="expected"):
        spec.to_numpy(torch.zeros((9, 9, 9), dtype=spec.dtype))


def test_copies_are_equal_and_independent(spec):
    for twin in (spec.clone(), copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert twin == spec and type(twin) is type(spec) and repr(twin) == repr(spec)
        assert twin.is_in(spec.rand((3,)))
    assert spec.expand(2, *spec.shape) != spec
    with pytest.raises(TypeError):
        hash(spec)


def test_moving_to_where_it_is_changes_nothing(spec):
    assert spec.device == torch.empty(0).device and spec.to(spec.dtype) is spec
    assert (
        spec.cpu() is spec
        and spec.to(None) is spec
        and spec.clear_device_() is spec
        and "device" not in repr(spec)
    )
    there = spec.to("meta")
    assert there.device == torch.device("meta") and there != spec and there.to("meta") is there
    assert there.zero().device.type == "meta"


def test_type_check_names_the_key(spec):
    assert spec.type_check(spec.rand()) is None
    other = torch.float32 if spec.dtype != torch.float32 else torch.float64
    with pytest.raises(InvalidTypeError, match=r"'reward'.*expected dtype"):
        spec.type_check(torch.zeros(1, dtype=other), "reward")
    with pytest.raises(InvalidTypeError, match="got str"):
        spec.type_check("x")


def test_the_first_offender_is_named():
    outside = torch.tensor([[False, True], [True, True]])
    assert first_offender(outside, torch.tensor([[1, 2], [3, 4]])) == "got 2 at index (0, 1)"
    assert first_offender(torch.tensor(True), torch.tensor(5.5)) == "got 5.5"
    with pytest.raises(SpecError, match=r"got 3.0 at index \(1, 0\)"):
        Bounded(0, 1, (1,)).assert_is_in(torch.tensor([[0.5], [3.0]]))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, torch.int64),
        (float("nan"), torch.int64),
        (float("inf"), torch.int32),
        (300, torch.uint8),
        (-1, torch.uint8),
        (2, torch.bool),
        (2.0**63, torch.int64),
        (np.uint64(2**63 + 1), torch.int64),
    ],
)
def test_integers_are_taken_exactly_or_not_at_all(value, dtype):
    with pytest.raises(SpecError, match="holds exactly, got"):
        tensor_copy(value, dtype, None)


def test_numbers_that_fit_are_converted():
    assert tensor_copy(3.0, torch.uint8, None) == 3
    assert tensor_copy([True, False], torch.float32, None).tolist() == [1.0, 0.0]
    assert tensor_copy(np.float64(0.1), torch.float32, None).dtype == torch.float32
    assert tensor_copy(np.arange(6).reshape(2, 3)[:, ::-1], torch.int64, None).tolist() == [
        [2, 1, 0],
        [5, 4, 3],
    ]


@pytest.mark.parametrize("value", ["x", None, object(), [1, "a"], {"a": 1}, 1j, [[1], [1, 2]]])
def test_only_numbers_can_be_encoded(value):
    with pytest.raises(InvalidTypeError, match="encode"):
        Unbounded((2,)).encode(value)


def test_a_last_dimension_of_one_may_be_missing():
    assert Unbounded((1,)).encode(1.5).tolist() == [1.5]
    assert Unbounded((2, 1)).encode([1, 2]).tolist() == [[1], [2]]
    for value in ([1, 2], [[1, 2]], np.zeros((2, 3))):
        with pytest.raises(SchemaError, match="expected shape"):
            Unbounded((1,)).encode(value)
    with pytest.raises(SchemaError, match="expected shape"):
        Unbounded((2,)).encode(1.0)


def test_discrete_specs_check_encoded_and_decoded_values():
    outside = {
        "categorical": (Categorical(3), 3, torch.tensor(3)),
        "one-hot": (OneHot(3), -1, torch.tensor([True, True, False])),
        "binary": (Binary(2), [0, 2], torch.tensor([0, 2], dtype=torch.int8)),
    }
    for spec, given, value in outside.values():
        with pytest.raises(SpecError, match="encode"):
            spec.encode(given)
        with pytest.raises(SpecError, match="to_numpy"):
            spec.to_numpy(value)
        assert spec.to_numpy(value, safe=False) is not None


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.uint16, torch.float32, torch.bool], ids=str
)
def test_choices_are_read_in_any_dtype_that_holds_them(dtype):
    row = torch.tensor([0, 1, 0, 1, 0]).to(dtype)
    values = torch.arange(3) * 10
    for spec in (OneHot(3), OneHot(3, dtype=torch.float32)):
        assert spec.to_categorical(row[:3]) == spec.to_numpy(row[:3]) == 1
        assert spec.to_one_hot(row[:3]).dtype == spec.dtype
        assert spec.index(row[:3], values) == 10
    several = MultiOneHot([2, 3])
    assert several.to_categorical(row).tolist() == several.to_numpy(row).tolist() == [1, 1]
    choice = Categorical(2)
    assert choice.to_one_hot(row[1]).tolist() == [False, True] and choice.to_numpy(row[1]).dtype == "int64"


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (OneHot(3), torch.tensor([0.2, 0.7, 0.1])),
        (OneHot(3), torch.tensor([0, 2, 0])),
        (OneHot(2), torch.tensor([1, 1])),
        (OneHot(2, dtype=torch.uint8), torch.tensor([0, -1], dtype=torch.int8)),
        (OneHot(2), torch.tensor([0, 1j])),
        (Categorical(3), torch.tensor(1.5)),
        (Categorical(3), torch.tensor(float("nan"))),
    ],
    ids=str,
)
def test_conversions_refuse_rows_that_they_would_change(spec, row):
    for read in (spec.to_categorical, spec.to_one_hot, spec.to_numpy):
        with pytest.raises(SpecError, match=r"expected (OneHot|Categorical)"):
            read(row)


def test_continuous_specs_check_when_asked():
    spec = Bounded(0, 1, (1,))
    assert spec.encode([5.0]).tolist() == [5.0] and spec.to_numpy(torch.tensor([5.0])).tolist() == [5.0]
    with pytest.raises(SpecError, match="got 5.0"):
        spec.to_numpy(torch.tensor([5.0]), safe=True)


def test_gradients_are_left_behind():
    value = torch.zeros(3, requires_grad=True)
    assert not Unbounded((3,)).encode(value).requires_grad
    assert Unbounded((3,)).to_numpy(value).tolist() == [0, 0, 0]
