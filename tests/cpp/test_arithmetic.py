"""`RowMaps` computes rows of few values exactly as torch's operations do one after the other, bit for bit."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import RowMaps

pytestmark = pytest.mark.skipif(EXCHANGE is None, reason="torch shows tensors to nobody")

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
    """Return numbers of all magnitudes, and the special values of `STRANGE` among them."""
    drawn = np.random.default_rng(seed)
    out = drawn.normal(size=shape) * 10.0 ** drawn.integers(-30, 30, shape)
    strange = drawn.random(shape) < 0.3
    with np.errstate(all="ignore"):
        return np.where(strange, drawn.choice(STRANGE, shape), out).astype(dtype)


def row_maps(*maps):
    """Return maps whose operations are (name, tensor or None)."""
    found = []
    for source, after, roots, operations in maps:
        tensors = {str(place): tensor for place, (_, tensor) in enumerate(operations)}
        named = [
            (name, None, None) if tensor is None else (name, tensors, str(place))
            for place, (name, tensor) in enumerate(operations)
        ]
        found.append((source, after, roots, named))
    return RowMaps(EXCHANGE, torch.Tensor, found)


def with_torch(row, operations):
    """Return the result of torch's operations for a row."""
    value = torch.from_numpy(row.copy())
    for name, operand in operations:
        if name in TORCH:
            value = TORCH[name](value, operand)
        else:
            value = value.to(getattr(torch, name))
    return value.numpy()


def same(one, other):
    """Return whether arrays hold the same bits, with all kinds of nan equal."""
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
def test_row_equals_torchs(chain, dtype):
    shape, operations, now = (6, 40, 5), [], dtype
    for seed, name in enumerate(CHAINS[chain]):
        now = now if name in TORCH else name
        operand = torch.from_numpy(numbers((40, 5), now, seed)) if name in TORCH else None
        operations.append((name, operand))
    source = numbers(shape, dtype, 99)
    after, roots = np.full(shape, 7, now), np.full(shape, 8, now)
    rows = row_maps((source, after, roots, operations))
    for t in (3, 0, 4):
        assert rows.run(t)
        want = with_torch(source[t], operations)
        assert same(after[t], want)
        assert same(roots[t + 1], want)
    assert np.unique(after[[1, 2, 5]]).tolist() == [7]
    assert np.unique(roots[[0, 2, 3]]).tolist() == [8]


def test_special_values_are_combined_with_each_other():
    for dtype, name in itertools.product(["float32", "float64"], TORCH):
        with np.errstate(all="ignore"):
            one, other = (array.astype(dtype).copy() for array in np.meshgrid(STRANGE, STRANGE))
        after, operations = np.empty_like(one)[None], [(name, torch.from_numpy(other))]
        assert row_maps((one[None], after, None, operations)).run(0)
        assert same(after[0], with_torch(one, operations)), (dtype, name)


def test_rows_may_have_any_strides_or_be_repeated():
    """Columns have time after the environments, and a spare row is viewed as many rows."""
    spare, column = numbers((4, 3), "float32", 0), np.zeros((4, 9, 3), np.float32)
    source, half, number = (
        np.broadcast_to(spare, (9, 4, 3)),
        column[:, :, ::-1].swapaxes(0, 1),
        torch.tensor(3.0),
    )
    rows = row_maps((source, half, None, [("multiply", number)]))
    rows.run(8)
    with np.errstate(all="ignore"):
        assert same(column[:, 8], (spare * np.float32(3))[:, ::-1].copy())
    spare[...] = 2.0
    number.fill_(5.0)  # both are read again
    rows.run(1)
    assert np.unique(column[:, 1]).tolist() == [10.0]
    assert not column[:, [0, *range(2, 8)]].any()


