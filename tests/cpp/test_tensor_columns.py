"""`TensorColumns` writes plain tensors directly, each into its column, and refuses all other ones."""

from __future__ import annotations

import sys
import weakref

import numpy as np
import pytest
import torch

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import TensorColumns
from tests.lazy import negated

pytestmark = pytest.mark.skipif(EXCHANGE is None, reason="torch doesn't offer the interface")

ROWS = 7
FORMS = [
    ((2, 3), torch.float32),
    ((), torch.bool),
    ((1,), torch.int64),
    ((0,), torch.float64),
    ((5,), torch.uint8),
]


def new_columns():
    return [torch.zeros(ROWS, *shape, dtype=dtype) for shape, dtype in FORMS]


def new_leaves(lead, start=1):
    """Return counting leaves ``[*lead, *leaf]``."""
    found = []
    for shape, dtype in FORMS:
        full = (*lead, *shape)
        found.append((torch.arange(start, start + int(np.prod(full))) % 100).to(dtype).reshape(full))
    return found


def written(columns):
    return TensorColumns(EXCHANGE, torch.Tensor, columns)


@pytest.mark.parametrize("lead", [(), (4,), (2, 2), (0,)])
def test_tensors_of_the_columns_kind_fit(lead):
    made = written(new_columns())
    leaves = new_leaves(lead)
    assert made.fits(leaves, lead)
    assert made.fits(leaves, torch.Size(lead))
    assert made.fits([leaves[0].requires_grad_(), *leaves[1:]], lead)
    assert not made.fits(leaves[:-1], lead)
    assert not made.fits([*leaves, leaves[0]], lead)
    assert not made.fits(leaves, (*lead, 1))
    assert not made.fits(leaves, (5,))


@pytest.mark.parametrize(
    ("position", "change"),
    [
        (0, lambda leaf: leaf.double()),
        (0, lambda leaf: leaf.view(torch.int32)),  # as many bytes
        (0, lambda leaf: leaf.reshape(4, 3, 2)),  # as many numbers
        (0, lambda leaf: leaf.reshape(4, 6)),
        (0, lambda leaf: leaf[:3]),
        (0, lambda leaf: leaf[:, :, :1].expand(4, 2, 3)),
        (0, lambda leaf: leaf.transpose(1, 2).contiguous().transpose(1, 2)),
        (0, lambda leaf: torch.stack([leaf, leaf], 1)[:, 0]),
        (0, lambda leaf: leaf.to("meta")),
        (0, lambda leaf: leaf.to_sparse()),
        (0, lambda leaf: torch._efficientzerotensor(leaf.shape)),
        (0, lambda leaf: torch.nn.Parameter(leaf)),
        (0, lambda leaf: leaf.numpy()),
        (0, negated),
        (0, lambda leaf: None),
        (1, lambda leaf: leaf.to(torch.uint8)),
        (2, lambda leaf: leaf.to(torch.float64)),
        (4, lambda leaf: leaf.view(torch.int8)),
        (4, lambda leaf: leaf.view(torch.bool)),
        (4, lambda leaf: leaf.view(torch.uint4)),
        (4, lambda leaf: leaf.view(torch.bits8)),
        (4, lambda leaf: leaf.view(torch.float8_e5m2)),
    ],
)
def test_changed_tensors_do_not_fit(position, change):
    made = written(new_columns())
    leaves = new_leaves((4,))
    assert made.fits(leaves, (4,))
    leaves[position] = change(leaves[position])
    assert not made.fits(leaves, (4,))


@pytest.mark.parametrize(("start", "count"), [(0, 1), (2, 4), (5, 4), (6, 7), (3, 0)])
def test_rows_go_around_the_end(start, count):
    columns = new_columns()
    leaves = new_leaves((count,))
    assert written(columns).write(start, count, leaves)
    at = [(start + row) % ROWS for row in range(count)]
    for column, leaf in zip(columns, leaves, strict=True):
        expected = torch.zeros_like(column)
        expected[at] = leaf
        assert column.equal(expected)


@pytest.mark.parametrize("many", [False, True])
def test_batch_dimensions_are_flattened_to_rows(many):
    lead = (10, 20) if many else (2, 3)  # more than 64 rows: the lock is released
    count = lead[0] * lead[1]
    columns = [torch.zeros(count, *shape, dtype=dtype) for shape, dtype in FORMS]
    leaves = new_leaves(lead)
    assert written(columns).write(0, count, leaves)
    for column, leaf in zip(columns, leaves, strict=True):
        assert column.equal(leaf.flatten(0, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda leaves, columns: leaves[:-1],
        lambda leaves, columns: [leaves[0][:3], *leaves[1:]],
        lambda leaves, columns: [*leaves[:2], torch.cat([leaves[2], leaves[2]]), *leaves[3:]],
        lambda leaves, columns: [leaves[0].to("meta"), *leaves[1:]],
        lambda leaves, columns: [leaves[0], columns[1][2:6], *leaves[2:]],  # a column's own rows
        lambda leaves, columns: [torch.zeros(4, 3, 4)[:, :, :2], *leaves[1:]],
        lambda leaves, columns: [leaves[0].to(torch.uint8), *leaves[1:]],  # as many numbers of fewer bytes
        lambda leaves, columns: [*leaves[:-1], None],
    ],
)
def test_nothing_is_written_if_one_leaf_cannot_be(change):
    columns = new_columns()
    assert not written(columns).write(1, 4, change(new_leaves((4,)), columns))
    assert not any(column.any() for column in columns)


@pytest.mark.parametrize(
    ("start", "count", "error"),
    [
        (ROWS, 4, IndexError),
        (-1, 4, IndexError),
        (0, ROWS + 1, ValueError),
        (0, -1, ValueError),
        (0, 1 << 62, ValueError),
    ],
)
def test_numbers_that_are_no_rows_are_refused(start, count, error):
    columns, leaves = new_columns(), new_leaves((4,))
    with pytest.raises(error, match="write"):
        written(columns).write(start, count, leaves)
    assert not any(column.any() for column in columns)


def test_sizes_that_are_no_numbers_are_refused():
    columns, leaves = new_columns(), new_leaves((4,))
    with pytest.raises(TypeError):
        written(columns).fits(leaves, ("4",))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([torch.zeros(2, 3).t()], "in one piece"),
        ([torch.zeros(())], "in one piece"),
        ([torch.zeros(2, dtype=torch.complex64)], "complex"),
        ([torch.zeros(2), torch.zeros(3)], "as many rows"),
    ],
)
def test_unsupported_columns_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        written(columns)
    with pytest.raises(ValueError, match="exchange"):
        TensorColumns(object(), torch.Tensor, columns)


def test_columns_are_held_and_leaves_are_not():
    columns, leaves = new_columns(), new_leaves((4,))
    before = [sys.getrefcount(leaf) for leaf in leaves]
    made, held = written(columns), [weakref.ref(column) for column in columns]
    del columns
    for _ in range(3):
        assert made.fits(leaves, (4,)) and made.write(0, 4, leaves)
    assert before == [sys.getrefcount(leaf) for leaf in leaves]
    assert all(column()[:4].equal(leaf) for column, leaf in zip(held, leaves, strict=True))
    del made
    assert all(column() is None for column in held)


@pytest.mark.parametrize("change", [lambda leaves: leaves.__delitem__(slice(1, None)), list.clear])
def test_list_that_shrinks_during_the_check_does_not_fit(change):
    """Python code that torch runs at every call may change the list."""
    leaves = new_leaves((4,))

    class Shrinking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            change(leaves)
            return found

    with Shrinking():
        assert not written(new_columns()).fits(leaves, (4,))
