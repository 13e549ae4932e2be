"""Composites are mappings: keys, assignment, locks."""

from __future__ import annotations

import pytest

from gleanrl.data.specs import Bounded, Categorical, Composite, OneHot, Unbounded
from gleanrl.data.specs.mapping import as_path, is_key
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    ReservedNameError,
    UnsupportedError,
)
from tests.data.specs.cases import plain, stacked
from tests.interrupts import interruptions


@pytest.fixture(params=[plain, stacked])
def spec(request):
    return request.param()


def test_keys_items_and_values(spec):
    assert list(spec.keys()) == list(spec) == ["x", "y", "a"] and len(spec.keys()) == 3
    assert len(plain()) == 3
    assert list(spec.keys(True)) == ["x", "y", "a", ("a", "b"), ("a", "c")]
    assert list(spec.keys(True, True)) == ["x", "y", ("a", "b")] and list(spec.keys(False, True)) == [
        "x",
        "y",
    ]
    assert [k for k, _ in spec.items(True, True)] == list(spec.keys(True, True))
    assert [v is None for v in spec.values(True, True)] == [False, True, False]
    assert spec.keys() - {"x"} == {"y", "a"}


def test_getting(spec):
    assert spec["x"].shape == spec.get("x").shape == (2, 3) and spec["y"] is None
    assert spec["a", "b"] == spec.get(("a", "b")) == spec["a"]["b"] == spec[("a",), "b"] and spec[
        "a", "b"
    ].shape == (2,)
    assert ("a", "b") in spec and "y" in spec and "z" not in spec and ("x", "b") not in spec and 0 not in spec
    assert spec.get("z", None) is None and spec.get(("a", "z"), 5) == 5 and spec.get("y", 5) is None
    for key in ("z", ("a", "z"), ("x", "b"), ("y", "b")):
        with pytest.raises(MissingKeyError, match="no key .*the keys are"):
            spec[key]
    with pytest.raises(KeyError):
        spec["z"]


def test_setting(spec):
    assert spec.set("z", Bounded(0, 1, (2, 5))) is spec and spec["z"].shape == (2, 5)
    spec["new", "deep", "leaf"] = Unbounded((2, 1))
    assert spec["new", "deep"].shape == (2,) and spec["new", "deep", "leaf"] == Unbounded((2, 1))
    spec["a", "b"] = None
    assert spec["a", "b"] is None and ("a", "c") in spec
    spec["x"] = {"inner": {"leaf": Categorical(2, (2,))}}
    assert spec["x", "inner", "leaf"] == Categorical(2, (2,)) and spec["x", "inner"].shape == (2,)
    assert spec.is_in(spec.rand())


def test_removing(spec):
    del spec["x"], spec["a", "b"]
    assert list(spec.keys(True)) == ["y", "a", ("a", "c")]
    assert spec.pop("y") is None and spec.pop("y", 3) == 3 and "y" not in spec
    for key in ("x", ("a", "b"), ("nothing", "at all")):
        with pytest.raises(MissingKeyError):
            del spec[key]
        with pytest.raises(MissingKeyError):
            spec.pop(key)


def test_updating_merges_mappings(spec):
    assert spec.update({"a": {"d": Unbounded((2, 7))}, "x": None, ("n", "m"): Categorical(2, (2,))}) is spec
    assert spec["a", "d"].shape == (2, 7) and ("a", "b") in spec and spec["x"] is None and ("n", "m") in spec
    spec.update(Composite(a=Composite(b=Categorical(9, (2,)), shape=(2,)), shape=(2,)))
    assert spec["a", "b"] == Categorical(9, (2,)) and ("a", "d") in spec


def test_empty_select_and_exclude(spec):
    assert (
        spec.empty().shape == spec.shape
        and spec.empty().is_empty()
        and not spec.is_empty()
        and type(spec) is type(spec.empty())
    )
    assert spec.select(("a", "c")).is_empty(recurse=True) and not spec.select(("a", "c")).is_empty()
    chosen = spec.select("x", ("a", "b"))
    assert list(chosen.keys(True, True)) == ["x", ("a", "b")] and chosen["a", "b"] == spec["a", "b"]
    with pytest.raises(MissingKeyError):
        spec.select("z")
    assert spec.select("z", "x", strict=False).keys() == {"x"}
    rest = spec.exclude("x", ("a", "b"), "z", ("x", "deeper"))
    assert list(rest.keys(True)) == ["y", "a", ("a", "c")] and rest.shape == spec.shape
    rest["a", "new"] = Unbounded((2,))
    chosen["a", "new"] = Unbounded((2,))
    spec.select("a")["a", "new"] = Unbounded((2,))
    assert ("a", "new") not in spec


def test_a_failed_set_changes_nothing(spec):
    before = spec.clone()
    for key, value, error, message in (
        ("z", Unbounded((3, 1)), InvalidArgumentError, r"'z'.*starts with \(2,\)"),
        ("z", Unbounded(()), InvalidArgumentError, "starts with"),
        (("a", "z"), Unbounded((3,)), InvalidArgumentError, "starts with"),
        (("new", "z"), Unbounded((3,)), InvalidArgumentError, "starts with"),
        ("z", 5, InvalidTypeError, "expected a spec, a mapping or None, got 5"),
        ("z", {"w": 5}, InvalidTypeError, "'w'"),
        (("x", "z"), Unbounded((2,)), InvalidTypeError, "'x' is a leaf"),
        (5, Unbounded((2,)), InvalidTypeError, "key: expected"),
        ((), Unbounded((2,)), InvalidTypeError, "key: expected"),
    ):
        with pytest.raises(error, match=message):
            spec.set(key, value)
        assert spec == before


