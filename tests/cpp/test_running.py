"""`RunningSums` over many rows equals row by row, bit for bit."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from gleanrl._arrays.native import RunningSums

TYPES = ["uint8", "int8", "int16", "int32", "int64", "longlong", "float32", "float64"]
SHAPES = [(9,), (9, 1), (9, 3, 2), (9, 0), (9, 300, 70)]  # the last one releases the interpreter lock


def rows(shape, dtype, seed):
    """Return rows of numbers that overflow integers and that floats must round."""
    drawn = np.random.default_rng(seed).normal(size=shape) * 100
    return drawn.astype(dtype) if np.dtype(dtype).kind == "f" else drawn.astype(np.int64).astype(dtype)


def one_by_one(after, roots, addends, first, n):
    """Add row by row with torch, as steps do."""
    for t in range(first, first + n):
        root = torch.from_numpy(np.array(roots[t]))
        more = torch.ones_like(root) if addends is None else torch.from_numpy(np.array(addends[t]))
        after[t] = roots[t + 1] = (root + more).numpy()


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_sums_equal_single_rows(dtype, shape, adds):
    after, roots, addends = (rows(shape, dtype, seed) for seed in range(3))
    want = after.copy(), roots.copy()
    sums = RunningSums(after, roots, addends if adds else None)
    for first, n in ((0, 3), (3, 0), (4, 4), (0, 8)):
        for _ in range(2):  # twice, as after an interrupt
            sums.run_on(first, n)
        one_by_one(*want, addends if adds else None, first, n)
        assert after.tobytes() == want[0].tobytes()
        assert roots.tobytes() == want[1].tobytes()


def test_rows_may_have_any_strides():
    """Time is after the environments in a column, and columns may be parts of larger arrays."""
    held = [rows((4, 9, 3), "float32", seed) for seed in range(3)]
    after, roots, addends = (array[::2, :, ::-1].swapaxes(0, 1) for array in held)
    before = [array.copy() for array in held]
    want = after.copy(), roots.copy()
    RunningSums(after, roots, addends).run_on(1, 5)
    one_by_one(*want, addends, 1, 5)
    assert np.array_equal(after, want[0])
    assert np.array_equal(roots, want[1])
    for array, old in zip(held, before, strict=True):
        assert np.array_equal(array[1::2], old[1::2])


@pytest.mark.parametrize(
    ("first", "n"), [(-1, 1), (0, -1), (0, 9), (8, 1), (9, 0), (3, 2**62), (2**62, 2**62)]
)
def test_rows_outside_are_refused(first, n):
    after, roots = np.ones((9, 2), np.int64), np.ones((9, 2), np.int64)
    with pytest.raises(IndexError, match="run_on"):
        RunningSums(after, roots).run_on(first, n)
    assert after.min() == after.max() == roots.min() == roots.max() == 1


@pytest.mark.parametrize(
    "others",
    [
        (np.zeros((9, 3), np.float32), None),
        (np.zeros((8, 2), np.float32), None),
        (np.zeros((9, 2), np.float64), None),
        (np.zeros((9, 2), np.float32), np.zeros((9, 2), np.int32)),
        (np.zeros((9, 2), np.float32), np.zeros(9, np.float32)),
    ],
)
def test_arrays_of_different_forms_are_refused(others):
    with pytest.raises(ValueError, match="one shape and type"):
        RunningSums(np.zeros((9, 2), np.float32), *others)


@pytest.mark.parametrize("dtype", [bool, np.float16, np.complex64, np.uint16, ">i4", "datetime64[s]"])
def test_other_types_are_refused(dtype):
    with pytest.raises(ValueError):  # NumPy can't export some of them
        RunningSums(np.zeros(9, dtype), np.zeros(9, dtype))


def test_memory_is_held_and_has_to_be_writable():
    after, roots = np.zeros(3, np.int64), np.zeros(3, np.int64)
    sums, gone = RunningSums(after, roots), weakref.ref(after)
    del after
    gc.collect()
    assert gone() is not None
    del sums
    assert gone() is None
    roots.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        RunningSums(np.zeros(3, np.int64), roots)
    with pytest.raises(ValueError, match="rows"):
        RunningSums(np.zeros((), np.int64), np.zeros((), np.int64))
    with pytest.raises(TypeError):
        RunningSums([1], [2])
