"""A codec checks the values of one leaf and converts action rows."""

from __future__ import annotations

import decimal
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.data.specs import Bounded, Categorical, MultiOneHot, OneHot, Unbounded
from gleanrl.envs.libs.gym_codecs import (
    ArrayCodec,
    CategoricalCodec,
    MultiOneHotCodec,
    OneHotCodec,
    RewardCodec,
    StackCodec,
    as_flag,
)
from gleanrl.errors import EnvironmentContractError, PolicyError

KEY = ("robot", "pose")
INT64 = np.dtype(np.int64)


def floats(shape: tuple[int, ...] = (3,)) -> ArrayCodec:
    return ArrayCodec(KEY, Unbounded(shape, dtype=torch.float32))


def one_hot(n: int = 3, start: int = 0, dtype: Any = np.int64) -> OneHotCodec:
    return OneHotCodec(KEY, OneHot(n, dtype=torch.int64), n, start, np.dtype(dtype))


def categorical(n: int = 3, start: int = 0, dtype: Any = np.int64) -> CategoricalCodec:
    return CategoricalCodec(KEY, Categorical(n), n, start, np.dtype(dtype))


class TestArrayObservations:
    """Arrays pass unchanged, and the first one fixes the dtype."""

    def test_an_array_as_declared_passes_uncopied(self) -> None:
        value = np.arange(3, dtype=np.float32)
        assert floats().encode(value) is value

    @pytest.mark.parametrize("shape", [(), (1,), (2,), (4,), (1, 3), (3, 1)])
    def test_another_shape_raises(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(EnvironmentContractError) as caught:
            floats().encode(np.zeros(shape, np.float32))
        assert all(part in str(caught.value) for part in ("('robot', 'pose')", "(3,)", "float32", str(shape)))

    def test_another_first_dtype_is_cast_with_one_warning(self) -> None:
        codec = floats()
        with pytest.warns(UserWarning, match="float32.*float64"):
            first = codec.encode(np.array([0.1, 0.2, 0.3]))
        assert first.dtype == np.float32 and first.tolist() == np.float32([0.1, 0.2, 0.3]).tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert codec.encode(np.array([1.0, 2.0, 3.0])).dtype == np.float32

    @pytest.mark.parametrize("first", [np.float32, np.float64])
    def test_a_later_dtype_raises_even_if_it_is_the_declared_one(self, first: Any) -> None:
        codec = floats()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codec.encode(np.zeros(3, first))
        other = np.float32 if first is np.float64 else np.float64
        with pytest.raises(EnvironmentContractError, match=f"{np.dtype(first)}.*{np.dtype(other)}"):
            codec.encode(np.zeros(3, other))

    def test_other_byte_orders_are_another_dtype(self) -> None:
        codec = floats()
        codec.encode(np.zeros(3, np.float32))
        with pytest.raises(EnvironmentContractError, match="pose"):
            codec.encode(np.zeros(3, np.dtype(np.float32).newbyteorder()))

    @pytest.mark.parametrize("value", [[1, 2, 3], (1.0, 2.0, 3.0), [np.float64(1), 2, 3.0], [True, 2, 3]])
    def test_python_numbers_take_the_declared_dtype(self, value: Any) -> None:
        codec = floats()
        for _ in range(2):
            encoded = codec.encode(value)
            assert encoded.dtype == np.float32 and encoded.tolist() == [1, 2, 3]
        codec.encode(np.zeros(3, np.float32))

    @pytest.mark.parametrize("value", [[0.5, 1], [256, 0], [-1, 0]])
    def test_python_numbers_that_the_dtype_cannot_hold_raise(self, value: Any) -> None:
        codec = ArrayCodec(KEY, Bounded(0, 255, (2,), dtype=torch.uint8))
        with pytest.raises(EnvironmentContractError, match="uint8 holds"):
            codec.encode(value)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            "abc",
            {"a": 1},
            [1, [2], 3],
            np.array(["a", "b", "c"]),
            np.array([1, None, 2]),
            np.zeros(3, complex),
        ],
    )
    def test_non_numeric_observations_raise(self, value: Any) -> None:
        with pytest.raises(EnvironmentContractError, match="pose"):
            floats().encode(value)

    def test_scalars_fit_the_empty_shape(self) -> None:
        codec = floats(())
        for value in (np.float32(2), np.array(2, np.float32), 2.0, 2):
            assert codec.encode(value).shape == () and codec.encode(value) == 2

    def test_tensors_are_accepted_like_arrays(self) -> None:
        assert floats().encode(torch.ones(3)).tolist() == [1, 1, 1]
        with pytest.raises(EnvironmentContractError):
            floats().encode(torch.ones(4))

    def test_start_is_subtracted_from_observations(self) -> None:
        codec = ArrayCodec(KEY, Bounded(0, 4, (2,), dtype=torch.int64), np.array([10, -3]))
        assert codec.encode(np.array([12, -3])).tolist() == [2, 0]


