"""Keys of transforms are normalised to lists of equal length."""

import pytest

from gleanrl.envs.transforms import Transform
from gleanrl.envs.transforms.base import as_keys, paired
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


def test_single_key_becomes_a_list():
    assert as_keys("in_keys", "a") == ["a"]
    assert as_keys("in_keys", ("agents", "a")) == [("agents", "a")]
    assert as_keys("in_keys", [("a",), ("agents", ("x", "b"))]) == ["a", ("agents", "x", "b")]
    assert as_keys("in_keys", None) is None
    with pytest.raises(InvalidTypeError, match="in_keys"):
        as_keys("in_keys", 3)


def test_missing_keys_follow_from_given_keys():
    transform = Transform(in_keys=["a"])
    assert transform.out_keys == ["a"] and transform.in_keys_inv == []
    transform.out_keys = "b"
    assert transform.pairs() == [("a", "b")]
    transform.in_keys = ["c"]
    assert transform.pairs() == [("c", "b")]


def test_in_keys_and_out_keys_must_have_equal_length():
    assert paired(None, "in_keys", ["a"], "out_keys", ["b"]) == [("a", "b")]
    with pytest.raises(InvalidArgumentError, match="as many out_keys"):
        Transform(in_keys=["a", "b"], out_keys=["c"]).pairs()
