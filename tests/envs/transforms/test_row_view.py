"""A row view reads and writes one row of the columns through a TensorDict's interface."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.envs.transforms.row_view import Leaves, Row, leaf_keys, on_copies, reset_rows, sibling, trailing
from gleanrl.errors import MissingKeyError

A, B = torch.tensor([1.0]), torch.tensor([2.0])


class Two(dict):
    def row(self, key, t):
        self.read = key, t
        return None if key not in self else self[key][t]


def row():
    return Row(torch.Size(), None).over(Two({"a": (A, B), ("g", "b"): (B, A)}))


def test_values_come_from_the_columns_row():
    r = row()
    assert r.get("a") is A
    assert r.get(("g", "b")) is B
    r.clear(1)
    assert r.get("a") is B
    assert r.get(("a",)) is B


def test_seldom_read_columns_are_read_one_row_at_a_time():
    columns = Two({"a": (A, B), "b": (A, B)})
    r = Row(torch.Size(), None).over(columns)
    assert r.get("a") is A
    r.clear(1, seldom=True)
    assert r.get("b") is B
    assert columns.read == ("b", 1)
    assert r.get("a") is B
    assert columns.read == ("b", 1), "it is open"
    assert r.get("c", None) is None
    r.pop("b")
    assert r.get("b", None) is None
    r.clear(0)
    assert r.get("b") is A
    assert columns.read == ("b", 1)


@pytest.mark.parametrize("seldom", [False, True])
def test_leaves_are_the_same_in_every_row(seldom):
    leaves = Leaves({("g", "a"): A, ("b",): B})
    assert list(leaves) == [("g", "a"), "b"]
    assert leaves.get("a") is leaves.row("a", 0) is None
    r = Row(torch.Size(), None).over(leaves)
    for t in (0, 3):
        r.clear(t, seldom)
        assert r.get(("g", "a")) is A
        assert r.get("b") is B
        assert r.get("a", None) is None


def test_hooks_on_copies_get_copied_values():
    r, found = row(), []
    r.set("c", B)

    def hook(record):
        with pytest.raises(MissingKeyError):
            record.get("x")
        found.extend([record.get("a"), record.get("c"), record.pop(("g", "b")), record.get("x", 3)])
        record.set("d", A)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        on_copies(hook)(r)
    assert [value.data_ptr() for value in found[:3]] != [A.data_ptr(), B.data_ptr(), B.data_ptr()]
    assert {A.data_ptr(), B.data_ptr()}.isdisjoint(value.data_ptr() for value in found[:3])
    assert [float(value) for value in found] == [1.0, 2.0, 2.0, 3.0]
    assert r.get("a") is A, "copies are for the hook"
    assert r.get("d") is A


def test_set_value_hides_the_column_until_the_row_is_cleared():
    r = row()
    assert r.set("a", B) is r
    assert r.get("a") is B
    assert r.made == {"a": B}
    r.clear(0)
    assert r.get("a") is A


def test_popped_key_is_absent_until_the_row_is_cleared():
    r = row()
    assert r.pop("a") is A
    assert r.get("a", None) is None
    assert r.keys() == [("g", "b")]
    assert r.get(("g", "b")) is B
    r.clear(0)
    assert r.get("a") is A
    r.set("c", B)
    assert r.pop("c") is B
    assert r.pop("c", None) is None


def test_a_missing_key_is_named():
    with pytest.raises(MissingKeyError, match="'x' not found"):
        row().get("x")
    assert row().get("x", 3) == 3


def test_reset_rows_reads_every_mask():
    masks = {
        "_reset": torch.tensor([[True], [False]]),
        ("g", "_reset"): torch.zeros(2, 3, 1, dtype=torch.bool),
    }
    td = TensorDict(masks, [2])
    keys = ["_reset", ("g", "_reset")]
    assert reset_rows(td, keys).tolist() == [True, False]
    td["g", "_reset"][1, 2] = True
    assert reset_rows(td, keys) is None
    assert reset_rows(TensorDict({}, [2]), keys) is None


def test_helpers_compute_keys_and_shapes():
    assert trailing(torch.ones(2), torch.ones(2, 3, 4)).shape == (2, 1, 1)
    assert sibling(("a", "done"), "x") == ("a", "x")
    assert sibling("done", "x") == "x"
    assert leaf_keys(row()) == ["a", ("g", "b")]
    assert set(leaf_keys(TensorDict({"a": A, "g": {"b": B}}, []))) == {"a", ("g", "b")}
