"""Helpers for composites that contain stacks find and index the stacks."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import (
    Categorical,
    Composite,
    NonTensor,
    StackedComposite,
    Unbounded,
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
)
from gleanrl.errors import SchemaError


def uneven():
    return StackedComposite(
        Composite(
            x=Unbounded((3,)), one=Unbounded((2, 4)), sub={"y": Categorical(2), "deep": {"z": Unbounded(())}}
        ),
        Composite(x=Unbounded((3,)), sub={"w": NonTensor(())}),
        Composite(x=Unbounded((3,)), none=None),
    )


def test_contains_lazy_spec():
    assert contains_lazy_spec(uneven()) and contains_lazy_spec(Composite(a={"b": uneven()}, shape=()))
    assert contains_lazy_spec(torch.stack([Categorical(2), Categorical(3)]))
    assert not contains_lazy_spec(Composite(a={"b": Categorical(2)}, c=None)) and not contains_lazy_spec(
        Unbounded()
    )


def test_check_no_exclusive_keys():
    assert not check_no_exclusive_keys(uneven()) and not check_no_exclusive_keys(Composite(a=uneven()))
    assert check_no_exclusive_keys(Composite(a=uneven()), recurse=False)
    nested = torch.stack([Composite(a={"b": Categorical(2)}), Composite(a={"c": Categorical(2)})])
    assert not check_no_exclusive_keys(nested) and check_no_exclusive_keys(nested, recurse=False)
    assert check_no_exclusive_keys(Unbounded()) and check_no_exclusive_keys(uneven().select("x"))


def test_consolidated_stacks_have_the_same_keys_everywhere():
    before = uneven()
    spec = consolidate_spec(before)
    assert check_no_exclusive_keys(spec) and not check_no_exclusive_keys(before) and before == uneven()
    assert spec[0]["x"] == Unbounded((3,)) and spec[0]["one"] == Unbounded((2, 4))
    assert spec[1]["one"] == Unbounded((0, 0)) and spec["one"].shape == (3, -1, -1)
    assert spec[2]["sub", "deep", "z"] == Unbounded(()) and spec[2]["sub", "y"] == Unbounded(
        (), dtype=torch.int64
    )
    assert spec[2]["sub", "w"] == NonTensor(()) and spec[0]["none"] is None
    assert spec.is_in(spec.rand((2,)))


def test_consolidate_recurses_as_deep_as_its_options_allow():
    inside = Composite(a=uneven())
    assert check_no_exclusive_keys(consolidate_spec(inside)) and consolidate_spec(inside, False) == inside
    nested = torch.stack(
        [Composite(a={"b": Categorical(2)}), Composite(a={"c": Categorical(2)}, d=Unbounded())]
    )
    shallow = consolidate_spec(nested, recurse_through_entries=False)
    assert shallow.keys() == {"a", "d"} and not check_no_exclusive_keys(shallow)
    assert check_no_exclusive_keys(consolidate_spec(nested))
    members = StackedComposite(Composite(a=uneven()), Composite(a=uneven(), b=None))
    assert not check_no_exclusive_keys(consolidate_spec(members, recurse_through_stack=False)[0])
    assert check_no_exclusive_keys(consolidate_spec(members)[0])
    leaf = Unbounded()
    assert consolidate_spec(leaf) is leaf


def test_a_key_is_a_leaf_everywhere_or_nowhere():
    with pytest.raises(SchemaError, match="'a' is a leaf in one member and a composite in another"):
        consolidate_spec(StackedComposite(Composite(a=Unbounded()), Composite(a={"b": Unbounded()})))
