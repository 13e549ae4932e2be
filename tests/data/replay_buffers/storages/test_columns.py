"""The two kinds of columns against torch's own indexing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, TensorStorage
from gleanrl.data.replay_buffers.storages.columns import (
    BorrowedColumns,
    ColumnStore,
    DeviceColumns,
    OwnColumns,
    column_store,
)
from gleanrl.errors import SchemaError
from gleanrl.schema import Field
from tests.data.replay_buffers.oracle import fill

ROWS = 10
FIELDS = [
    Field(torch.Size([4]), torch.float32),
    Field(torch.Size([]), torch.int64),
    Field(torch.Size([2, 3]), torch.uint8),
    Field(torch.Size([1]), torch.bool),
    Field(torch.Size([3]), torch.bfloat16),
    Field(torch.Size([2]), torch.complex64),
    Field(torch.Size([5]), torch.float8_e4m3fn),
    Field(torch.Size([0]), torch.float32),
]
KINDS = [OwnColumns, BorrowedColumns, DeviceColumns]


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


@pytest.mark.parametrize("kind", KINDS)
def test_gather(kind):
    store = make(kind)
    slots = torch.tensor([3, 0, 9, 3])
    got = store.gather((slots,))
    for leaf, column, field in zip(got, store.columns, FIELDS, strict=True):
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
    # Around the end: the second span would read what the first has written.
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
            store.gather((torch.tensor(slots),))
        with pytest.raises(IndexError):
            store.put(torch.tensor(slots), store.ready(rows(len(slots))))
    assert [bits(column) for column in store.columns] == before


def test_the_device_decides_the_kind():
    field = Field(torch.Size([]), torch.float32)
    assert type(column_store([field], [torch.zeros(2)], True, 2)) is OwnColumns
    assert type(column_store([field], [torch.zeros(2)], False, 2)) is BorrowedColumns
    assert type(column_store([field], [torch.zeros(2, device="meta")], True, 2)) is DeviceColumns


# Moves the memory behind views, and behind tensors that were given to a storage, in every way that torch has. Where the
# core kept an address, the process ended with a corrupted heap.
MOVES = """
import sys, tempfile, torch.multiprocessing
import torch
from tensordict import TensorDict
from gleanrl.data.replay_buffers import *


def rows(start, count):
    x = torch.arange(start, start + count)
    return {"x": x[:, None] + torch.zeros(1, 3), "half": x[:, None].to(torch.bfloat16).repeat(1, 2), "n": x}

def leaves(data):
    return list(data.values())

def as_dict(start, count):
    return rows(start, count)

def as_tensordict(start, count):
    return TensorDict(rows(start, count), [count])

def given(make):
    mine = make(0, SIZE)
    return TensorStorage(mine), leaves(mine)

def flat(make):
    whole = LazyTensorStorage(SIZE)
    whole.set(range(SIZE), make(0, SIZE))
    return whole, leaves(whole.flatten()[:])

