"""Composites as domains of TensorDicts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.specs import Binary, Bounded, Categorical, Composite, OneHot, StackedComposite, Unbounded
from gleanrl.errors import InvalidTypeError, MissingKeyError, SchemaError, SpecError
from tests.data.specs.cases import COMPOSITES


@pytest.fixture(params=COMPOSITES)
def spec(request):
    torch.manual_seed(0)
    return COMPOSITES[request.param]()


def test_drawn_values_are_in_the_domain(spec):
    for make in (spec.rand, spec.sample):
        for shape in ((), (3,), [2, 4]):
            value = make(shape)
            assert value.batch_size == (*shape, *spec.shape) and spec.is_in(value) and spec.contains(value)
            assert spec.project(value) is value and spec.type_check(value) is None
            spec.assert_is_in(value)
    assert spec.zero((2,)).batch_size == (2, *spec.shape) == spec.ones((2,)).batch_size
    first = spec.rand(generator=torch.Generator().manual_seed(3))
    assert bool((first == spec.rand(generator=torch.Generator().manual_seed(3))).all())


def test_copies_are_equal_and_independent(spec):
    for twin in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert twin == spec and repr(twin) == repr(spec)
        twin["added"] = Unbounded((*spec.shape, 1))
        assert twin != spec and "added" not in spec
    assert spec.to("cpu").device == torch.device("cpu") and spec.to("cpu").to("cpu") is not spec
    with pytest.raises(InvalidTypeError, match="dtype"):
        spec.to(torch.float32)


def test_there_and_back(spec):
    value = spec.rand()
    back = spec.encode(spec.to_numpy(value))
    assert back.batch_size == value.batch_size and spec.is_in(back)
    for one, other in [(back, value)] if spec.ndim == 0 else zip(back, value, strict=True):
        assert bool((one == other).all())


def test_nested_values():
    spec = COMPOSITES["nested"]()
    value = spec.rand((5,))
    assert value["a"].batch_size == (5, 2) and value["a", "c", "d"].shape == (5, 2, 3)
    assert set(value.keys(True, True)) == {("a", "b"), ("a", "c", "d"), "e"}
    assert spec.cardinality() == float("inf") and Composite(a=Categorical(3), b=Binary(2)).cardinality() == 12
    assert Composite(a=None).cardinality() == float("inf") and Composite().cardinality() == 1


def test_unspecified_entries_are_neither_drawn_nor_checked():
    spec = Composite(a=None, b=Categorical(2))
    assert set(spec.rand().keys()) == {"b"}
    assert spec.is_in(TensorDict({"b": torch.tensor(1)})) and spec.is_in(
        TensorDict({"b": torch.tensor(1), "a": 3})
    )
    assert spec.encode({"a": torch.ones(2), "b": 0})["a"].tolist() == [1, 1]
    assert spec.expand(3)["a"] is None and spec.clone() == spec == spec.empty().update(spec)
    assert spec.encode({"b": 1}).keys() == {"b"}


def test_faults_name_the_key():
    spec = COMPOSITES["nested"]()
    good = spec.rand()
    assert spec.is_in(good.clone().set("extra", torch.zeros(2)))
    for change, message in (
        (
            lambda d: d.set(("a", "c", "d"), torch.full((2, 3), 7.0)),
            r"'a': key 'c': key 'd': expected.*got 7.0",
        ),
        (lambda d: d.set("e", torch.zeros(2, 4)), "'e': expected Binary.*got dtype torch.float32"),
        (lambda d: d.set("e", torch.zeros(2, 5, dtype=torch.int8)), r"'e'.*got shape \(2, 5\)"),
        (lambda d: d.set("a", torch.zeros(2)), "'a': expected a TensorDict, got Tensor"),
        (lambda d: d.exclude("e"), r"missing keys \['e'\]"),
        (lambda d: d.exclude(("a", "b")), r"'a': missing keys \['b'\]"),
        (lambda d: d[0], r"batch size that ends with \(2,\), got \(\)"),
    ):
        bad = change(good.clone())
        assert not spec.is_in(bad)
        with pytest.raises(SpecError, match=message):
            spec.assert_is_in(bad)
    for bad in (None, {}, torch.zeros(2)):
        assert not spec.is_in(bad)


def test_projecting_changes_a_copy_and_only_what_is_outside():
    spec = COMPOSITES["nested"]()
    value = spec.rand((3,)).set("extra", torch.zeros(3, 2))
    value["a", "c", "d"] = value["a", "c", "d"] + 5
    before = value.clone()
    projected = spec.project(value)
    assert spec.is_in(projected) and bool((value == before).all()) and "extra" in projected.keys()
    assert projected["e"] is value["e"] and bool((projected["a", "c", "d"] == 1).all())
    with pytest.raises(SpecError, match=r"project: missing keys"):
        spec.project(value.exclude("e"))
    with pytest.raises(SpecError, match=r"key 'a'.*key 'c'.*key 'd'.*NaN"):
        value["a", "c", "d"] = torch.full((3, 2, 3), float("nan"))
        spec.project(value)


def test_encoding():
    spec = Composite(
        obs=Unbounded((3,)), action=OneHot(2), reward=Unbounded((1,)), info={"n": Categorical(4)}
    )
    given = {"obs": np.arange(3.0), "action": 1, "reward": 2.5, "info": {"n": np.int64(3)}}
    value = spec.encode(given)
    assert value["obs"].tolist() == [0, 1, 2] and value["action"].tolist() == [False, True]
    assert value["reward"].tolist() == [2.5] and value["info", "n"] == 3 and spec.is_in(value)
    many = spec.encode(
        {"obs": np.zeros((5, 3)), "action": [0] * 5, "reward": np.zeros((5, 1)), "info": {"n": [1] * 5}}
    )
    assert many.batch_size == (5,) and many["info"].batch_size == (5,)
    assert spec.is_in(spec.encode(value.set("action", torch.tensor(0))))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"a": 1}, MissingKeyError, "no key 'b'"),
        ({"a": 1, "b": 1, "c": 1}, SchemaError, r"unexpected keys \['c'\]"),
        ({"a": 7, "b": 1}, SpecError, "got 7"),
        ({"a": [1, 1], "b": 1}, SchemaError, r"key 'b': expected leading dimensions \(2,\)"),
        (5, InvalidTypeError, "expected a mapping"),
    ],
)
def test_bad_values_to_encode(given, error, message):
    with pytest.raises(error, match=message):
        Composite(a=Categorical(3), b=Categorical(3)).encode(given)


def test_to_numpy_checks_like_the_leaves():
    spec = Composite(a=Categorical(3), b=Bounded(0, 1))
    value = TensorDict({"a": torch.tensor(7), "b": torch.tensor(5.0)})
    with pytest.raises(SpecError, match="got 7"):
        spec.to_numpy(value)
    assert spec.to_numpy(value, safe=False) == {"a": 7, "b": 5}
    with pytest.raises(SpecError, match="got 5"):
        spec.to_numpy(value.set("a", torch.tensor(0)), safe=True)
    with pytest.raises(SchemaError, match="missing"):
        spec.to_numpy(TensorDict({"a": torch.tensor(0)}))


def test_type_check_names_the_key():
    spec = COMPOSITES["nested"]()
    with pytest.raises(
        InvalidTypeError, match=r"\('a', 'c', 'd'\) expected dtype torch.float32, got torch.int64"
    ):
        spec.type_check(spec.rand().set(("a", "c", "d"), torch.zeros(2, 3, dtype=torch.int64)))
    with pytest.raises(InvalidTypeError, match="'e'"):
        spec.type_check(torch.zeros(2, 4), "e")
    assert spec.type_check(torch.zeros(2, 4, dtype=torch.int8), "e") is None
    assert spec.type_check(TensorDict({}, [2])) is None


def test_a_device_moves_the_entries():
    spec = Composite(a=Unbounded(()), b={"c": Unbounded(())}, device="cpu")
    cpu = torch.device("cpu")
    assert spec["a"].device == spec["b"].device == spec["b", "c"].device == spec.rand().device == cpu
    spec["d", "e"] = Unbounded(())
    assert spec["d", "e"].device == cpu and spec.clone() == spec and "cpu" in repr(spec)
    assert Composite(a=Unbounded(())).rand().device is None and spec.empty().device == cpu


def test_equality_ignores_the_order_of_keys():
    a, b = Unbounded((2,)), Categorical(2)
    assert Composite(a=a, b=b) == Composite(b=b, a=a) != Composite(a=a)
    assert (
        Composite(a=a) != Composite(a=b) and Composite(a=a, shape=(2,)) != Composite(a=a) and Composite() != a
    )
    assert Composite({"a": a}, shape=2).shape == (2,) and Composite(Composite(a=a)) == Composite(a=a)


def test_nested_keys_and_bad_sources_in_the_constructor():
    assert Composite({("a", "b"): Unbounded((1,))})["a"] == Composite(b=Unbounded((1,)))
    with pytest.raises(InvalidTypeError, match="expected a mapping"):
        Composite([1])


def test_repr_shows_the_tree():
    assert repr(Composite(a={"b": Categorical(2)}, n=None)) == (
        "Composite(\n    a: Composite(\n        b: Categorical(n=2, shape=(), dtype=int64),\n"
        "        shape=()),\n"
        "    n: None,\n    shape=())"
    )


def test_what_a_subclass_overrides_is_called():
    class Sevens(Unbounded):
        def rand(self, shape=(), *, generator=None):
            return torch.full((*shape, *self.shape), 7.0)

        def project(self, value):
            return torch.full_like(value, 8.0)

    spec = Sevens((2,))
    assert type(spec) is Sevens and spec.sample().tolist() == [7, 7]
    assert Composite(x=spec).rand((1,))["x"].tolist() == [[7, 7]]
    assert StackedComposite(Composite(x=spec), Composite(x=Unbounded((2,)))).rand()[0]["x"].tolist() == [7, 7]
    outside = Composite(x=spec, y=Bounded(0, 1, ()))
    value = TensorDict(x=torch.zeros(2), y=torch.tensor(5.0))
    assert outside.project(value)["x"].tolist() == [8, 8]
