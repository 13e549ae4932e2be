"""Stacks of different composites behave as one composite."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gleanrl.data.specs import (
    Bounded,
    Categorical,
    Composite,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, SpecError, UnsupportedError


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


def unlike():
    """Return a stack of two composites, one of which has an additional key, and both members."""
    first = Composite(
        k=Bounded(0, 1, (3,)), c=Categorical(3), lidar=Unbounded((2,)), s={"x": Unbounded((2,))}
    )
    second = Composite(k=Bounded(0, 1, (3,)), c=Categorical(3), s={"x": Unbounded((2,))})
    return torch.stack([first, second]), first, second


@pytest.mark.parametrize(
    "member",
    [lambda s: s[0], lambda s: s[-2], lambda s: s.unbind(0)[0], lambda s: s[(0,)], lambda s: s.specs[0]],
)
def test_changes_of_a_member_of_a_stack_change_the_stack(member):
    stacked, first, _ = unlike()
    assert member(stacked) is first
    del member(stacked)["lidar"]
    assert stacked.repr_exclusive_keys() == ""
    member(stacked)["k"].space.low += 1
    assert stacked["k"].specs[0].low.tolist() == [1, 1, 1] and stacked["k"].specs[1].low.tolist() == [0, 0, 0]
    member(stacked)["c"].update_mask(torch.tensor([True, False, False]))
    assert not bool(stacked.rand((50,))["c"][:, 0].any())
    member(stacked)["s", "y"] = Unbounded((1,))
    assert "1: s" not in stacked.repr_exclusive_keys() and ("s", "y") in first
    member(stacked).update({"new": Unbounded((1,))})
    assert "new" in stacked[0] and "new" not in stacked.keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["s"].set("y", Unbounded((2, 1))),
        lambda s: s["s"].__delitem__("x"),
        lambda s: s["s"].update({"y": Unbounded((2, 1))}),
        lambda s: setattr(s["s"], "shape", (2, 2)),
        lambda s: s["s"].lock_(),
        lambda s: s["s"].clear_device_(),
        lambda s: setattr(s["k"].space, "low", 5),
        lambda s: s["k"].space.__setattr__("high", 5),
        lambda s: s["c"].update_mask(torch.tensor([True, False, False])),
        lambda s: s[:1].set("y", Unbounded((1, 1))),
        lambda s: s[:1]["k"].space.__setattr__("low", -1),
    ],
)
def test_changes_that_would_not_reach_the_members_are_refused(change):
    stacked, *_ = unlike()
    before = stacked.clone()
    with pytest.raises(UnsupportedError, match="clone"):
        change(stacked)
    assert stacked == before


def test_nested_keys_of_a_stack_are_set_and_removed_in_the_members():
    stacked, first, second = unlike()
    stacked["s", "y"] = Unbounded((2, 1))
    assert ("s", "y") in first and ("s", "y") in second
    del stacked["s", "y"]
    assert ("s", "y") not in first and ("s", "y") not in second
    stacked.update({"s": {"z": Unbounded((2, 1))}})
    assert ("s", "z") in first and ("s", "z") in second
    assert stacked["s"].clone().set("w", Unbounded((2, 1))).shape == (2,)


def test_a_locked_member_keeps_its_entries_when_the_stack_is_changed():
    stacked, first, second = unlike()
    stacked[0].lock_()
    with pytest.raises(UnsupportedError):
        stacked["new"] = Unbounded((2, 1))
    with pytest.raises(UnsupportedError):
        del stacked["c"]
    assert "new" not in second and "c" in second


def test_stack_of_composites_that_differ_in_examples_of_text_is_one_composite():
    specs = [Composite(t=NonTensor((), example_data=text)) for text in "ab"]
    assert type(torch.stack(specs)) is Composite and torch.stack(specs)["t"].example_data == "a"