@pytest.mark.parametrize(
    "operand",
    [
        torch.tensor(3.0),
        torch.tensor([3.0]),
        torch.arange(3.0),
        torch.arange(4.0)[:, None],
        torch.arange(1.0).reshape(1, 1, 1),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(24.0).reshape(4, 6)[:, ::2],
        torch.arange(24.0).reshape(2, 4, 3)[1],
        torch.arange(4.0)[:, None].expand(4, 3),
        torch.arange(3.0, requires_grad=True),
    ],
    ids=str,
)
def test_operands_broadcast_with_any_strides(operand):
    source, after = numbers((2, 4, 3), "float32", 0), np.zeros((2, 4, 3), np.float32)
    shape = (2, 1, 4, 3) if operand.ndim > 2 else (2, 4, 3)
    source, after = source.reshape(shape), after.reshape(shape)
    operations = [("add", operand)]
    assert row_maps((source, after, None, operations)).run(1)
    assert same(after[1], with_torch(source[1], [("add", operand.detach())]))


def exchange(tensors):
    tensors["n"] = torch.tensor(5.0)


def move(tensors):
    tensors["n"].data = torch.tensor(5.0)


def share(tensors):
    tensors["n"].share_memory_()
    tensors["n"].fill_(5.0)


def set_to(tensors):
    tensors["n"].set_(torch.tensor(5.0))


@pytest.mark.parametrize("change", [exchange, move, share, set_to])
def test_operands_are_read_at_each_run(change):
    tensors, after = {"n": torch.tensor(3.0)}, np.zeros((3, 2), np.float32)
    rows = RowMaps(EXCHANGE, torch.Tensor, [(np.ones_like(after), after, None, [("add", tensors, "n")])])
    assert rows.run(0)
    change(tensors)
    junk = [torch.full((), 1e9) for _ in range(1000)]  # to overwrite the freed memory
    assert rows.run(1)
    assert after.tolist() == [[4.0, 4.0], [6.0, 6.0], [0.0, 0.0]]
    assert len(junk) == 1000


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([3.0]),
        torch.arange(9.0).reshape(3, 3).T,
        torch.zeros(3, 3).double(),
        torch.zeros(3, 3, dtype=torch.int32),
        torch._neg_view(torch.zeros(3, 3)),
        torch.zeros(3, 3).to_sparse(),
        torch.nn.Parameter(torch.zeros(3, 3)),
        torch.zeros(3, 3, device="meta"),
        None,
        3.0,
    ],
    ids=lambda other: str(type(other)),
)
def test_operands_of_another_form_are_not_used(other):
    tensors, after = {"n": torch.ones(3, 3)}, np.zeros((3, 3, 3), np.float32)
    source = np.ones_like(after)
    maps = [(source, after.copy(), None, [("add", tensors, "n")]), (source, after, None, [])]
    rows = RowMaps(EXCHANGE, torch.Tensor, maps)
    tensors["n"] = other
    assert not rows.run(0)
    del tensors["n"]
    assert not rows.run(0)
    assert not maps[0][1].any()
    assert not after.any()
    tensors["n"] = torch.ones(3, 3)
    assert rows.run(0)
    assert maps[0][1][0].min() == 2


def test_maps_are_done_in_order():
    first, second, third = (np.ones((3, 2), np.float32) for _ in range(3))
    two = torch.tensor(2.0)
    row_maps((first, second, None, [("add", two)]), (second, third, None, [("multiply", two)])).run(1)
    assert second[1].tolist() == [3.0, 3.0]
    assert third[1].tolist() == [6.0, 6.0]
    assert row_maps().run(0)
    assert RowMaps(None, torch.Tensor, [(first, third, None, [])]).run(0)


@pytest.mark.parametrize("t", [-1, 3, 4, 2**62, -(2**62)])
def test_rows_outside_are_refused(t):
    arrays = [np.ones((4, 2), np.float32) for _ in range(3)]
    one = np.zeros((5, 2), np.float32)
    rows = row_maps((one, one.copy(), None, []), (*arrays, [("add", torch.tensor(1.0))]))
    with pytest.raises(IndexError, match="row"):
        rows.run(t)
    assert all(array.min() == array.max() == 1 for array in arrays)


