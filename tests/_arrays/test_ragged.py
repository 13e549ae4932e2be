"""Object columns hold values of any shape and type."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from gleanrl._arrays.ragged import (
    ObjectColumn,
    as_entry,
    as_leaf,
    cat_leaves,
    lazy_leaf,
    non_tensors,
    stack_leaves,
)
from gleanrl._arrays.tensordicts import TensorDictBuilder, flatten, record_of
from gleanrl.errors import SchemaError

AWKWARD: list[Any] = [
    [1, 2],
    "a",
    np.arange(3),
    torch.arange(2),
    {"x": 1},
    None,
    (),
    ["a", ["b"]],
    "",
    (1, 2),
]
"""Values that NumPy would unpack, broadcast or convert when it builds an array of them."""


def ragged(*sizes: int) -> ObjectColumn:
    return ObjectColumn.of([torch.full((size, 3), float(size)) for size in sizes], None, torch.empty(0, 0))


class TestObjects:
    def test_objects_are_kept_by_identity(self) -> None:
        objects = ObjectColumn.of(AWKWARD, (2, 5))
        assert objects.shape == (2, 5) and objects.ndim == 2 and objects.numel() == 10
        assert all(found is given for found, given in zip(objects.items(), AWKWARD, strict=True))
        assert objects[0, 1].items() == ["a"] and objects[:, 1].shape == (2,) and objects[1, 0].shape == ()
        assert [row.items() for row in objects] == [row.items() for row in objects.unbind(0)]
        assert all(
            a is b for a, b in zip(objects.unbind(1)[3].items(), (AWKWARD[3], AWKWARD[8]), strict=True)
        )

    @pytest.mark.parametrize("item", AWKWARD, ids=str)
    def test_writes_replace_whole_rows(self, item: Any) -> None:
        column = ObjectColumn.blanks((2, 3))
        column.movedim(1, 0)[2][:1].copy_(ObjectColumn.of([item]))
        column[1, 1].copy_(ObjectColumn.of([item], ()))
        assert column[0, 2].items()[0] is item and column[1, 1].items()[0] is item
        assert sum(entry is None for entry in column.items()) == (6 if item is None else 4)
        with pytest.raises(SchemaError, match=r"shape \(2, 3\), got \(1,\)"):
            column.copy_(ObjectColumn.of([item]))

    def test_views_share_and_copies_do_not(self) -> None:
        column = ObjectColumn.of([*"abcdef"], (2, 3))
        view, copied = column.narrow(1, 1, 2), column.clone()
        column[0, 1].copy_(ObjectColumn.of(["new"], ()))
        assert view.items() == ["new", "c", "e", "f"] and copied.items() == [*"abcdef"]
        assert column.transpose(0, 1).shape == (3, 2) and column.unsqueeze(0).shape == (1, 2, 3)
        assert column.reshape(6).take(torch.tensor([5, 6, 0]), pad=True).items() == ["f", None, "a"]
        assert column.where(torch.tensor([[True], [False]]), copied).items() == ["a", "new", "c", *"def"]

    def test_rows_are_selected_by_a_mask(self) -> None:
        objects = ObjectColumn.of(["a", "b", "c"])
        assert objects[torch.tensor([True, False, True])].items() == ["a", "c"]
        assert objects[np.array([2, 0])].items() == ["c", "a"]

    def test_tensors_are_copied(self) -> None:
        source = torch.arange(6.0).view(2, 3)
        objects = ObjectColumn.blanks((2,), torch.empty(0)).copy_(source)
        source.zero_()
        assert [item.tolist() for item in objects.items()] == [[0, 1, 2], [3, 4, 5]]
        again = objects.clone()
        objects.items()[0].zero_()
        assert again.items()[0].tolist() == [0, 1, 2] and again.field_shape == (3,)
        assert (
            ragged(2, 4).field_shape == (-1, 3)
            and not ragged(2).equal(ragged(3))
            and ragged(2).equal(ragged(2))
        )
        padded = ragged(2, 4).take(torch.tensor([2, 1]), pad=True).items()
        assert [item.shape for item in padded] == [(0, 0), (4, 3)]

    def test_equal_shaped_tensors_become_one_tensor(self) -> None:
        rows = torch.arange(12.0).reshape(2, 3, 2, 1)
        assert torch.equal(as_entry(ObjectColumn.rows_of(rows, (2, 3))), rows)
        with pytest.raises(SchemaError, match="different shapes"):
            as_entry(ragged(2, 3))

    def test_objects_survive_pickling(self) -> None:
        objects = pickle.loads(pickle.dumps(ragged(1, 2)))
        assert objects.equal(ragged(1, 2)) and objects.blank is not None


class TestTensorDicts:
    @pytest.mark.parametrize("shape", [(10,), (2, 5), (5, 2, 1), (0,), (2, 0)])
    def test_non_tensor_data_round_trip(self, shape: tuple[int, ...]) -> None:
        objects = ObjectColumn.of(AWKWARD[: torch.Size(shape).numel()], shape)
        entry = objects.wrapped()
        assert entry.batch_size == shape and non_tensors(entry).shape == shape
        assert all(a is b for a, b in zip(non_tensors(entry).items(), objects.items(), strict=True))
        batch = TensorDict({"text": entry}, shape)
        assert as_leaf(batch.get("text")).shape == shape

    def test_single_value_is_expanded_to_all_rows(self) -> None:
        assert non_tensors(NonTensorData("x", batch_size=[2, 2])).items() == ["x"] * 4
        assert as_entry(ObjectColumn.of(["x"], ())).data == "x"
        assert as_entry(torch.ones(1)) is not None and as_leaf(torch.ones(1)).shape == (1,)
        stacked = NonTensorStack(NonTensorData("a", batch_size=[2]), NonTensorStack("b", "c"), stack_dim=1)
        assert non_tensors(stacked).array.tolist() == [["a", "b"], ["a", "c"]]

    @pytest.mark.parametrize("dim", [0, 1])
    def test_stacks_of_different_tensors_become_objects(self, dim: int) -> None:
        def env(base: int) -> Any:
            parts = [
                TensorDict({"x": torch.full((base + t, 3), t), "s": f"{base}/{t}"}, []) for t in range(3)
            ]
            return LazyStackedTensorDict.lazy_stack(parts, 0)

        batch = LazyStackedTensorDict.lazy_stack([env(1), env(5)], dim)
        leaves = flatten(batch)
        sizes = [[len(item) for item in row.items()] for row in leaves[("x",)].movedim(dim, 0)]
        assert sizes == [[1, 2, 3], [5, 6, 7]] and leaves[("x",)].field_shape == (-1, 3)
        again = record_of(leaves, batch.batch_size)
        assert isinstance(again, LazyStackedTensorDict) and again.batch_size == batch.batch_size
        assert flatten(again)[("x",)].equal(leaves[("x",)]) and again["s"] == batch["s"]

    def test_stacks_of_equal_tensors_are_tensors(self) -> None:
        batch = LazyStackedTensorDict.lazy_stack([TensorDict({"x": torch.ones(2)}, [])] * 3, 0)
        assert lazy_leaf(batch, "x", 1).shape == (3, 2)
        one = LazyStackedTensorDict.lazy_stack(
            [TensorDict({"x": torch.ones(1)}, []), TensorDict({"x": torch.ones(1)})]
        )
        other = LazyStackedTensorDict.lazy_stack(
            [TensorDict({"x": torch.ones(2)}, []), TensorDict({"x": torch.ones(2)})]
        )
        assert lazy_leaf(LazyStackedTensorDict.lazy_stack([one, other]), "x", 2).field_shape == (-1,)

    @pytest.mark.parametrize("other", [torch.ones(2, 2), torch.ones(2, dtype=torch.int64)])
    def test_stacks_that_differ_in_more_than_sizes_are_refused(self, other: torch.Tensor) -> None:
        batch = LazyStackedTensorDict.lazy_stack([TensorDict({"x": torch.ones(1)}), TensorDict({"x": other})])
        with pytest.raises(
            SchemaError, match="'x': expected parts of a lazy stack that differ only in sizes"
        ):
            flatten(batch)

    def test_members_of_one_record_have_one_form(self) -> None:
        agents = LazyStackedTensorDict.lazy_stack(
            [TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(2)})]
        )
        with pytest.raises(
            SchemaError, match=r"'x': members of one group, .* different shapes \[\(1,\), \(2,\)\]"
        ):
            flatten(TensorDict({"agents": agents}, []))

    def test_builders_join_records_with_objects(self) -> None:
        layout = TensorDictBuilder(
            [("a",), ("g", "x"), ("g", "s")], lists=[("g", "x"), ("g", "s")], empty=[("e", "f")]
        )
        leaves = [torch.arange(2), ragged(1, 2), ObjectColumn.of(["u", "v"])]
        batch = layout.build(leaves, torch.Size([2]), names=["time"])
        assert [part["g", "x"].shape for part in batch.unbind(0)] == [(1, 3), (2, 3)] and batch["g", "s"] == [
            "u",
            "v",
        ]
        assert batch["e", "f"].is_empty() and batch.names == ["time"]
        for found, given in zip(layout.read(batch), leaves, strict=True):
            assert found.equal(given)
        one = layout.build([leaf[0] for leaf in leaves], torch.Size())
        assert one["g", "x"].shape == (1, 3) and one["g", "s"] == "u"
        none = layout.build([leaves[0][:0], leaves[1][:0], leaves[2][:0]], torch.Size([0]))
        assert none["g", "x"].shape == (0, 0, 0) and none.batch_size == (0,)


def test_leaves_of_both_kinds_are_stacked_and_joined() -> None:
    for one in (torch.arange(3), ObjectColumn.of([*"abc"])):
        assert stack_leaves([one, one], 1).shape == (3, 2) and cat_leaves([one, one]).shape == (6,)