class TestArrayActions:
    """Actions are copies in the space's dtype."""

    @pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
    def test_decoded_actions_are_copies_of_the_column(self, shape: tuple[int, ...]) -> None:
        codec = floats(shape)
        column = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
        before = column.copy()
        actions = codec.decode_all(column)
        for t, action in enumerate(actions):
            assert isinstance(action, np.ndarray) and action.shape == shape
            assert np.array_equal(action, before[t]) and np.array_equal(action, codec.decode(column[t, ...]))
            action[...] = 7
        assert np.array_equal(column, before)
        codec.decode(column[0, ...])[...] = 7
        assert np.array_equal(column, before)

    def test_start_is_added_to_actions(self) -> None:
        start = np.array([10, -3], np.int32)
        codec = ArrayCodec(KEY, Bounded(0, 4, (2,), dtype=torch.int32), start)
        assert codec.decode(np.array([2, 0], np.int32)).tolist() == [12, -3]
        (action,) = codec.decode_all(np.array([[2, 0]], np.int32))
        assert action.tolist() == [12, -3] and action.dtype == np.int32

    @pytest.mark.parametrize(
        ("shape", "dtype"), [((4,), torch.float32), ((), torch.float32), ((3,), torch.float64)]
    )
    def test_check_action_names_shape_and_dtype(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        floats().check_action((3,), torch.float32)
        with pytest.raises(PolicyError, match="pose") as caught:
            floats().check_action(shape, dtype)
        assert str(tuple(shape)) in str(caught.value) and str(dtype) in str(caught.value)


class TestRewards:
    """Any number is cast; arrays must have the spec's shape."""

    @pytest.mark.parametrize(
        "value",
        [
            2,
            2.0,
            True + 1,
            np.float64(2),
            np.int8(2),
            np.array(2.0),
            np.array([2]),
            [2.0],
            torch.tensor(2.0),
            torch.tensor([2]),
            decimal.Decimal(2),
        ],
    )
    def test_numbers_of_any_type_are_cast_to_float32(self, value: Any) -> None:
        encoded = RewardCodec(("reward",), Unbounded((1,))).encode(value)
        assert encoded.shape == (1,) and encoded.dtype == np.float32 and encoded[0] == 2

    @pytest.mark.parametrize(
        "value", [[1.0, 2.0], np.zeros((1, 1)), np.zeros(0), None, "a", {}, 1j, object()]
    )
    def test_values_other_than_numbers_raise(self, value: Any) -> None:
        with pytest.raises(EnvironmentContractError, match="reward"):
            RewardCodec(("reward",), Unbounded((1,))).encode(value)

    def test_vector_rewards_must_have_the_spec_shape(self) -> None:
        codec = RewardCodec(("reward",), Unbounded((2,)))
        assert codec.encode([1, 2]).tolist() == [1, 2]
        for value in (1.0, [1.0], np.zeros(3)):
            with pytest.raises(EnvironmentContractError, match="reward"):
                codec.encode(value)

    def test_overflowing_reward_becomes_infinite_without_a_warning(self) -> None:
        assert RewardCodec(("reward",), Unbounded((1,))).encode(np.float64(1e300)) == np.inf


@pytest.mark.parametrize("make", [one_hot, categorical])
class TestChoices:
    """One of n integers from a start."""

    @pytest.mark.parametrize("start", [0, -2, 7])
    @pytest.mark.parametrize("kind", [int, np.int64, np.int8, np.array])
    def test_integers_are_encoded_relative_to_the_start(self, make: Any, start: int, kind: Any) -> None:
        codec = make(3, start)
        for choice in range(3):
            encoded = codec.encode(kind(choice + start))
            assert encoded.shape == codec.shape and encoded.dtype == np.int64
            expected = choice if make is categorical else [int(i == choice) for i in range(3)]
            assert encoded.tolist() == expected

    @pytest.mark.parametrize("value", [3, -1, 1.0, "1", None, np.array([1]), np.float32(1)])
    def test_values_outside_the_choices_raise(self, make: Any, value: Any) -> None:
        with pytest.raises(EnvironmentContractError, match="an integer from 0 to 2"):
            make().encode(value)

    @pytest.mark.parametrize("start", [0, -2, 7])
    @pytest.mark.parametrize("dtype", [np.int64, np.int32])
    def test_rows_are_decoded_to_the_spaces_dtype(self, make: Any, start: int, dtype: Any) -> None:
        codec = make(4, start, dtype)
        column = np.array([codec.encode(choice + start) for choice in (3, 0, 2, 2)])
        actions = codec.decode_all(column)
        assert actions == [3 + start, start, 2 + start, 2 + start]
        for t, action in enumerate(actions):
            assert type(action) is dtype and type(codec.decode(column[t])) is dtype
            assert codec.decode(column[t]) == action


class TestOneHotActions:
    """Rows that aren't one-hot are refused."""

    @pytest.mark.parametrize(
        "row", [[0, 0, 0], [1, -1, 0], [0, 2, 0], [2, -1, 0], [1, 3, -3], [0, -1, 0], [1, 0.5, 0]]
    )
    def test_rows_that_are_not_one_hot_raise(self, row: list[float]) -> None:
        codec = one_hot()
        with pytest.raises(PolicyError, match="one-hot"):
            codec.decode(np.array(row))
        with pytest.raises(PolicyError, match="one-hot"):
            codec.decode_all(np.array([[0, 1, 0], row, [0, 0, 1]]))

    def test_categorical_actions_out_of_range_are_passed_on(self) -> None:
        assert categorical().decode(np.int64(9)) == 9 and categorical().decode_all(np.array([-1, 9])) == [
            -1,
            9,
        ]


class TestMultiOneHot:
    """Several choices in one row."""

    def codec(self, start: tuple[int, ...] = (0, 0, 0)) -> MultiOneHotCodec:
        nvec = np.array([2, 4, 3])
        spec = MultiOneHot([2, 4, 3], dtype=torch.int64)
        return MultiOneHotCodec(KEY, spec, nvec, np.array(start), INT64)

    @pytest.mark.parametrize("start", [(0, 0, 0), (5, -1, 0)])
    def test_round_trip_keeps_the_choices(self, start: tuple[int, ...]) -> None:
        codec, rng = self.codec(start), np.random.default_rng(0)
        values = [rng.integers([2, 4, 3]) + start for _ in range(20)]
        column = np.array([codec.encode(value) for value in values])
        assert column.shape == (20, 9) and (column.sum(-1) == 3).all()
        for t, (action, value) in enumerate(zip(codec.decode_all(column), values, strict=True)):
            assert np.array_equal(action, value) and action.dtype == np.int64
            assert np.array_equal(codec.decode(column[t]), value)

    @pytest.mark.parametrize("value", [[2, 0, 0], [0, 4, 0], [0, 0, -1], [0, 0], [0.0, 0.0, 0.0], None, 3])
    def test_values_outside_the_choices_raise(self, value: Any) -> None:
        with pytest.raises(EnvironmentContractError, match="integers"):
            self.codec().encode(value)

    def test_rows_without_a_one_in_a_part_raise(self) -> None:
        with pytest.raises(PolicyError, match="one-hot"):
            self.codec().decode(np.array([1, 1, 1, 0, 0, 0, 0, 0, 0]))


class TestStacks:
    """Tuples of equal parts."""

    def test_round_trip_keeps_the_parts(self) -> None:
        codec = StackCodec(KEY, OneHot(3, dtype=torch.int64).expand(2, 3), [one_hot(), one_hot()])
        column = np.array([codec.encode((2, 0)), codec.encode([1, 1])])
        assert column.tolist() == [[[0, 0, 1], [1, 0, 0]], [[0, 1, 0], [0, 1, 0]]]
        assert codec.decode_all(column) == [(2, 0), (1, 1)] and codec.decode(column[0]) == (2, 0)

    @pytest.mark.parametrize("value", [(1,), (1, 1, 1), 1, None, np.array([1, 1]), (1, 3)])
    def test_values_of_another_structure_raise(self, value: Any) -> None:
        codec = StackCodec(KEY, OneHot(3, dtype=torch.int64).expand(2, 3), [one_hot(), one_hot()])
        with pytest.raises(EnvironmentContractError, match="pose"):
            codec.encode(value)


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (True, True),
        (np.False_, False),
        (np.array([True]), True),
        (np.array(False), False),
        (1, True),
        (0, False),
    ],
)
def test_bools_and_numbers_zero_and_one_are_flags(value, flag):
    assert as_flag("terminated", value) is flag


@pytest.mark.parametrize("value", [None, "no", "", b"", 2, 0.0, np.array([True, False]), np.array([]), []])
def test_values_other_than_flags_raise(value):
    with pytest.raises(EnvironmentContractError, match="terminated expected a bool, got"):
        as_flag("terminated", value)


@pytest.mark.parametrize("value", ["2.5", b"2.5", None])
def test_text_reward_raises(value):
    with pytest.raises(EnvironmentContractError, match="number"):
        RewardCodec(("reward",), Unbounded((1,))).encode(value)
