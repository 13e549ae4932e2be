"""Composites are domains of TensorDicts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from gleanrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    NonTensor,
    OneHot,
    StackedComposite,
    Unbounded,
)
from gleanrl.data.specs.choices import CategoricalBox
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    SpecError,
    UnsupportedError,
)
from tests.data.specs.cases import COMPOSITES, bools


@tensorclass
class Data:
    a: torch.Tensor


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


def test_project_replaces_only_values_outside_the_domain():
    spec = COMPOSITES["nested"]()
    value = spec.rand((3,)).set("extra", torch.zeros(3, 2))
    value["a", "c", "d"] = value["a", "c", "d"] + 5
    inner, kept, outside = value["a"], value["e"], value["a", "c", "d"]
    projected = spec.project(value)
    assert projected is value and spec.is_in(value) and "extra" in value.keys() and value["a"] is inner
    assert value["e"] is kept and bool((value["a", "c", "d"] == 1).all()) and not bool((outside == 1).any())
    plain = {"b": torch.full((2,), 9.0)}
    assert Composite(b=Bounded(0, 1, (2,))).project(plain) is plain and plain["b"].tolist() == [1, 1]
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


def test_notebooks_show_each_leaf_in_a_row_and_escape_keys():
    spec = Composite({"a": Composite({"<b>": Categorical(2)}), "c": Unbounded((3,)), "n": None})
    html = spec._repr_html_()
    assert html.count("<tr>") == 4 and "<b>" not in html and "(&#x27;a&#x27;, &#x27;&lt;b&gt;&#x27;)" in html
    assert Categorical(2)._repr_html_().count("<tr>") == 2 and Composite()._repr_html_().count("<tr>") == 1


def test_repr_shows_the_tree():
    assert repr(Composite(a={"b": Categorical(2)}, n=None)) == (
        "Composite(\n    a: Composite(\n        b: Categorical(n=2, shape=(), dtype=int64),\n"
        "        shape=()),\n"
        "    n: None,\n    shape=())"
    )


def test_overridden_methods_of_entries_are_called():
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


def test_another_shape():
    spec = Composite(a=Unbounded((2, 3)), b={"c": Unbounded((2, 3))}, d=None)
    spec.shape = (2,)
    assert spec.shape == spec.batch_size == spec["b"].shape == (2,) and spec.zero()["b"].batch_size == (2,)
    for shape in ((3,), (2, 3, 1)):
        with pytest.raises(InvalidArgumentError, match="starts with"):
            spec.shape = shape
        assert spec.shape == (2,) == spec["b"].shape
    with pytest.raises(UnsupportedError, match="locked"):
        spec.lock_().shape = ()


def test_a_nested_composite_takes_the_dimensions_that_its_leaves_have():
    inner = Composite(b=Unbounded((2, 3)))
    assert Composite(a=inner, shape=(2,))["a"].shape == (2,) and inner.shape == ()
    with pytest.raises(InvalidArgumentError, match="starts with"):
        Composite(a=inner, shape=(3,))


def test_another_dtype_for_all_entries():
    spec = Composite(a=Unbounded(3), b={"c": Categorical(3)}, d=NonTensor(()), e=None).to(torch.float64)
    assert spec["a"].dtype == spec["b", "c"].dtype == torch.float64 and spec["e"] is None


def test_forgetting_the_device():
    spec = Composite(a=Unbounded(3), b={"c": Unbounded(3)}, device="cpu")
    assert spec.clear_device_() is spec and spec.device is spec["b"].device is None
    assert spec["a"].device == torch.device("cpu")


def test_all_combinations():
    spec = Composite(a=Categorical(2), b={"c": Categorical(3, mask=bools("110"))})
    value = spec.enumerate()
    assert value.batch_size == (6,) == (spec.cardinality(),) and spec.keys(True, True) >= set(
        value.keys(True, True)
    )
    assert value["a"].tolist() == [0, 0, 0, 1, 1, 1] and value["b", "c"].tolist() == [0, 1, 2, 0, 1, 2]
    assert len(spec.enumerate(use_mask=True)) == 4 == len(spec.set("d", None).enumerate(use_mask=True))
    assert Composite(a=Categorical(2, (3,)), shape=(3,)).enumerate().batch_size == (2, 3)
    with pytest.raises(UnsupportedError, match="infinitely many"):
        Composite(a=Unbounded()).enumerate()


def test_values_of_a_class():
    spec = Composite(a=Unbounded((2, 3)), data_cls=Data, shape=(2,))
    for made in (spec.rand(), spec.clone().zero((4,)), spec[0].one(), spec.encode({"a": np.zeros((2, 3))})):
        assert type(made) is Data and made.a.shape[-1] == 3
    assert spec.is_in(spec.rand()) and not spec.is_in(TensorDict({"a": torch.zeros(2, 3)}, [2]))
    assert Composite(a=Unbounded((2, 3)), shape=(2,)).is_in(spec.rand()) and spec != Composite(
        a=Unbounded((2, 3)), shape=(2,)
    )
    assert spec.empty().data_cls is Data and type(Composite(x=spec).zero()["x"]) is Data


def test_plain_dictionaries_are_values_too():
    spec = Composite(a=Bounded(0, 1, (3,)), b={"c": Categorical(3)})
    assert spec.is_in({"a": torch.zeros(3), "b": {"c": torch.tensor(2)}})
    assert not spec.is_in({"a": torch.ones(3) * 3, "b": {"c": torch.tensor(2)}}) and not spec.is_in({"a": 1})


def test_updating_a_value():
    spec = Composite(a=Unbounded(3), b={"c": Unbounded(2)})
    value = TensorDict({"a": torch.ones(4, 3), "b": {"d": torch.ones(4)}}, [4])
    assert spec.zeros_update(value) is value and not value["a"].any() and value["b", "c"].shape == (4, 2)
    assert spec.ones_update(value)["b", "c"].all() and value["b", "d"].all()
    assert spec.rand_update(value)["a"].unique().numel() == 12


def test_a_failed_projection_changes_nothing():
    spec = Composite(a={"b": Bounded(0, 1, ())}, c=Bounded(0, 1, ()))
    value = TensorDict({"a": {"b": 5.0}, "c": float("nan")})
    with pytest.raises(SpecError, match="NaN"):
        spec.project(value)
    assert value["a", "b"] == 5


def test_the_batch_may_have_any_size():
    spec = Composite(a=Unbounded((-1, 3)), shape=(-1,))
    assert spec.rand((2,)).batch_size == (2, 1) and spec.is_in(TensorDict({"a": torch.zeros(4, 3)}, [4]))
    assert spec.unsqueeze(0)["a"].shape == (1, -1, 3)


def test_the_number_of_choices_of_an_action():
    for leaf in (OneHot(4), Categorical(4)):
        assert Composite(action=leaf)["action"].space.n == leaf.space.n == 4 and isinstance(
            leaf.space, CategoricalBox
        )


def test_the_shape_goes_by_two_names():
    assert Composite(a=Unbounded((2, 3)), batch_size=(2,)) == Composite(a=Unbounded((2, 3)), shape=(2,))


def test_composites_with_step_mdp_static_differ_from_plain_ones():
    assert Composite(step_mdp_static=True) != Composite()
