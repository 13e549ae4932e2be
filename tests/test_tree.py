"""Layouts read and build nested batches as the public interface does, and say what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    tensorclass,
)

from gleanrl.errors import SchemaError
from gleanrl.tree import (
    Layout,
    Path,
    add_entries,
    as_key,
    as_path,
    check_uniform,
    dict_batch,
    flatten,
    group_sizes,
    is_private,
    iter_leaves,
    outermost,
)

PATHS: tuple[Path, ...] = (("a",), ("b", "c"), ("b", "d", "e"), ("f",), ("b", "g"))


def make(
    paths: Any = PATHS, size: tuple[int, ...] = (2,), nested_size: tuple[int, ...] | None = None
) -> TensorDict:
    """Return a batch with a leaf ``[*size, 3]`` at each path; groups may have a longer batch size."""
    out = TensorDict({}, size)
    for number, path in enumerate(paths):
        for end in range(1, len(path)):
            if as_key(path[:end]) not in out.keys(True):
                out.set(as_key(path[:end]), TensorDict({}, nested_size or size))
        out.set(as_key(path), torch.full((*size, 3), float(number)))
    return out


@tensorclass
class Record:
    """A tensorclass."""

    a: torch.Tensor


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "path", "spelling"),
        [
            ("a", ("a",), "a"),
            (("a",), ("a",), "a"),
            (("a", "b"), ("a", "b"), ("a", "b")),
            ((("a", "b"), "c"), ("a", "b", "c"), ("a", "b", "c")),
            ((("a", ("b",)), "c"), ("a", "b", "c"), ("a", "b", "c")),
        ],
    )
    def test_paths(self, key: Any, path: Path, spelling: Any) -> None:
        assert as_path(key) == path and as_key(path) == spelling

    @pytest.mark.parametrize("key", [3, (), None, ["a"], ("a", 3)])
    def test_no_key(self, key: Any) -> None:
        with pytest.raises(SchemaError, match="a string or a tuple of strings"):
            as_path(key)

    @pytest.mark.parametrize(
        ("path", "private"), [(("a",), False), (("_a",), True), (("a", "_b"), True), (("a_", "b_"), False)]
    )
    def test_private(self, path: Path, private: bool) -> None:
        assert is_private(path) is private


class TestLeaves:
    def test_depth_first_in_order_of_insertion(self) -> None:
        batch = make()
        assert [path for path, _ in iter_leaves(batch)] == [PATHS[0], PATHS[1], PATHS[2], PATHS[4], PATHS[3]]
        assert all(leaf is batch.get(as_key(path)) for path, leaf in flatten(batch).items())
        assert flatten(TensorDict({"empty": TensorDict({}, [])}, [])) == {}

    def test_other_collections(self) -> None:
        lazy = LazyStackedTensorDict.lazy_stack([make(), make()], 0)
        assert {path: leaf.shape for path, leaf in iter_leaves(lazy)} == dict.fromkeys(PATHS, (2, 2, 3))
        assert list(flatten(TensorDict({"r": Record(a=torch.ones(2), batch_size=[2])}, [2]))) == [("r", "a")]

    @pytest.mark.parametrize("value", [NonTensorData("x", [2]), NonTensorStack("x", "y")])
    @pytest.mark.parametrize("key", ["text", ("b", "text")])
    def test_strings_are_refused_by_name(self, value: Any, key: Any) -> None:
        with pytest.raises(SchemaError, match=r"text.*holds NonTensor\w+, not a tensor"):
            flatten(make().set(key, value))


def lazy(batch: TensorDict) -> TensorDictBase:
    return LazyStackedTensorDict.lazy_stack(list(batch.unbind(0)), 0)


COLLECTIONS: dict[str, Callable[[TensorDict], Any]] = {
    "plain": lambda batch: batch,
    "locked": lambda batch: batch.lock_(),
    "lazy": lazy,
    "memory-mapped": lambda batch: batch.memmap(),
    "group is lazy": lambda batch: batch.set("b", lazy(batch["b"])),
    "view": lambda batch: batch.unsqueeze(0).squeeze(0),
}


class TestRead:
    @pytest.mark.parametrize("kind", COLLECTIONS)
    def test_the_order_is_that_of_the_paths(self, kind: str) -> None:
        batch = COLLECTIONS[kind](make())
        paths = tuple(reversed(PATHS))
        leaves = Layout(paths).read(batch)
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
            Layout(PATHS).read(batch, "extend")
        assert all(str(as_key(path)) in str(caught.value) for path in PATHS)

    def test_a_string_where_a_tensor_was(self) -> None:
        for key in ("a", ("b", "c")):
            with pytest.raises(SchemaError, match="NonTensorData, not a tensor"):
                Layout(PATHS).read(make().set(key, NonTensorData("x", [2])))

    def test_groups_without_leaves_are_no_difference(self) -> None:
        batch = make()
        batch.set("empty", TensorDict({}, [2])).set(("b", "empty", "too"), TensorDict({}, [2]))
        leaves = Layout(PATHS).read(batch)
        assert all(leaf is batch.get(as_key(path)) for path, leaf in zip(PATHS, leaves, strict=True))


class TestBuild:
    def test_round_trip(self) -> None:
        layout = Layout(PATHS)
        batch = make(size=(2, 4))
        leaves = layout.read(batch)
        built = layout.build(leaves, torch.Size([2, 4]), torch.device("cpu"), [None, "time"])
        assert layout.read(built) == leaves, "no copies"
        assert type(built) is TensorDict and (built == batch).all()
        for part in (built, built["b"], built["b", "d"]):
            assert part.batch_size == (2, 4) and part.device == torch.device("cpu")
            assert part.names == [None, "time"] and not part.is_locked

    def test_levels_do_not_share_their_names(self) -> None:
        built = Layout(PATHS).build([torch.zeros(2)] * 5, torch.Size([2]), names=["time"])
        built["b"].names = ["other"]
        assert built.names == ["time"]

    def test_without_names_and_device(self) -> None:
        built = Layout(PATHS).build([torch.zeros(2)] * 5, torch.Size([2]))
        assert built.device is None and built.names == [None]

    def test_a_built_batch_is_a_batch_like_any_other(self) -> None:
        leaves = [torch.full((2, 3), float(k)) for k in range(5)]
        built = Layout(PATHS).build(leaves, torch.Size([2]))
        expected = make()
        assert (built[0] == expected[0]).all() and (
            torch.stack([built, built]) == torch.stack([expected] * 2)
        ).all()
        assert built.set("z", torch.ones(2)).exclude("z").clone().keys() == expected.keys()
        with pytest.raises(RuntimeError):
            built.set("z", torch.ones(3))

    def test_dict_batch(self) -> None:
        inner, leaf = make(), torch.ones(2, 3)
        entries = {"x": leaf, "y": inner}
        built = dict_batch(entries, torch.Size([2]))
        assert (
            built["x"] is leaf and built["y"] is inner and built.batch_size == (2,) and built.device is None
        )
        built["z"] = leaf
        assert "z" not in entries


class TestLayout:
    def test_equality_ignores_the_order(self) -> None:
        assert Layout(PATHS) == Layout(reversed(PATHS)) and hash(Layout(PATHS)) == hash(
            Layout(reversed(PATHS))
        )
        assert Layout(PATHS) != Layout(PATHS[1:]) and Layout(PATHS) != PATHS
        assert "('b', 'd', 'e')" in repr(Layout(PATHS))

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
    def test_paths_in_each_others_way(self, paths: list[Path]) -> None:
        with pytest.raises(SchemaError, match="stands twice"):
            Layout(paths)

    def test_nothing(self) -> None:
        layout = Layout([])
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

    layout, batch = Layout(paths(first)), make(paths(second))
    if set(paths(first)) == set(paths(second)):
        leaves = layout.read(batch)
        assert all(leaf is batch.get(as_key(p)) for p, leaf in zip(layout.paths, leaves, strict=True))
    else:
        with pytest.raises(SchemaError):
            layout.read(batch)


def test_the_outermost_groups() -> None:
    assert outermost([("a",), (), ("a", "b")]) == [()]
    assert outermost([("a", "b"), ("c",), ("a", "d"), ("c", "e"), ("c",)]) == [("a", "b"), ("c",), ("a", "d")]
    assert outermost([]) == []


class TestAddEntries:
    def test_entries_stand_beside_and_below_others(self) -> None:
        batch = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, [3])
        weight, flag = torch.rand(3), torch.ones(3, 1, dtype=torch.bool)
        add_entries(batch, {"w": weight, ("b", "d"): flag, ("new", "deep", "e"): flag, "a": weight}, 3)
        assert batch["w"] is weight and torch.equal(batch["a"], weight)
        assert batch["b", "d"] is flag and batch["new", "deep", "e"] is flag
        assert set(batch.keys(True, True)) == {"a", "w", ("b", "c"), ("b", "d"), ("new", "deep", "e")}
        assert batch["new"].batch_size == batch["new", "deep"].batch_size == (3,)

    def test_a_group_that_was_a_leaf(self) -> None:
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
    def test_what_holds_other_rows(self, batch: Any) -> None:
        with pytest.raises(SchemaError, match="'w'.* can't be added .* expected a TensorDict of 3 rows"):
            add_entries(batch, {"w": torch.ones(3)}, 3)


def test_lazy_stacks_of_unlike_parts_are_refused():
    parts = [TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(2), "y": torch.zeros(1)})]
    with pytest.raises(SchemaError, match=r"extend: .* part 1 differs from the first one in \['y'\]"):
        check_uniform(lazy_stack(parts), "extend")
    with pytest.raises(SchemaError, match=r"\['x'\]"):
        check_uniform(lazy_stack([parts[0], TensorDict({"x": torch.zeros(3)})]), "extend")
    check_uniform(lazy_stack([parts[0], parts[0]]), "extend")
    check_uniform(parts[0], "extend")


def test_groups_have_batch_sizes_of_their_own():
    sizes = {("a",): (3,), ("a", "b"): (3, 2), ("c",): ()}
    layout = Layout([("x",), ("a", "y"), ("a", "b", "z"), ("c", "w")], sizes)
    leaves = [torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 3, 2), torch.zeros(4)]
    batch = layout.build(leaves, torch.Size([4]), names=["time"])
    assert group_sizes(batch, 1) == {("a",): (3,), ("a", "b"): (3, 2)} == layout.groups
    assert batch["a", "b"].names == ["time", None, None] and batch["c"].batch_size == (4,)
    assert layout == Layout(layout.paths) and layout.read(batch) == leaves


def test_a_group_has_at_least_the_batch_size_of_the_one_around_it():
    layout = Layout([("a", "b", "z")], {("a",): (3,), ("a", "b"): ()})
    batch = layout.build([torch.zeros(4, 3)], torch.Size([4]))
    assert batch["a"].batch_size == batch["a", "b"].batch_size == (4, 3)