def flat_of_given(make):
    mine = {name: leaf.view(-1, 2, *leaf.shape[1:]) for name, leaf in make(0, SIZE).items()}
    mine = mine if make is as_dict else TensorDict(mine, [SIZE // 2, 2])
    storage = TensorStorage(mine, ndim=2).flatten()
    return storage, leaves(mine)

def shared(queue, leaf):
    queue.put(leaf)
    queue.get()

def resized(leaf):
    try:
        leaf.resize_(4 * SIZE, *leaf.shape[1:])
    except RuntimeError as error:  # a view
        assert "resizable" in str(error), error

SIZE = 5000
queue = torch.multiprocessing.SimpleQueue()
STORAGES = [
    lambda make: (LazyTensorStorage(SIZE), []),
    lambda make: (LazyMemmapStorage(SIZE), []),
    lambda make: (LazyMemmapStorage(SIZE, scratch_dir=tempfile.mkdtemp(dir=sys.argv[1])), []),
    given, flat, flat_of_given,
]
HOLDS = [
    lambda rb, mine: leaves(rb[:]),
    lambda rb, mine: leaves(rb[:3]),
    lambda rb, mine: leaves(rb[7]),
    lambda rb, mine: leaves(rb.storage._storage),
    lambda rb, mine: mine,
]
MOVES = [torch.Tensor.share_memory_, lambda leaf: shared(queue, leaf), resized]
turn = 0
for make in (as_dict, as_tensordict):
    for storage_of in STORAGES:
        for hold in HOLDS:
            turn += 1
            for move in MOVES if hold in (HOLDS[0], HOLDS[-1]) else MOVES[turn % 3:][:1]:
                storage, mine = storage_of(make)
                rb = ReplayBuffer(storage=storage, batch_size=64)
                if not len(rb):
                    rb.extend(make(0, SIZE))
                for leaf in hold(rb, mine):
                    move(leaf)
                leaf = None
                churn = [torch.full((SIZE, 3), -1.0) for _ in range(20)]
                start = 5 * SIZE
                rb.extend(make(start, SIZE // 2))
                one = make(start + SIZE // 2, 1)
                rb.add(one[0] if make is as_tensordict else {name: leaf[0] for name, leaf in one.items()})
                expected = make(start, SIZE // 2 + 1)
                seen, direct = rb[:], storage.fetch(torch.arange(SIZE))
                batch, info = rb.sample(return_info=True)
                at = info["index"]
                for name in ("x", "half", "n"):
                    assert seen[name].equal(direct[name]), name
                    assert seen[name][:SIZE // 2 + 1].equal(expected[name]), name
                    assert batch[name].equal(seen[name][at]), name
                storage.check_valid()
    if make is as_tensordict:
        rb = ReplayBuffer(storage=LazyTensorStorage(SIZE), batch_size=8)
        rb.extend(make(0, SIZE))
        for whole in (rb[:], rb[:3]):
            whole.share_memory_()
        rb[:].memmap_()
        rb.extend(make(SIZE, SIZE))
        assert rb[:]["n"].equal(torch.arange(SIZE, 2 * SIZE)) and int(rb.sample()["n"].min()) >= SIZE
print("whole")
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_moving_the_memory_of_views_and_of_given_tensors_is_noticed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", MOVES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "whole\n" and done.returncode == 0, done.stderr


def test_views_are_live_until_they_are_moved():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4)
    buffer.extend(torch.arange(4.0))
    moved, view = buffer[:], buffer[:]
    assert moved.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    moved.share_memory_()
    moved.zero_()
    view[1] = 9.0
    assert buffer[:].tolist() == [0.0, 9.0, 2.0, 3.0]


def test_a_view_is_pickled_without_the_other_rows():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    buffer.extend(torch.arange(1000.0))
    assert buffer[2:5].untyped_storage().nbytes() == 12


def test_given_tensors_go_on_being_the_users():
    mine = torch.arange(4.0)
    storage = TensorStorage(mine)
    mine.share_memory_()
    mine[0] = 7.0
    assert storage.fetch(torch.tensor([0, 1])).tolist() == [7.0, 1.0]
    fill(storage, torch.tensor([8.0]), 2)
    assert mine.tolist() == [7.0, 1.0, 8.0, 3.0]
    flat = TensorStorage(mine.view(2, 2), ndim=2).flatten()
    fill(flat, torch.tensor([5.0]))
    assert mine[0] == 5.0


def test_given_tensors_that_were_made_too_small():
    mine = torch.arange(4.0)
    storage = TensorStorage(mine)
    mine.untyped_storage().resize_(4)
    for _ in range(2):
        with pytest.raises(SchemaError, match="resized to 4 bytes, its records take 16"):
            storage.fetch(torch.tensor([0]))
    with pytest.raises(SchemaError, match="resized"):
        fill(storage, torch.tensor([1.0]))
    assert storage.generation(torch.tensor([0])).tolist() == [1]
