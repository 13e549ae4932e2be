"""Builders read and build nested batches as TensorDict's public methods do, and report what differs in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    tensorclass,
)

from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.tensordicts import (
    Path,
    as_key,
    as_path,
    check_uniform,
    flatten,
    is_private,
    iter_leaves,
    outermost,
    put_leaf,
)
from gleanrl.errors import SchemaError

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
    """A tensorclass of one tensor."""

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
    def test_keys_and_paths_convert(self, key: Any, path: Path, spelling: Any) -> None:
        assert as_path(key) == path and as_key(path) == spelling

    @pytest.mark.parametrize("key", [3, (), None, ["a"], ("a", 3)])
    def test_values_other_than_keys_raise(self, key: Any) -> None:
        with pytest.raises(SchemaError, match="a string or a tuple of strings"):
            as_path(key)

    @pytest.mark.parametrize(
        ("path", "private"), [(("a",), False), (("_a",), True), (("a", "_b"), True), (("a_", "b_"), False)]
    )
    def test_leading_underscores_are_private(self, path: Path, private: bool) -> None:
        assert is_private(path) is private


class TestLeaves:
    def test_leaves_are_ordered_depth_first_by_insertion(self) -> None:
        batch = make()
        assert [path for path, _ in iter_leaves(batch)] == [PATHS[0], PATHS[1], PATHS[2], PATHS[4], PATHS[3]]
        assert all(leaf is batch.get(as_key(path)) for path, leaf in flatten(batch).items())
        assert flatten(TensorDict({"empty": TensorDict({}, [])}, [])) == {}

    def test_other_collections_are_flattened(self) -> None:
        lazy = LazyStackedTensorDict.lazy_stack([make(), make()], 0)
        assert {path: leaf.shape for path, leaf in iter_leaves(lazy)} == dict.fromkeys(PATHS, (2, 2, 3))
        assert list(flatten(TensorDict({"r": Record(a=torch.ones(2), batch_size=[2])}, [2]))) == [("r", "a")]

    @pytest.mark.parametrize("value", [NonTensorData("x", [2]), NonTensorStack("x", "y")])
    @pytest.mark.parametrize("key", ["text", ("b", "text")])
    def test_strings_become_object_columns(self, value: Any, key: Any) -> None:
        leaf = flatten(make().set(key, value))[as_path(key)]
        assert isinstance(leaf, ObjectColumn) and leaf.items() == (
            ["x", "x"] if type(value) is NonTensorData else ["x", "y"]
        )


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


def test_outermost_drops_nested_groups() -> None:
    assert outermost([("a",), (), ("a", "b")]) == [()]
    assert outermost([("a", "b"), ("c",), ("a", "d"), ("c", "e"), ("c",)]) == [("a", "b"), ("c",), ("a", "d")]
    assert outermost([]) == []


class TestPutLeaf:
    def test_leaves_are_put_at_every_level(self) -> None:
        batch = TensorDict({"a": torch.zeros(2), "group": {}}, [2])
        for path in (("a",), ("group", "b"), ("new", "c")):
            put_leaf(batch, path, value := torch.ones(2))
            assert batch.get(path) is value
        assert batch.get("new").batch_size == batch.batch_size

    def test_non_tensors_are_put(self) -> None:
        batch = TensorDict({}, [2])
        put_leaf(batch, ("text",), "left")
        put_leaf(batch, ("group",), {"a": torch.ones(2)})
        assert batch["text"] == "left" and batch["group", "a"].sum() == 2

    def test_leaves_are_put_into_a_lazy_stack(self) -> None:
        batch = lazy_stack([TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(3)})])
        put_leaf(batch, ("a",), torch.ones(2, 3))
        assert all(part["a"].sum() == 3 for part in batch.tensordicts)

    def test_checks_of_the_container_apply(self) -> None:
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            put_leaf(TensorDict({}, [2]), ("a",), torch.ones(3))
        with pytest.raises(RuntimeError, match="locked"):
            put_leaf(TensorDict({}, [2]).lock_(), ("a",), torch.ones(2))
        batch = TensorDict({}, [2], device="meta")
        put_leaf(batch, ("a",), torch.ones(2))
        assert batch["a"].is_meta


def test_lazy_stacks_of_different_parts_are_refused():
    parts = [TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(2), "y": torch.zeros(1)})]
    with pytest.raises(SchemaError, match=r"extend: .* part 1 differs from the first one in \['y'\]"):
        check_uniform(lazy_stack(parts), "extend")
    check_uniform(lazy_stack([parts[0], TensorDict({"x": torch.zeros(3)})]), "extend")
    check_uniform(lazy_stack([parts[0], parts[0]]), "extend")
    check_uniform(parts[0], "extend")
