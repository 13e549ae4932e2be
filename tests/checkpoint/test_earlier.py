"""What an earlier checkpoint is good for; one that is damaged is good for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gleanrl.checkpoint.earlier import Earlier
from gleanrl.checkpoint.manifest import DataFile, Manifest
from gleanrl.checkpoint.segments import Layout
from gleanrl.checkpoint.values import LARGE_BYTES
from tests.checkpoint.helpers import Plain, columns

LAYOUT = Plain(columns(50), 20).layout
FILES = tuple(
    DataFile(f"{n:06d}.bin", size, (0,))
    for n, size in enumerate([384, 384, 256, LARGE_BYTES // 2, LARGE_BYTES // 2])
)
ROWS = {
    "$rows": 0,
    "id": "0" * 32,
    "rows": 50,
    "step": 20,
    "fields": [["int64", []], ["bfloat16", [3]], ["float32", [0]], ["bool", []]],
}
ARRAY = {"$tensor": [[3, 0, LARGE_BYTES // 2], [4, 0, LARGE_BYTES // 2]], "dtype": "uint8", "shape": []}
SMALL = {"$tensor": [[3, 0, 5]], "dtype": "uint8", "shape": [5]}


def earlier(*trees: Any) -> Earlier:
    return Earlier(Path("nowhere"), Manifest("thing", {"a": [*trees]}, FILES))


def test_rows_and_large_arrays_are_found_in_order() -> None:
    found = earlier(SMALL, ROWS, {"b": ARRAY})
    table = found.table(0, LAYOUT)
    assert table is not None and table.identity == "0" * 32 and table.files == FILES[:3]
    assert table.layout == LAYOUT
    assert found.arrays == [[*FILES[3:]]]
    assert found.table(1, LAYOUT) is None
    assert found.table(0, Layout(LAYOUT.fields, 50, 10)) is None
    assert found.table(0, Layout(LAYOUT.fields[:1], 50, 20)) is None
    assert found.table(0, Layout(LAYOUT.fields, 70, 20)) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"$rows": "x"},
        {"id": 5},
        {"rows": -1},
        {"step": 0},
        {"fields": [["object", []]]},
        {"fields": [5]},
        {"$rows": 3},
        {"rows": 10**15},
    ],
)
def test_what_isnt_right_is_no_table(wrong: Any) -> None:
    assert earlier({**ROWS, **wrong}).table(0, LAYOUT) is None


@pytest.mark.parametrize("pieces", [None, [[]], [[9, 0, LARGE_BYTES]], [[0, 0, "x"]]])
def test_what_isnt_right_is_no_array(pieces: Any) -> None:
    assert earlier({"$tensor": pieces}).arrays == []
