"""An earlier checkpoint provides files and extents to link; a damaged one provides none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._checkpoint.incremental import Earlier
from gleanrl._checkpoint.manifest import DataFile, Extent, Extents, Manifest
from gleanrl._checkpoint.row_segments import SegmentLayout
from gleanrl._checkpoint.tree_codec import LARGE_BYTES
from tests._checkpoint.helpers import Plain, columns

LAYOUT = Plain(columns(50), 20).layout
SIZES = [384, 384, 256, LARGE_BYTES // 2, LARGE_BYTES // 2]
FILES = (DataFile("000000.bin", 384), DataFile("000001.bin", 2 * LARGE_BYTES))
EXTENTS = Extents.of(
    [Extent(0, 0, 384, (0,)), *(Extent(1, sum(SIZES[1:n]), SIZES[n], (0,)) for n in range(1, 5))]
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
    return Earlier.of(Path("nowhere"), Manifest("thing", {"a": [*trees]}, FILES, EXTENTS))


def arrays_of(found: Earlier) -> list[list[Extent]]:
    return [[*array] for array in found.arrays]


def test_rows_and_large_arrays_are_found_in_order() -> None:
    found = earlier(SMALL, ROWS, {"b": ARRAY})
    table = found.table(0, LAYOUT)
    assert table is not None and table.identity == "0" * 32 and [*table.extents] == [*EXTENTS][:3]
    assert table.layout == LAYOUT
    assert arrays_of(found) == [[*EXTENTS][3:]]
    assert found.table(1, LAYOUT) is None
    assert found.table(0, SegmentLayout(LAYOUT.fields, 50, 10)) is None
    assert found.table(0, SegmentLayout(LAYOUT.fields[:1], 50, 20)) is None
    assert found.table(0, SegmentLayout(LAYOUT.fields, 70, 20)) is not None


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
def test_invalid_rows_provide_no_table(wrong: Any) -> None:
    assert earlier({**ROWS, **wrong}).table(0, LAYOUT) is None


@pytest.mark.parametrize("pieces", [None, [[]], [[0, 0, "x"]]])
def test_invalid_places_provide_no_array(pieces: Any) -> None:
    assert arrays_of(earlier({"$tensor": pieces})) == []


@pytest.mark.parametrize("number", [9, -1, -3, True, 3.0, "3", None, 2**70])
def test_arrays_outside_extents_are_not_linked(number: Any) -> None:
    wrong = {**ARRAY, "$tensor": [[number, 0, LARGE_BYTES // 2], [4, 0, LARGE_BYTES // 2]]}
    assert arrays_of(earlier(wrong, ARRAY)) == [[], [*EXTENTS][3:]]


def test_overlapping_entries_are_used_once() -> None:
    found = earlier(ROWS, ARRAY, {**ROWS, "id": "1" * 32}, {**ARRAY, "$tensor": ARRAY["$tensor"][::-1]})
    assert arrays_of(found) == [[*EXTENTS][3:], []] and found.table(1, LAYOUT) is None
    twice = [[3, 0, LARGE_BYTES // 2], [3, 0, LARGE_BYTES // 2]]
    assert arrays_of(earlier({**ARRAY, "$tensor": twice})) == [[]]


def kept(sizes: list[int], needed: dict[int, int], total: int) -> set[int]:
    files = tuple(DataFile(f"{n:06d}.bin", size) for n, size in enumerate(sizes))
    return Earlier(Path("nowhere"), "thing", files, (), ()).worth_keeping(needed, total)


def test_files_with_much_garbage_are_rewritten() -> None:
    assert kept([100, 100], {0: 100, 1: 1}, 200) == {0, 1}  # 99 of 200 bytes are garbage
    assert kept([100, 100], {0: 100, 1: 1}, 190) == {0}
    assert kept([100, 100], {0: 100}, 100) == {0}  # a file without needed bytes isn't linked anyway
    assert kept([100, 100, 100], {0: 60, 1: 70, 2: 50}, 180) == {0, 1}
    assert kept([100, 100], {}, 0) == set()


def test_many_small_files_become_one() -> None:
    sizes = [1_000] * 10 + [10] * 22
    assert len(kept(sizes[:-1], dict(enumerate(sizes[:-1])), 20_000)) == 31
    found = kept(sizes, dict(enumerate(sizes)), 20_000)
    assert len(found) == 29 and found >= set(range(10))
    many = [1_000] * 48
    assert len(kept(many, dict(enumerate(many)), 48_000)) == 32
    assert len(kept(many, dict(enumerate(many)), 48 << 25)) == 45
    assert len(kept(many, dict(enumerate(many)), 49 << 25)) == 48


@given(st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 1_000)), max_size=60), st.integers(0, 10_000))
def test_kept_garbage_is_bounded(files: list[tuple[int, int]], more: int) -> None:
    needed = {number: min(one, other) for number, (one, other) in enumerate(files)}
    sizes, total = [max(file) for file in files], sum(needed.values()) + more
    found = kept(sizes, needed, total)
    assert sum(sizes[n] - needed[n] for n in found) <= 0.5 * total and len(found) <= 32
