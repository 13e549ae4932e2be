"""Spaces become specs, and samples of a space survive a round trip through its codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from gleanrl.data.specs import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from gleanrl.envs.libs.gym_codecs import Codec
from gleanrl.envs.libs.gym_spaces import (
    assemble,
    box_spec,
    encode,
    leaves,
    make_tree,
    register_gym_spec_conversion,
)
from gleanrl.errors import SpaceError
from tests.fakes import DISCRETE_HAS_DTYPE

INF, F32MAX = float("inf"), float(np.finfo(np.float32).max)
SPACES = [
    spaces.Box(-1, 1, (2, 3), np.float32),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(-INF, INF, (2,), np.float16),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(-5, 5, (2,), np.int16),
    spaces.Box(0, 1, (3,), np.bool_),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    *([spaces.Discrete(4, start=2, dtype=np.int32)] if DISCRETE_HAS_DTYPE else []),
    spaces.MultiDiscrete([3, 4, 1]),
    spaces.MultiDiscrete([3, 3], start=[1, -1]),
    spaces.MultiDiscrete([3, 4], dtype=np.int32),
    spaces.MultiDiscrete([[3, 4], [2, 2]], start=[[1, 0], [0, 0]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3))),
    spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Box(-2, 3, (2,)))),
    spaces.Tuple((spaces.Tuple((spaces.Discrete(2),)), spaces.Tuple((spaces.Discrete(2),)))),
    spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Dict({"c": spaces.Discrete(3, start=5)})}),
]


def decode(tree: Any, arrays: list[np.ndarray]) -> Any:
    return assemble(tree, [leaf.decode(array) for leaf, array in zip(leaves(tree), arrays, strict=True)])


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(a, b)


@pytest.mark.parametrize("as_integers", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=str)
class TestEverySpace:
    def test_samples_survive_encoding_and_decoding(self, space: spaces.Space[Any], as_integers: bool) -> None:
        space.seed(0)
        tree = make_tree(space, ("action",), as_integers)
        samples = [space.sample() for _ in range(12)]
        encoded = [encode(tree, sample) for sample in samples]
        columns = [np.stack(arrays) for arrays in zip(*encoded, strict=True)]
        per_leaf = [leaf.decode_all(column) for leaf, column in zip(leaves(tree), columns, strict=True)]
        for t, (sample, arrays) in enumerate(zip(samples, encoded, strict=True)):
            assert equal(decode(tree, arrays), sample)
            decoded = assemble(tree, [values[t] for values in per_leaf])
            assert equal(decoded, sample) and space.contains(decoded)

    def test_encoded_samples_are_in_the_spec(self, space: spaces.Space[Any], as_integers: bool) -> None:
        space.seed(0)
        tree = make_tree(space, ("action",), as_integers)
        for _ in range(12):
            for leaf, array in zip(leaves(tree), encode(tree, space.sample()), strict=True):
                leaf.spec.assert_is_in(torch.from_numpy(np.array(array)))

    def test_drawn_values_are_in_the_space(self, space: spaces.Space[Any], as_integers: bool) -> None:
        tree = make_tree(space, ("action",), as_integers)
        for _ in range(12):
            assert space.contains(decode(tree, [leaf.spec.rand().numpy() for leaf in leaves(tree)]))


@pytest.mark.parametrize(
    ("space", "as_integers", "spec"),
    [
        (spaces.Discrete(3, start=4), False, OneHot(3, dtype=torch.int64)),
        (spaces.Discrete(3, start=4), True, Categorical(3)),
        (spaces.MultiDiscrete([2, 3]), False, MultiOneHot([2, 3], dtype=torch.int64)),
        (spaces.MultiDiscrete([2, 3]), True, MultiCategorical([2, 3])),
        (spaces.MultiBinary(4), False, Binary(4, dtype=torch.int8)),
        (spaces.Box(-1, 2, (2,)), False, Bounded(-1, 2, (2,))),
        (spaces.Box(0, 255, (2,), np.uint8), False, Bounded(0, 255, (2,), dtype=torch.uint8)),
        (spaces.Box(-INF, INF, (2,)), False, Unbounded((2,))),
        (spaces.Box(-F32MAX, F32MAX, (2,)), False, Unbounded((2,))),
        (
            spaces.Box(np.float32([-1, -INF]), np.float32([INF, 1])),
            False,
            Bounded(torch.tensor([-1, -INF]), torch.tensor([INF, 1])),
        ),
        (
            spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Box(-INF, 3, (2,)))),
            False,
            Bounded(torch.tensor([[-1.0] * 2, [-INF] * 2]), torch.tensor([[1.0] * 2, [3.0] * 2])),
        ),
    ],
    ids=str,
)
def test_space_is_converted_to_its_spec(space: spaces.Space[Any], as_integers: bool, spec: Any) -> None:
    tree = make_tree(space, ("x",), as_integers)
    assert isinstance(tree, Codec) and tree.spec == spec and tree.key == ("x",)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Graph(spaces.Box(0, 1), None),
        spaces.Sequence(spaces.Box(0, 1, (2,))),
        spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
        spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
        spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
        spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,)))),
        spaces.Tuple((spaces.Box(0, 1, (2,), np.float32), spaces.Box(0, 1, (2,), np.float64))),
        spaces.Tuple((spaces.Dict({"a": spaces.Discrete(2)}),)),
        spaces.Tuple(()),
        spaces.Dict({}),
        spaces.Dict({"a": spaces.Dict({"b": spaces.Text(3)})}),
        spaces.Dict({"_a": spaces.Discrete(2)}),
        spaces.Box(0, 1, (2,), np.uint64),
        spaces.Box(0, 1, (2,), np.longdouble),
    ],
    ids=str,
)
def test_unsupported_spaces_are_refused_by_name(space: spaces.Space[Any]) -> None:
    for as_integers in (False, True):
        with pytest.raises(SpaceError) as caught:
            make_tree(space, ("camera",), as_integers)
        assert isinstance(caught.value, (NotImplementedError, ValueError)) and "camera" in str(caught.value)
        inner = space.spaces["a"]["b"] if isinstance(space, spaces.Dict) and "a" in space.spaces else space
        assert str(inner) in str(caught.value)


def test_spaces_of_gym_are_named():
    old = type("Box", (), {"__module__": "gym.spaces.box", "shape": (3,), "dtype": np.dtype(np.float32)})()
    with pytest.raises(SpaceError, match="a space of gym, not of gymnasium"):
        make_tree(old, ("observation",), False)


class Compass(spaces.Space[Any]):
    """A direction, for which gymnasium has no space."""

    def __init__(self) -> None:
        super().__init__((1,), np.float32)


class Needle(Compass):
    """A subclass of the space."""


def test_user_registered_conversions_are_used() -> None:
    with pytest.raises(SpaceError, match="no spec for the space"):
        make_tree(Compass(), ("x",), False)

    @register_gym_spec_conversion(Compass)
    def convert(space: Compass, categorical_action_encoding: bool = False) -> Bounded:
        return Bounded(0.0, 360.0 if categorical_action_encoding else 6.5, space.shape)

    for categorical, high in ((False, 6.5), (True, 360.0)):
        tree = make_tree(Needle(), ("x",), categorical)
        assert isinstance(tree, Codec) and tree.spec.space.high == high
        assert encode(tree, np.float32([0.5]))[0].tolist() == [0.5]
        assert tree.decode(np.float32([0.5])).tolist() == [0.5]


def test_uniform_box_bounds_are_stored_as_two_numbers() -> None:
    low, high = np.zeros((40, 60, 3), np.uint8), np.full((40, 60, 3), 255, np.uint8)
    spec = box_spec(low, high, torch.uint8)
    assert spec.space.ends[0].untyped_storage().nbytes() == 1 and spec.space.common == (0, 255)
    high[-1, -1, -1] = 7
    spec = box_spec(low, high, torch.uint8)
    assert spec.space.common is None and spec.space.high[-1, -1, -1] == 7
    assert not spec.is_in(torch.full((40, 60, 3), 8, dtype=torch.uint8))