F, D = np.zeros((4, 2), np.float32), np.zeros((4, 2))
ONE = torch.zeros(2)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ((F, F.copy(), None), "source, after, roots and operations"),
        ((F, F.copy(), None, [("add",)]), "a name, and where"),
        ((F, F.copy(), None, [("power", {"n": ONE}, "n")]), "unknown operation 'power'"),
        ((F, F.copy(), None, [("add\0x", {"n": ONE}, "n")]), "unknown operation"),
        ((F, F.copy(), None, [("\ud800", {"n": ONE}, "n")]), "unknown operation"),
        ((F, F.copy(), None, [("add", {"n": ONE.double()}, "n")]), "tensor that broadcasts .* under 'n'"),
        ((F, F.copy(), None, [("float64", None, None), ("add", {"n": ONE}, "n")]), "tensor that broadcasts"),
        ((F, F.copy(), None, [("add", {"n": torch.zeros(3)}, "n")]), "tensor that broadcasts"),
        ((F, F.copy(), None, [("add", {"n": torch.zeros(1, 2)}, "n")]), "tensor that broadcasts"),
        ((F, F.copy(), None, [("add", {"n": torch.zeros(0)}, "n")]), "tensor that broadcasts"),
        ((F, F.copy(), None, [("add", {"n": 1.0}, "n")]), "tensor that broadcasts"),
        ((F, F.copy(), None, [("add", {}, "n")]), "tensor that broadcasts"),
        ((F, F.copy(), None, [("float64", None, None)]), "dtype that operations end in"),
        ((F, D.copy(), None, []), "dtype that operations end in"),
        ((F, np.zeros((4, 3), np.float32), None, []), "rows of the source's shape"),
        ((F, F.copy(), D.copy(), []), "`roots` like `after`"),
        ((F, F.copy(), np.zeros((4, 3), np.float32), []), "`roots` like `after`"),
        ((F.astype(np.int32), F.copy(), None, []), "float32 or float64"),
        ((F.astype(np.float16), F.astype(np.float16), None, []), "float32 or float64"),
        ((F.astype(">f4"), F.copy(), None, []), "float32 or float64"),
        ((np.array(1.0, np.float32), F.copy(), None, []), "source: expected rows"),
        (((ctypes.c_float * 3)(), F.copy(), None, []), "source: expected rows"),
    ],
)
def test_invalid_maps_are_refused(one, message):
    with pytest.raises(ValueError, match=message):
        RowMaps(EXCHANGE, torch.Tensor, [one])


@pytest.mark.parametrize(
    "one",
    [
        [F, F.copy(), None, []],
        (F, F.copy(), None, ()),
        (F, F.copy(), None, [1]),
        (F, F.copy(), None, [(1, {"n": ONE}, "n")]),
        (F, F.copy(), None, [("add", ONE, "n")]),
        (F, [1.0], None, []),
    ],
)
def test_maps_of_another_structure_are_refused(one):
    with pytest.raises(TypeError):
        RowMaps(EXCHANGE, torch.Tensor, [one])


def test_read_only_arrays_and_unknown_interfaces_are_refused():
    fixed = F.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="writ|read-only"):
        row_maps((F, fixed, None, []))
    with pytest.raises(ValueError, match="exchange"):
        RowMaps(None, torch.Tensor, [(F, F.copy(), None, [("add", {"n": ONE}, "n")])])
    with pytest.raises(ValueError, match="exchange"):
        RowMaps(3, torch.Tensor, [])


class Held(np.ndarray):
    """An array that supports weak references."""


def test_arrays_are_held_as_long_as_they_may_be_written():
    arrays = [np.ones((4, 2), np.float32).view(Held) for _ in range(3)]
    held = [weakref.ref(array) for array in arrays]
    rows = row_maps((*arrays, [("add", torch.tensor(1.0))]))
    del arrays
    gc.collect()
    assert all(ref() is not None for ref in held)
    rows.run(0)
    assert held[1]()[0].tolist() == [2.0, 2.0]
    del rows
    gc.collect()
    assert not any(ref() is not None for ref in held)
