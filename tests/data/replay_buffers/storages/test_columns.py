"""Both kinds of columns agree with torch's indexing."""

from __future__ import annotations

import pytest
import torch

from gleanrl._arrays.schema import Field
from gleanrl.data.replay_buffers.storages.allocators import ExistingColumns
from gleanrl.data.replay_buffers.storages.columns import (
    ColumnStore,
    DeviceColumns,
    OwnColumns,
    UserColumns,
    column_store,
)

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
ROWS = 10
FIELDS = [
    Field(torch.Size([4]), torch.float32),
    Field(torch.Size([]), torch.int64),
    Field(torch.Size([2, 3]), torch.uint8),
    Field(torch.Size([1]), torch.bool),
    Field(torch.Size([3]), torch.bfloat16),
    Field(torch.Size([2]), torch.complex64),
    Field(
        torch.Size([5]), torch.float8_e4m3fn if RELEASE > (2, 6) else torch.float16
    ),  # 2.6 can't index them
    Field(torch.Size([0]), torch.float32),
]
KINDS = [OwnColumns, UserColumns, DeviceColumns]


def rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for field in FIELDS:
        noise = torch.randint(0, 100, (count, *field.shape), generator=generator)
        found.append(noise.to(field.dtype))
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def make(kind: type[ColumnStore]) -> ColumnStore:
    return kind(FIELDS, rows(ROWS, seed=1))


@pytest.mark.parametrize("wanted", [None, (5, 0, 4, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_gather_copies_the_rows_of_slots_from_wanted_columns(kind, wanted):
    store = make(kind)
    slots = torch.tensor([3, 0, 9, 3])
    got = store.gather(slots, wanted)
    for leaf, position in zip(got, wanted or range(len(FIELDS)), strict=True):
        column, field = store.columns[position], FIELDS[position]
        assert leaf.shape == (4, *field.shape) and leaf.dtype == field.dtype and leaf.is_contiguous()
        assert bits(leaf) == bits(torch.stack([column[slot] for slot in slots.tolist()]))
        if leaf.numel():
            assert leaf.data_ptr() != column.data_ptr()


@pytest.mark.parametrize("start, count", [(0, 3), (0, 10), (8, 2), (8, 5), (9, 10)])
@pytest.mark.parametrize("kind", KINDS)
def test_write_goes_around_the_end(kind, start, count):
    store = make(kind)
    before = [column.clone() for column in store.columns]
    data = rows(count, seed=2)
    store.write(start, count, store.ready(data))
    for column, old, leaf in zip(store.columns, before, data, strict=True):
        for offset in range(count):
            old[(start + offset) % ROWS] = leaf[offset]
        assert bits(column) == bits(old)


@pytest.mark.parametrize("kind", KINDS)
def test_put_keeps_the_last_of_equal_slots(kind):
    store = make(kind)
    before = [column.clone() for column in store.columns]
    data = rows(4, seed=2)
    store.put(torch.tensor([7, 2, 7, 0]), store.ready(data))
    for column, old, leaf in zip(store.columns, before, data, strict=True):
        for position, slot in [(1, 2), (2, 7), (3, 0)]:
            old[slot] = leaf[position]
        assert bits(column) == bits(old)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_conjugated_and_negated_leaves_arrive_as_they_look(kind):
    fields = [Field(torch.Size([2]), torch.complex64), Field(torch.Size([1]), torch.float32)]
    store = kind(fields, [torch.zeros(4, 2, dtype=torch.complex64), torch.zeros(4, 1)])
    numbers = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]])
    lazy = numbers.t().conj()
    negated = numbers[:, :1].conj().imag[:1]
    assert lazy.is_conj() and negated.is_neg() and negated.is_contiguous()
    store.write(0, 2, store.ready([lazy, torch.zeros(2, 1)]))
    store.put(torch.tensor([3]), store.ready([lazy[:1], negated]))
    assert store.columns[0][:2].tolist() == lazy.tolist()
    assert store.columns[1].flatten().tolist() == [0, 0, 0, -2]


def test_leaves_that_require_gradients_are_stored_by_value():
    store = OwnColumns([Field(torch.Size([1]), torch.float32)], [torch.zeros(4, 1)])
    leaf = torch.ones(2, 1, requires_grad=True)
    store.write(1, 2, store.ready([leaf]))
    assert store.columns[0].flatten().tolist() == [0, 1, 1, 0]
    assert not store.columns[0].requires_grad


def test_views_of_the_columns_themselves_can_be_written():
    # The write wraps at the end: its second part would read rows that its first part has overwritten.
    column = torch.arange(1000)
    store = OwnColumns([Field(torch.Size([]), torch.int64)], [column])
    store.write(300, 1000, store.ready([column[:]]))
    assert torch.equal(column, torch.arange(1000).roll(300))
    column.copy_(torch.arange(1000))
    store.put(torch.arange(1, 1000), store.ready([column[:999]]))
    assert column.tolist() == [0, *range(999)]


def test_slots_outside_the_columns_raise_and_change_nothing():
    store = make(OwnColumns)
    before = [bits(column) for column in store.columns]
    for slots in ([10], [-1], [0, 10**12]):
        with pytest.raises(IndexError):
            store.gather(torch.tensor(slots))
        with pytest.raises(IndexError):
            store.put(torch.tensor(slots), store.ready(rows(len(slots))))
    assert [bits(column) for column in store.columns] == before


def test_the_device_decides_the_kind():
    field = Field(torch.Size([]), torch.float32)

    def kind(column, exclusive):
        return type(column_store(ExistingColumns([column], exclusive), [("x",)], [field], 2))

    assert kind(torch.zeros(2), True) is OwnColumns
    assert kind(torch.zeros(2), False) is UserColumns
    assert kind(torch.zeros(2, device="meta"), True) is DeviceColumns
