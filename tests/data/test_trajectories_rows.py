"""Steps of an entry are selected, for every dtype."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.trajectories import take_rows

DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", [(), (1,), (2, 3)])
@pytest.mark.parametrize("pad", [False, True])
def test_rows_of_every_dtype(dtype: torch.dtype, feature: tuple[int, ...], pad: bool) -> None:
    numbers = torch.tensor([[1, 0, 3], [1, 5, 6]]).reshape(2, 3, *(1 for _ in feature)).expand(2, 3, *feature)
    leaf = numbers.to(dtype)
    index = [5, 5, 0, 6 if pad else 3]
    wide = torch.complex64 if dtype.is_complex else torch.float32
    expected = torch.cat([leaf.to(wide).reshape(6, *feature), torch.zeros(1, *feature, dtype=wide)])[index]
    rows = take_rows(leaf, 2, torch.tensor(index), pad=pad)
    assert rows.dtype == dtype and rows.is_contiguous() and torch.equal(rows.to(wide), expected)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 3, 0)])
def test_empty_selection_of_an_empty_batch_is_empty(shape: tuple[int, ...]) -> None:
    dims = min(len(shape), 2)
    rows = take_rows(torch.zeros(shape), dims, torch.zeros(0, dtype=torch.int64), pad=True)
    assert rows.shape == (0, *shape[dims:])


def test_large_values_of_unsigned_integers_survive() -> None:
    leaf = torch.tensor([2**63 + 5, 1], dtype=torch.uint64)
    assert take_rows(leaf, 1, torch.tensor([1, 0])).tolist() == [1, 2**63 + 5]


def test_the_result_is_a_copy() -> None:
    leaf = torch.arange(4)
    take_rows(leaf, 1, torch.arange(4)).zero_()
    assert leaf.tolist() == [0, 1, 2, 3]