@pytest.mark.parametrize("key", ["z", ("a", "z"), ("new", "z")])
def test_a_failed_update_changes_nothing(spec, key):
    before, group = spec.clone(), spec["a"]
    wrong = {"x": None, "a": {"b": None, "d": Unbounded((2,))}, "n": {"m": None}, key: Unbounded((3,))}
    with pytest.raises(InvalidArgumentError, match="starts with"):
        spec.update(wrong)
    assert spec == before and group == before["a"]


@pytest.mark.parametrize("make", [plain, stacked])
def test_an_interrupted_update_is_complete_or_changes_nothing(make):
    new = {"x": None, "a": {"b": None, "d": Unbounded((2,))}, ("n", "m"): Categorical(2, (2,))}
    before, after = make(), make().update(new)
    for spec, place in interruptions(make, lambda spec: spec.update(new), most=60):
        assert spec in (before, after), place


def test_a_failed_separation_keeps_all_entries():
    spec = plain()
    spec["a"].lock_()
    before = spec.clone()
    with pytest.raises(UnsupportedError, match="locked"):
        spec.separates("x", ("a", "b"))
    assert spec == before


def test_the_dimensions_of_one_value_may_be_the_batch_but_never_change():
    spec = Composite(a=OneHot(2), shape=(2,))
    assert spec.zero().batch_size == (2,) and spec.is_in(spec.rand((3,)))
    for change in (lambda: spec[0], lambda: spec.expand(3, 2), lambda: spec.unsqueeze(0)):
        with pytest.raises(InvalidArgumentError, match="(?s)key 'a'.*encode one value"):
            change()


def test_key_helpers():
    assert as_path("a") == ("a",) and as_path(("a", ("b", "c"))) == ("a", "b", "c") == as_path(
        (("a", "b"), "c")
    )
    assert (
        is_key("a") and is_key(("a", "b")) and not any(map(is_key, (0, (), ("a", 0), None, ..., slice(None))))
    )


def test_taking_entries_out(spec):
    before = spec.clone()
    taken = spec.separates("x", ("a", "b"), "absent")
    assert (
        list(taken.keys(True, True)) == ["x", ("a", "b")]
        and taken["x"] == before["x"]
        and taken.shape == spec.shape
    )
    assert "x" not in spec and ("a", "b") not in spec and "y" in spec
    assert spec.separates("absent") is None
    default = Unbounded((*spec.shape, 1))
    assert list(spec.separates("absent", default=default).keys()) == ["absent"]


def test_types_of_some_entries(spec):
    value = spec.rand()
    value["x"] = value["x"].double() if spec.ndim == 0 or type(spec) is Composite else value["x"]
    spec.type_check(value, selected_keys=[("a", "b")])
    spec.type_check(value, selected_keys=("a", "b"))
    spec.type_check(value["a", "b"], ("a", "b"))
    with pytest.raises(InvalidTypeError, match="dtype"):
        spec.type_check(value["a", "b"].double(), ("a", "b"))


def test_composites_as_leaves():
    spec = Composite(a=Composite(b=Unbounded(), step_mdp_static=True), c=Unbounded(), d={"e": Unbounded()})
    assert list(spec.keys(True, True, step_mdp_static_only=True)) == ["a", "c", ("d", "e")]
    assert set(spec.keys(True, step_mdp_static_only=True)) == {"a", "c", ("d", "e"), "d"}
    assert len(spec.values(True, True, step_mdp_static_only=True)) == 3 and spec.clone()["a"].step_mdp_static
    assert set(spec.keys(False, True, is_leaf=lambda kind: True)) == {"a", "c", "d"}
    assert ("a", "b") in spec.keys(True, True) and dict(spec.items(is_leaf=lambda kind: False)).keys() == {
        "a",
        "c",
        "d",
    }


@pytest.mark.parametrize("kind", [plain, stacked])
def test_keys_are_found_in_any_spelling(kind):
    spec = kind()
    for key in spec.keys(True):
        path = as_path(key)
        assert path in spec.keys(True) and (path[0], (*path[1:],)) in spec.keys(True) or len(path) == 1
        assert (path in spec.keys()) == (len(path) == 1)
    assert ["a"] not in spec.keys() and 3 not in spec.keys() and () not in spec.keys()
    assert spec.keys() == set(spec) and list(spec.keys()) == list(spec)


@pytest.mark.parametrize("name", ["device", "shape", "dtype", "space"])
def test_names_of_attributes_are_refused_as_keys(name):
    spec = Composite(a=Unbounded((3,)))
    for change in (
        lambda: spec.set(name, Unbounded()),
        lambda: spec.set(("a2", name), Unbounded()),
        lambda: spec.update({name: Unbounded()}),
        lambda: Composite({name: Unbounded()}),
    ):
        with pytest.raises(ReservedNameError, match=name):
            change()
    assert issubclass(ReservedNameError, AttributeError) and list(spec.keys()) == ["a"]
