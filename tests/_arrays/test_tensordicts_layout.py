"""Builders read leaves in a fixed order and build batches around leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
)

from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.tensordicts import (
    Path,
    TensorDictBuilder,
    add_entries,
    as_key,
    dict_batch,
    group_sizes,
    shallow_copy,
)
from gleanrl.errors import SchemaError
from tests._arrays.test_tensordicts_tree import COLLECTIONS, PATHS, make


class TestRead:
    @pytest.mark.parametrize("kind", COLLECTIONS)
    def test_leaves_are_read_in_the_order_of_the_paths(self, kind: str) -> None:
        batch = COLLECTIONS[kind](make())
        paths = tuple(reversed(PATHS))
        leaves = TensorDictBuilder(paths).read(batch)
        assert all(torch.equal(leaf, batch.get(as_key(p))) for p, leaf in zip(paths, leaves, strict=True))

    @pytest.mark.parametrize("kind", COLLECTIONS)
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda b: b.exclude("a"), r"missing \['a'\];"),
            (lambda b: b.exclude(("b", "d", "e")), r"missing \[\('b', 'd', 'e'\)\];"),
            (lambda b: b.exclude("b"), r"missing \[\('b', 'c'\), \('b', 'd', 'e'\), \('b', 'g'\)\];"),
            (lambda b: b.set("z", b["a"]), r"unexpected \['z'\];"),
            (lambda b: b.set(("b", "z"), b["a"]), r"unexpected \[\('b', 'z'\)\];"),
            (lambda b: b.rename_key_("a", "z"), r"missing \['a'\] and unexpected \['z'\];"),
            (
                lambda b: b.exclude("a").set(("a", "x"), b["f"]),
                r"missing \['a'\] and unexpected \[\('a', 'x'\)\];",
            ),
            (lambda b: b.exclude("b").set("b", b["f"]), r"missing \[\('b', 'c'\).* and unexpected \['b'\];"),
            (lambda b: b.set(("next", "a"), b["a"]), r"unexpected \[\('next', 'a'\)\];"),
        ],
    )
    def test_differences_are_named(self, change: Any, message: str, kind: str) -> None:
        batch = change(make())
        if "b" in batch.keys() and isinstance(batch.get("b"), TensorDict) or kind != "group is lazy":
            batch = COLLECTIONS[kind](batch)
        with pytest.raises(SchemaError, match=f"extend: {message}.*the keys were fixed as") as caught:
            TensorDictBuilder(PATHS).read(batch, "extend")
        assert all(str(as_key(path)) in str(caught.value) for path in PATHS)

    def test_string_in_place_of_a_tensor_is_read_as_an_object(self) -> None:
        layout = TensorDictBuilder(PATHS)
        leaf = layout.read(make().set(("b", "c"), NonTensorData("x", [2])))[PATHS.index(("b", "c"))]
        assert isinstance(leaf, ObjectColumn), "schemas tell whether that may be"

    def test_empty_groups_are_ignored(self) -> None:
        batch = make()
        batch.set("empty", TensorDict({}, [2])).set(("b", "empty", "too"), TensorDict({}, [2]))
        leaves = TensorDictBuilder(PATHS).read(batch)
        assert all(leaf is batch.get(as_key(path)) for path, leaf in zip(PATHS, leaves, strict=True))

    def test_a_match_is_exact(self) -> None:
        layout, batch = TensorDictBuilder(PATHS), make()
        assert layout.match(batch) == [batch.get(path) for path in PATHS]
        assert layout.match(batch.exclude("a")) is None
        assert layout.match(batch.copy().set("more", torch.ones(2))) is None
        assert layout.match(batch.copy().set("a", "text")) is None


class TestBuild:
    def test_round_trip(self) -> None:
        layout = TensorDictBuilder(PATHS)
        batch = make(size=(2, 4))
        leaves = layout.read(batch)
        built = layout.build(leaves, torch.Size([2, 4]), torch.device("cpu"), [None, "time"])
        assert layout.read(built) == leaves, "no copies"
        assert type(built) is TensorDict and (built == batch).all()
        for part in (built, built["b"], built["b", "d"]):
            assert part.batch_size == (2, 4) and part.device == torch.device("cpu")
            assert part.names == [None, "time"] and not part.is_locked

    def test_levels_do_not_share_their_names(self) -> None:
        built = TensorDictBuilder(PATHS).build([torch.zeros(2)] * 5, torch.Size([2]), names=["time"])
        built["b"].names = ["other"]
        assert built.names == ["time"]

    def test_names_and_device_default_to_none(self) -> None:
        built = TensorDictBuilder(PATHS).build([torch.zeros(2)] * 5, torch.Size([2]))
        assert built.device is None and built.names == [None]

    def test_built_batch_supports_all_operations(self) -> None:
        leaves = [torch.full((2, 3), float(k)) for k in range(5)]
        built = TensorDictBuilder(PATHS).build(leaves, torch.Size([2]))
        expected = make()
        assert (built[0] == expected[0]).all() and (
            torch.stack([built, built]) == torch.stack([expected] * 2)
        ).all()
        assert built.set("z", torch.ones(2)).exclude("z").clone().keys() == expected.keys()
        with pytest.raises(RuntimeError):
            built.set("z", torch.ones(3))

    def test_dict_batch_wraps_entries_without_copies(self) -> None:
        inner, leaf = make(), torch.ones(2, 3)
        entries = {"x": leaf, "y": inner}
        built = dict_batch(entries, torch.Size([2]))
        assert (
            built["x"] is leaf and built["y"] is inner and built.batch_size == (2,) and built.device is None
        )
        built["z"] = leaf
        assert "z" not in entries

    @pytest.mark.parametrize("device", [None, torch.device("cpu")])
    def test_dict_batch_sets_the_containers_attributes(self, device: Any) -> None:
        size, names = torch.Size([2, 3]), [None, "time"]
        ours = dict_batch({"x": torch.ones(2, 3)}, size, device, names)
        theirs: Any = TensorDict._new_unsafe({}, batch_size=size, device=device, names=names, nested=False)
        found = {
            name: value for name, value in vars(theirs).items() if name != "_has_mps_val"
        }  # cached on demand
        assert vars(ours) == {**found, "_tensordict": vars(ours)["_tensordict"]}
        assert ours.names == names and not ours.is_locked and ours.clone().device == device


class TestLayout:
    def test_equality_ignores_the_order(self) -> None:
        assert TensorDictBuilder(PATHS) == TensorDictBuilder(reversed(PATHS)) and hash(
            TensorDictBuilder(PATHS)
        ) == hash(TensorDictBuilder(reversed(PATHS)))
        assert TensorDictBuilder(PATHS) != TensorDictBuilder(PATHS[1:]) and TensorDictBuilder(PATHS) != PATHS
        assert "('b', 'd', 'e')" in repr(TensorDictBuilder(PATHS))

    @pytest.mark.parametrize(
        "paths",
        [
            [("a",), ("a",)],
            [("a",), ("a", "b")],
            [("a", "b"), ("a",)],
            [("x", "a", "b"), ("x", "a")],
            [("x", "a"), ("y",), ("x", "a")],
        ],
    )
    def test_nested_or_repeated_paths_are_refused(self, paths: list[Path]) -> None:
        with pytest.raises(SchemaError, match="expected each key once"):
            TensorDictBuilder(paths)

    def test_builder_without_paths_reads_and_builds_nothing(self) -> None:
        layout = TensorDictBuilder([])
        assert layout.read(TensorDict({}, [2])) == [] and layout.build([], torch.Size([2])).is_empty()


names = st.sampled_from("abc")
trees = st.recursive(
    st.none(), lambda below: st.dictionaries(names, below, min_size=1, max_size=3), max_leaves=6
)


@given(first=trees, second=trees)
def test_reading_succeeds_on_equal_key_sets_only(first: Any, second: Any) -> None:
    def paths(tree: Any, prefix: Path = ()) -> list[Path]:
        if tree is None:
            return [prefix] if prefix else []
        return [path for key, below in tree.items() for path in paths(below, (*prefix, key))]

    layout, batch = TensorDictBuilder(paths(first)), make(paths(second))
    if set(paths(first)) == set(paths(second)):
        leaves = layout.read(batch)
        assert all(leaf is batch.get(as_key(p)) for p, leaf in zip(layout.paths, leaves, strict=True))
    else:
        with pytest.raises(SchemaError):
            layout.read(batch)


def test_groups_may_have_longer_batch_sizes():
    sizes = {("a",): (3,), ("a", "b"): (3, 2), ("c",): ()}
    layout = TensorDictBuilder([("x",), ("a", "y"), ("a", "b", "z"), ("c", "w")], sizes)
    leaves = [torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 3, 2), torch.zeros(4)]
    batch = layout.build(leaves, torch.Size([4]), names=["time"])
    assert group_sizes(batch, 1) == {("a",): (3,), ("a", "b"): (3, 2)} == layout.groups
    assert batch["a", "b"].names == ["time", None, None] and batch["c"].batch_size == (4,)
    assert layout == TensorDictBuilder(layout.paths) and layout.read(batch) == leaves


def test_group_has_at_least_its_parents_batch_size():
    layout = TensorDictBuilder([("a", "b", "z")], {("a",): (3,), ("a", "b"): ()})
    batch = layout.build([torch.zeros(4, 3)], torch.Size([4]))
    assert batch["a"].batch_size == batch["a", "b"].batch_size == (4, 3)


class TestAddEntries:
    def test_entries_are_added_at_every_level(self) -> None:
        batch = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, [3])
        weight, flag = torch.rand(3), torch.ones(3, 1, dtype=torch.bool)
        add_entries(batch, {"w": weight, ("b", "d"): flag, ("new", "deep", "e"): flag, "a": weight}, 3)
        assert batch["w"] is weight and torch.equal(batch["a"], weight)
        assert batch["b", "d"] is flag and batch["new", "deep", "e"] is flag
        assert set(batch.keys(True, True)) == {"a", "w", ("b", "c"), ("b", "d"), ("new", "deep", "e")}
        assert batch["new"].batch_size == batch["new", "deep"].batch_size == (3,)

    def test_key_of_a_str_subclass_is_one_key(self) -> None:
        class Name(str):
            """A subclass of str, for example a member of an enumeration."""

        batch = TensorDict({"a": {"c": torch.zeros(3)}}, [3])
        add_entries(batch, {Name("ab"): torch.ones(3)}, 3)
        assert set(batch.keys(True, True)) == {("a", "c"), "ab"}

    def test_group_replaces_a_leaf(self) -> None:
        batch = TensorDict({"b": torch.zeros(3)}, [3])
        add_entries(batch, {("b", "c"): torch.ones(3)}, 3)
        assert set(batch.keys(True, True)) == {("b", "c")}

    @pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2, 5)], ids=str)
    def test_values_of_rows_are_repeated_over_further_dimensions(self, shape: tuple[int, ...]) -> None:
        batch, value = TensorDict({"a": torch.zeros(3, 4)}, [3, 4]), torch.rand(shape)
        add_entries(batch, {"w": value, ("deep", "w"): value}, 3)
        for found in (batch["w"], batch["deep", "w"]):
            assert found.shape == (3, 4, *shape[1:])
            assert all(torch.equal(found[:, i], value) for i in range(4))

    def test_values_of_the_whole_shape_stay(self) -> None:
        batch, value = TensorDict({"a": torch.zeros(3, 4)}, [3, 4]), torch.rand(3, 4, 1)
        add_entries(batch, {"w": value}, 3)
        assert torch.equal(batch["w"], value)

    def test_values_go_to_the_device_of_the_batch(self) -> None:
        batch = TensorDict({"a": torch.zeros(3, device="meta")}, [3], device="meta")
        add_entries(batch, {"w": torch.ones(3), ("deep", "w"): torch.ones(3)}, 3)
        assert batch["w"].device.type == batch["deep", "w"].device.type == "meta"

    @pytest.mark.parametrize(
        "batch", [TensorDict({}, [2]), TensorDict({}, []), torch.zeros(3), [1, 2, 3], None], ids=repr
    )
    def test_batch_of_other_rows_is_refused(self, batch: Any) -> None:
        with pytest.raises(SchemaError, match="'w'.* can't be added .* expected a TensorDict of 3 rows"):
            add_entries(batch, {"w": torch.ones(3)}, 3)


class TestShallowCopy:
    def test_entries_are_shared_and_groups_are_new(self) -> None:
        batch = TensorDict({"x": torch.zeros(2, 3), "group": {"y": torch.ones(2)}}, [2], names=["time"])
        batch["words"] = NonTensorData("word", batch_size=[2])
        found = shallow_copy(batch.lock_())
        assert found["x"] is batch["x"] and found["group", "y"] is batch["group", "y"]
        assert found.names == ["time"] and found["words"] == "word" and not found.is_locked
        found["group", "z"] = torch.zeros(2)
        found["w"] = torch.zeros(2)
        assert set(batch.keys(True, True)) == {"x", ("group", "y")}  # the keys of tensors only

    def test_other_collections_use_their_own_copy(self) -> None:
        stack = LazyStackedTensorDict(TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(3)}))
        found = shallow_copy(stack)
        assert type(found) is LazyStackedTensorDict and found is not stack
        assert found[1]["x"] is stack[1]["x"]
