"""Codecs of choices; a batched codec of P environments equals P codecs of one environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from gleanrl.data.specs import Categorical, OneHot
from gleanrl.envs.libs.gym_codecs import CategoricalCodec, Codec, OneHotCodec, as_flags
from gleanrl.envs.libs.gym_spaces import assemble, encode, leaves, make_tree
from gleanrl.errors import EnvironmentContractError, PolicyError

P = 4
SPACES = [
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(0, 255, (2,), np.uint8),
    spaces.Discrete(3),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 2]),
    spaces.MultiDiscrete([3, 2], start=[1, 2]),
    spaces.MultiDiscrete([[3, 2], [2, 2]]),
    spaces.MultiBinary(3),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.Box(-1, 1, (1,))})}),
    spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Box(0, 2, (2,)))),
    spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3))),
]


@pytest.mark.parametrize(
    ("start", "dtype", "takes"), [(0, "int64", True), (1, "int64", False), (0, "int32", False)]
)
def test_categorical_rows_with_equal_dtype_and_start_need_no_decoding(
    start: int, dtype: str, takes: bool
) -> None:
    codec = CategoricalCodec(("action",), Categorical(3), 3, start, np.dtype(dtype))
    assert codec.decodes_to_itself is takes
    row = np.arange(3)[2, ...]
    assert (type(codec.decode(row)), codec.decode(row)) == (np.dtype(dtype).type, 2 + start)
    one_hot = OneHotCodec(("action",), OneHot(3), 3, start, np.dtype(dtype))
    assert not one_hot.decodes_to_itself


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_batched_codecs_equal_single_codecs(space: Any, categorical: bool) -> None:
    whole = batch_space(space, P)
    whole.seed(0)
    one = make_tree(space, ("x",), categorical)
    tree = one.batched(P)
    values = [whole.sample() for _ in range(5)]
    columns = [np.stack(rows) for rows in zip(*(encode(tree, value) for value in values), strict=True)]
    for t, value in enumerate(values):
        encoded = encode(tree, value)
        for p, single in enumerate(iterate(whole, value)):
            for leaf, part in zip(encoded, encode(one, single), strict=True):
                assert leaf.dtype == part.dtype and np.array_equal(leaf[p], part)
        decoded = assemble(tree, [c.decode(a) for c, a in zip(leaves(tree), encoded, strict=True)])
        assert same(decoded, value) and whole.contains(decoded)
        at_once = assemble(tree, [c.decode_all(a)[t] for c, a in zip(leaves(tree), columns, strict=True)])
        assert same(at_once, value)
    for codec, single in zip(leaves(tree), leaves(one), strict=True):
        assert codec.spec.shape == (P, *single.spec.shape) and codec.spec.dtype is single.spec.dtype
        assert bool(codec.spec.contains(codec.spec.rand()))
        codec.check_action((P, *single.shape), single.spec.dtype)
        with pytest.raises(PolicyError):
            codec.check_action(single.shape, single.spec.dtype)


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("value", [[0, 1, 2], [0, 1, 2, 3], [0.0, 1.0, 2.0, 0.0], None, ["a"] * P, 1])
def test_choices_outside_the_space_raise(value: Any, categorical: bool) -> None:
    codec = make_tree(spaces.Discrete(3), ("x",), categorical).batched(P)
    assert isinstance(codec, Codec)
    with pytest.raises(EnvironmentContractError, match="'x' expected 4 integers from 0 to 2"):
        codec.encode(value if value is None else np.array(value))


def test_values_of_another_shape_or_type_raise() -> None:
    multi = make_tree(spaces.MultiDiscrete([2, 2]), ("x",), False).batched(P)
    stack = make_tree(spaces.Tuple([spaces.Box(0, 1, (2,))] * 2), ("x",), False).batched(P)
    for codec, value in ((multi, np.zeros((3, 2), int)), (multi, None), (stack, (np.zeros((P, 2)),))):
        assert isinstance(codec, Codec)
        with pytest.raises(EnvironmentContractError, match="'x'"):
            codec.encode(value)


def test_rows_that_are_not_one_hot_raise() -> None:
    one = make_tree(spaces.Discrete(3), ("action",), False)
    assert isinstance(one, Codec)
    codec = one.batched(2)
    for row in ([0, 0, 0], [1, 2, 0], [1, -1, 0], [2, 0, 0]):
        with pytest.raises(PolicyError, match="one-hot"):
            codec.decode(np.array([[1, 0, 0], row]))
        with pytest.raises(PolicyError, match="one-hot"):
            one.decode(np.array(row))


@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_first_maximum_of_a_tie_is_taken_and_recorded(dtype: Any) -> None:
    """A policy that marks every maximum sets several ones in its output."""
    one = make_tree(spaces.Discrete(3), ("action",), False)
    assert isinstance(one, Codec)
    row = np.array([0, 1, 1], dtype)
    assert one.decode(row) == 1 and row.tolist() == [0, 1, 0]
    rows = np.array([[1, 0, 0], [0, 1, 1]], dtype)
    assert one.batched(2).decode(rows).tolist() == [0, 1] and rows.tolist() == [[1, 0, 0], [0, 1, 0]]
    column = np.array([[1, 1, 1], [0, 0, 1]], dtype)
    assert list(one.decode_all(column)) == [0, 2] and column.tolist() == [[1, 0, 0], [0, 0, 1]]
    several = make_tree(spaces.MultiDiscrete([2, 2]), ("action",), False)
    assert isinstance(several, Codec)
    row = np.array([1, 1, 0, 1], dtype)
    assert several.decode(row).tolist() == [0, 1] and row.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_batched_codecs_can_be_batched_again(space: Any, categorical: bool) -> None:
    one = make_tree(space, ("x",), categorical)
    for single, codec in zip(leaves(one), leaves(one.batched(3).batched(2)), strict=True):
        assert codec.spec.shape == (2, 3, *single.spec.shape)
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        whole = batch_space(batch_space(space, 3), 2)
        value = whole.sample()
        twice = one.batched(3).batched(2)
        assert same(twice.decode(twice.encode(value)), value)


def test_batched_flags_accept_bools_zeros_and_ones_only() -> None:
    flags = np.array([True, False])
    assert as_flags("terminated", flags, 2) is flags
    for good in ([1, 0], np.array([1, 0]), torch.tensor([True, False])):
        assert as_flags("terminated", good, 2).tolist() == [True, False]
    for bad in (True, [True], [[True, False]], [0.0, 1.0], [2, 0], None, "ab"):
        with pytest.raises(EnvironmentContractError, match="truncated expected 2 bools"):
            as_flags("truncated", bad, 2)
