"""Memory of columns on the CPU is where the core looks for it, whoever moves a view or a given tensor."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, TensorStorage
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import fill

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
