"""Keys of transforms are normalised to lists of equal length."""

import pytest

from gleanrl.envs.transforms import Transform
from gleanrl.envs.transforms.base import as_keys, paired
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


def test_one_key_is_a_list_of_one():
    assert as_keys("in_keys", "a") == ["a"]
    assert as_keys("in_keys", ("agents", "a")) == [("agents", "a")]
    assert as_keys("in_keys", [("a",), ("agents", ("x", "b"))]) == ["a", ("agents", "x", "b")]
    assert as_keys("in_keys", None) is None
    with pytest.raises(InvalidTypeError, match="in_keys"):
        as_keys("in_keys", 3)


def test_keys_that_were_not_given_follow_from_others():
    transform = Transform(in_keys=["a"])
    assert transform.out_keys == ["a"] and transform.in_keys_inv == []
    transform.out_keys = "b"
    assert transform.pairs() == [("a", "b")]
    transform.in_keys = ["c"]
    assert transform.pairs() == [("c", "b")]


def test_there_are_as_many_of_both():
    assert paired(None, "in_keys", ["a"], "out_keys", ["b"]) == [("a", "b")]
    with pytest.raises(InvalidArgumentError, match="as many out_keys"):
        Transform(in_keys=["a", "b"], out_keys=["c"]).pairs()
