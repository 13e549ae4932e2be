"""`RowMaps`: a row of few values gets what torch's operations give, one after the other, bit for bit."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch

from gleanrl.native import RowMaps

TORCH = {"add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div}
STRANGE = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -3e-42,
    1.1754944e-38,
    3.4028235e38,
    5e-324,
    1e308,
    1.0,
    -1.0,
]


def numbers(shape, dtype, seed):
    """Return numbers of all sizes, those that are mostly forgotten among them."""
    drawn = np.random.default_rng(seed)
    out = drawn.normal(size=shape) * 10.0 ** drawn.integers(-30, 30, shape)
    strange = drawn.random(shape) < 0.3
    with np.errstate(all="ignore"):
        return np.where(strange, drawn.choice(STRANGE, shape), out).astype(dtype)


def with_torch(row, operations):
    """Return what torch makes of a row."""
    value = torch.from_numpy(row.copy())
    for name, operand in operations:
        if name in TORCH:
            value = TORCH[name](value, torch.from_numpy(operand[0].copy()))
        else:
            value = value.to(getattr(torch, name))
    return value.numpy()


def same(one, other):
    """Return whether arrays hold the same bits, whatever kind of nan."""
    return (
        one.dtype == other.dtype
        and np.array_equal(
            np.where(np.isnan(one), one.dtype.type(7), one).tobytes(),
            np.where(np.isnan(other), other.dtype.type(7), other).tobytes(),
        )
        and np.array_equal(np.isnan(one), np.isnan(other))
    )


CHAINS = {
    **{name: [name] for name in TORCH},
    "standardized": ["subtract", "divide"],
    "affine": ["multiply", "add"],
    "nothing": [],
    "to float32": ["float32"],
    "to float64": ["float64"],
    "there and back": ["float32", "multiply", "float64", "add", "float32"],
    "long": ["add", "divide", "subtract", "multiply", "add", "float64", "divide"],
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.filterwarnings("ignore:overflow|invalid")
def test_a_row_is_that_of_torch(chain, dtype):
    shape, operations, now = (6, 40, 5), [], dtype
    for seed, name in enumerate(CHAINS[chain]):
        now = now if name in TORCH else name
        operations.append((name, numbers((1, 40, 5), now, seed) if name in TORCH else None))
    source = numbers(shape, dtype, 99)
    after, roots = np.full(shape, 7, now), np.full(shape, 8, now)
    rows = RowMaps([(source, after, roots, operations)])
    for t in (3, 0, 4):
        rows.run(t)
        want = with_torch(source[t], operations)
        assert same(after[t], want)
        assert same(roots[t + 1], want)
    assert np.unique(after[[1, 2, 5]]).tolist() == [7]
    assert np.unique(roots[[0, 2, 3]]).tolist() == [8]


def test_all_strange_numbers_meet_each_other():
    for dtype, name in itertools.product(["float32", "float64"], TORCH):
        with np.errstate(all="ignore"):
            one, other = (array.astype(dtype).copy() for array in np.meshgrid(STRANGE, STRANGE))
        after = np.empty_like(one)[None]
        RowMaps([(one[None], after, None, [(name, other[None])])]).run(0)
        assert same(after[0], with_torch(one, [(name, other[None])])), (dtype, name)


def test_rows_may_lie_anywhere_and_be_one_and_the_same():
    """Columns have time behind the environments; a spare row is seen as many; a number serves all values."""
    spare, column = numbers((4, 3), "float32", 0), np.zeros((4, 9, 3), np.float32)
    source = np.broadcast_to(spare, (9, 4, 3))
    half, number = column[:, :, ::-1].swapaxes(0, 1), np.array([[[3.0]]], np.float32)
    operand = np.broadcast_to(number, (1, 4, 3))
    rows = RowMaps([(source, half, None, [("multiply", operand)])])
    rows.run(8)
    with np.errstate(all="ignore"):
        assert same(column[:, 8], (spare * np.float32(3))[:, ::-1].copy())
        spare[...], number[...] = 2.0, 5.0  # both are read anew
        rows.run(1)
    assert np.unique(column[:, 1]).tolist() == [10.0]
    assert not column[:, [0, *range(2, 8)]].any()


def test_maps_are_done_in_order():
    first, second, third = (np.ones((3, 2), np.float32) for _ in range(3))
    two = np.full((1, 2), 2, np.float32)
    RowMaps([(first, second, None, [("add", two)]), (second, third, None, [("multiply", two)])]).run(1)
    assert second[1].tolist() == [3.0, 3.0]
    assert third[1].tolist() == [6.0, 6.0]
    assert RowMaps([]).run(0) is None


@pytest.mark.parametrize("t", [-1, 3, 4, 2**62, -(2**62)])
def test_rows_outside_are_refused(t):
    arrays = [np.ones((4, 2), np.float32) for _ in range(3)]
    one = np.zeros((5, 2), np.float32)
    rows = RowMaps([(one, one.copy(), None, []), (*arrays, [("add", np.ones((1, 2), np.float32))])])
    with pytest.raises(IndexError, match="row"):
        rows.run(t)
    assert all(array.min() == array.max() == 1 for array in arrays)


F, D = np.zeros((4, 2), np.float32), np.zeros((4, 2))
ONE = np.zeros((1, 2), np.float32)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ((F, F.copy(), None), "source, after, roots and operations"),
        ((F, F.copy(), None, [("add",)]), "a name and an operand"),
        ((F, F.copy(), None, [("power", ONE)]), "unknown operation power"),
        ((F, F.copy(), None, [("add", np.zeros((1, 2)))]), "operand of add"),
        ((F, F.copy(), None, [("float64", None), ("add", ONE)]), "operand of add"),
        ((F, F.copy(), None, [("divide", np.zeros((1, 3), np.float32))]), "operand of divide"),
        ((F, F.copy(), None, [("add", np.zeros((0, 2), np.float32))]), "operand of add"),
        ((F, F.copy(), None, [("add", np.zeros(2, np.float32))]), "operand of add"),
        ((F, F.copy(), None, [("float64", None)]), "dtype that operations end in"),
        ((F, D.copy(), None, []), "dtype that operations end in"),
        ((F, np.zeros((4, 3), np.float32), None, []), "rows of the source's shape"),
        ((F, F.copy(), D.copy(), []), "`roots` like `after`"),
        ((F, F.copy(), np.zeros((4, 3), np.float32), []), "`roots` like `after`"),
        ((F.astype(np.int32), F.copy(), None, []), "float32 or float64"),
        ((F.astype(np.float16), F.astype(np.float16), None, []), "float32 or float64"),
        ((F.astype(">f4"), F.copy(), None, []), "float32 or float64"),
        ((np.array(1.0, np.float32), F.copy(), None, []), "source: expected rows"),
    ],
)
def test_other_forms_are_refused(one, message):
    with pytest.raises(ValueError, match=message):
        RowMaps([one])


@pytest.mark.parametrize("one", [[F, F.copy(), None, []], (F, F.copy(), None, ()), (F, F.copy(), None, [1])])
def test_what_is_no_list_of_tuples_is_refused(one):
    with pytest.raises(RuntimeError):
        RowMaps([one])


def test_what_is_no_array_or_cant_be_written_is_refused():
    fixed = F.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="writ|read-only"):
        RowMaps([(F, fixed, None, [])])
    with pytest.raises((TypeError, BufferError)):
        RowMaps([(F, [1.0], None, [])])
    with pytest.raises((TypeError, BufferError)):
        RowMaps([(F, F.copy(), None, [("add", None)])])


class Held(np.ndarray):
    """An array that can be referred to weakly."""


def test_memory_is_held_as_long_as_it_may_be_written():
    arrays = [np.ones((4, 2), np.float32).view(Held) for _ in range(3)]
    operand = np.ones((1, 2), np.float32).view(Held)
    held = [weakref.ref(array) for array in (*arrays, operand)]
    rows = RowMaps([(*arrays, [("add", operand)])])
    del arrays, operand
    gc.collect()
    assert all(ref() is not None for ref in held)
    rows.run(0)
    assert held[1]()[0].tolist() == [2.0, 2.0]
    del rows
    gc.collect()
    assert not any(ref() is not None for ref in held)
