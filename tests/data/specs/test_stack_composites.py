"""Stacks of unlike composites."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl.data.specs import Bounded, Categorical, Composite, OneHot, Stacked, StackedComposite, Unbounded
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, SpecError


@pytest.fixture
def spec():
    torch.manual_seed(0)
    return StackedComposite(
        Composite(obs=Bounded(0, 1, (3,)), act=OneHot(2), sub={"x": Categorical(2)}, one=Unbounded()),
        Composite(obs=Bounded(2, 3, (3,)), act=OneHot(2), sub={"x": Categorical(9)}),
    )


def test_entries_are_stacks_of_entries(spec):
    assert list(spec.keys(True, True)) == ["obs", "act", ("sub", "x")]
    assert isinstance(spec["obs"], Stacked) and spec["obs"].shape == (2, 3)
    assert spec["act"] == OneHot(2, (2, 2)) and spec["sub", "x"].specs == (Categorical(2), Categorical(9))
    assert spec[0]["one"] == Unbounded() and spec[1].keys() == {"obs", "act", "sub"}


def test_values_are_dense_where_they_can_be(spec):
    lazy = spec.rand((4,))
    assert isinstance(lazy, LazyStackedTensorDict) and lazy.batch_size == (4, 2) and spec.is_in(lazy)
    assert "one" in lazy[:, 0].keys()
    dense = spec.exclude("one")
    assert isinstance(dense.rand((4,)), TensorDict) and dense.is_in(dense.rand((4,)))
    assert dense.rand()["obs"].shape == (2, 3)
    ragged = StackedComposite(Composite(x=Unbounded((2,))), Composite(x=Unbounded((3,))))
    assert ragged.is_in(ragged.rand((5,))) and ragged["x"].shape == (2, -1)


def test_faults_name_position_and_key(spec):
    value = spec.exclude("one").rand()
    value["obs"][1] = 0
    with pytest.raises(SpecError, match="position 1 along dimension 0: key 'obs': expected.*got 0.0"):
        spec.exclude("one").assert_is_in(value)
    assert spec.exclude("one").project(value)["obs"][1].tolist() == [2, 2, 2]
    with pytest.raises(SpecError, match=r"position 0.*missing keys \['one'\]"):
        spec.assert_is_in(value)
    assert not spec.is_in(value[:1]) and not spec.is_in(torch.zeros(2))


def test_setting_sets_the_parts(spec):
    spec["new"] = torch.stack([Categorical(2), Categorical(4)])
    assert spec.specs[0]["new"] == Categorical(2) and spec.specs[1]["new"] == Categorical(4)
    spec["obs"] = Unbounded((2, 7))
    assert spec.specs[1]["obs"] == Unbounded((7,)) and spec["obs"] == Unbounded((2, 7))
    del spec["sub", "x"]
    assert "x" not in spec.specs[0]["sub"].keys()


def test_there_and_back(spec):
    value = spec.rand()
    arrays = spec.to_numpy(value)
    assert set(arrays[0]) == {"obs", "act", "sub", "one"} and arrays[1]["act"].shape == ()
    back = spec.encode(arrays)
    assert spec.is_in(back) and bool((back[1] == value[1]).all())
    for bad in (arrays[:1], {}, value):
        with pytest.raises(SchemaError, match="sequence of 2 mappings"):
            spec.encode(bad)


def test_type_check(spec):
    value = spec.rand()
    assert spec.type_check(value) is None and spec.type_check(torch.zeros(2, 3), "obs") is None
    with pytest.raises(InvalidTypeError, match="'obs'"):
        spec.type_check(torch.zeros(2, 3, dtype=torch.int64), "obs")
    value.specs = None
    with pytest.raises(InvalidTypeError, match="'act'"):
        spec.type_check(spec.exclude("one").rand().set("act", torch.zeros(2, 2)))


def test_unspecified_in_some_members():
    spec = StackedComposite(Composite(a=None, b=Categorical(2)), Composite(a=Unbounded(()), b=Categorical(3)))
    assert spec["a"] is None and list(spec.keys()) == ["a", "b"]


def test_bad_members():
    for bad in ((), (Unbounded(),), (1,)):
        with pytest.raises(InvalidTypeError, match="expected composites"):
            StackedComposite(*bad)
    with pytest.raises(InvalidArgumentError, match="one shape"):
        StackedComposite(Composite(shape=(2,)), Composite(shape=(3,)))


def test_locked_members_make_a_locked_stack():
    members = [Composite(a=Categorical(n)) for n in (2, 3)]
    assert not StackedComposite(*members).is_locked
    for member in members:
        member.lock_()
    assert StackedComposite(*members).is_locked and not StackedComposite(*members).empty().is_locked


def test_the_length_is_the_size_of_the_first_dimension():
    parts = [Composite(a=Unbounded((3, 2)), shape=(3,)), Composite(b=Unbounded((3, 2)), shape=(3,))]
    assert len(torch.stack(parts)) == 2 and len(torch.stack(parts, 1)) == 3
    assert len(torch.stack(parts).keys()) == 0


def test_exclusive_entries_as_text():
    spec = torch.stack([Composite(a=Unbounded(3)), Composite(a=Unbounded(3), b=Unbounded(4))])
    assert spec.repr_exclusive_keys() == f"1: b: {Unbounded(4)!r}"
    assert torch.stack([Composite(a=Unbounded(3)), Composite(a=Unbounded(4))]).repr_exclusive_keys() == ""
