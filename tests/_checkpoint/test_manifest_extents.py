"""Operations on tables of extents equal the same operations on single extents, whatever the number of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._checkpoint.manifest import BLOCK_BYTES, Extent, Extents


@st.composite
def extents(draw: st.DrawFn, most: int = 8) -> list[Extent]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        blocks = st.integers(1, 3).map(lambda n: n * BLOCK_BYTES)
        size = draw(st.one_of(st.integers(0, 9), blocks, st.integers(1, 1 << 24)))
        sums = tuple(draw(st.integers(0, 2**32 - 1)) for _ in range(-(-size // BLOCK_BYTES)))
        found.append(Extent(draw(st.integers(0, 3)), draw(st.integers(0, 1 << 40)), size, sums))
    return found


@given(extents())
def test_table_equals_its_extents(each: list[Extent]) -> None:
    table = Extents.of(iter(each))
    assert [*table] == each and len(table) == len(each) and [table[n] for n in range(len(each))] == each
    assert table.files.tolist() == [extent.file for extent in each]
    assert table.sizes.tolist() == [extent.size for extent in each]
    assert table.blocks.tolist() == [len(extent.checksums) for extent in each]


@given(extents(), st.data())
def test_taken_extents_move_to_other_files(each: list[Extent], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.sampled_from(range(len(each))))) if each else []
    files = np.array([5, 0, 9, 2])
    found = Extents.of(each).take(np.array(numbers, np.int64)).within(files)
    assert [*found] == [each[n].within(int(files[each[n].file])) for n in numbers]


@given(extents(), st.randoms(use_true_random=False))
def test_tables_are_concatenated(each: list[Extent], random: object) -> None:
    numbers = [*range(len(each))]
    random.shuffle(numbers)  # type: ignore[attr-defined]
    cut = len(numbers) // 3
    parts = [
        (np.array(some, np.int64), Extents.of(each[n] for n in some))
        for some in (numbers[:cut], numbers[cut:])
    ]
    assert Extents.together(parts, len(each)) == Extents.of(each)
    assert len(Extents.together([], 0)) == 0
    for wrong, count in ((parts, len(each) + 1), (parts[:1], len(each) + 1), (parts * 2, 2 * len(each) or 1)):
        with pytest.raises(ValueError, match="each of them once"):
            Extents.together(wrong, count)


def test_different_tables_are_unequal() -> None:
    one = Extent(0, 0, 5, (7,))
    table = Extents.of([one])
    assert table == Extents.of([one]) and table != Extents.of([one, one]) and table != [one]
    assert table != Extents.of([one._replace(checksums=(8,))]) and table != Extents.of([one.within(1)])
    assert repr(table) == f"Extents({(one,)})"
