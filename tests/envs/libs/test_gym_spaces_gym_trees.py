"""Codecs are nested like their Dict spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from gleanrl.envs.libs.gym_spaces import Group, encode, leaves, make_tree, tree_spec
from gleanrl.errors import EnvironmentContractError


class TestDicts:
    SPACE = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Dict({"c": spaces.Discrete(3)})})

    def tree(self) -> Group:
        tree = make_tree(self.SPACE, (), False)
        assert isinstance(tree, Group)
        return tree

    def test_keys_are_nested_like_the_space(self) -> None:
        spec = tree_spec(self.tree())
        assert spec["a"].shape == (2,) and spec["b", "c"].shape == (3,)
        assert [leaf.key for leaf in leaves(self.tree())] == [("a",), ("b", "c")]

    def test_the_order_of_the_dictionary_does_not_matter(self) -> None:
        a, c = encode(self.tree(), {"b": {"c": 2}, "a": np.float32([1, 2])})
        assert a.tolist() == [1, 2] and c.tolist() == [0, 0, 1]

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            ({"a": np.zeros(2, np.float32)}, "missing \\['b'\\]"),
            ({"a": np.zeros(2, np.float32), "b": {"c": 0}, "d": 1}, "unexpected \\['d'\\]"),
            ({"a": np.zeros(2, np.float32), "b": {}}, "'b'.*missing \\['c'\\]"),
            ({"a": np.zeros(2, np.float32), "b": 3}, "'b'.*int 3"),
            (np.zeros(2), "a dict with"),
        ],
    )
    def test_missing_or_extra_keys_raise(self, value: Any, named: str) -> None:
        with pytest.raises(EnvironmentContractError, match=named):
            encode(self.tree(), value)
