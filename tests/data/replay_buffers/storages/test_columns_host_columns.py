"""The core uses the right memory of CPU columns, even if another owner moves a view or a given tensor."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from gleanrl._arrays.schema import Field
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, TensorStorage
from gleanrl.data.replay_buffers.storages import columns
from gleanrl.data.replay_buffers.storages.columns import (
    HostColumns,
    OwnColumns,
    ParentsColumns,
    UserColumns,
)
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import fill
from tests.lazy import freed, negated
from tests.ways import both_ways

# Moves the memory of views and of given tensors in every way that torch offers. A core that kept an address would
# corrupt the heap and end the process.
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


def test_given_tensors_still_belong_to_the_user():
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


by = both_ways(columns)

X, N, Z = torch.arange(8.0).view(4, 2), torch.arange(4), torch.complex(torch.ones(4), torch.arange(4.0))


def a_buffer(**more):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend({"x": torch.zeros(1, 2), "n": torch.zeros(1, dtype=torch.int64), **more})
    return buffer


@pytest.mark.parametrize(
    "given",
    [
        X,
        X.clone().requires_grad_(),
        torch.nn.Parameter(X),
        X.t().contiguous().t(),
        negated(X),
        torch.cat([X, X], 1)[:, :2],
    ],
    ids=["plain", "grad", "subclass", "strided", "negated", "part"],
)
# Turn 0 is the first write of a buffer; turn 1 is a write around the end.
@pytest.mark.parametrize("turn", range(2))
def test_tensors_of_any_kind_are_written_correctly(by, given, turn):
    buffer = a_buffer()
    for _ in range(2 * turn):
        buffer.extend({"x": X + 50, "n": N})
    index = buffer.extend({"x": given, "n": N})
    assert index.dtype == torch.int64 and index.tolist() == ([9, 0, 1, 2] if turn else [1, 2, 3, 4])
    assert buffer[index]["x"].equal(X) and buffer[index]["n"].equal(N)
    index = buffer.add({"x": given[2], "n": N[2]})
    assert buffer[index]["x"].equal(X[2])
    buffer.storage.check_valid()


def test_lazily_conjugated_numbers_are_stored_resolved(by):
    buffer = a_buffer(z=torch.zeros(1, dtype=torch.complex64))
    assert buffer[buffer.extend({"x": X, "n": N, "z": Z.conj()})]["z"].equal(Z.conj().resolve_conj())


def test_write_of_the_buffers_own_rows_uses_their_earlier_values(by):
    """Every row of the write has the value from before the write."""
    buffer = a_buffer()
    buffer.extend({"x": X, "n": N})
    for start in (10, 20, 30):
        buffer.extend({"x": X[:3] + start, "n": N[:3] + start})
    buffer.storage.end = 8
    rows = buffer[6:10]  # the second half of the write reads slots that the first half overwrites
    before = {key: leaf.clone() for key, leaf in rows.items()}
    index = buffer.extend(rows)
    assert index.tolist() == [8, 9, 0, 1]
    assert all(buffer[index][key].equal(before[key]) for key in before)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.double(), r"'x' expected shape \(4, 2\) torch.float32, got \(4, 2\) torch.float64"),
        (X.view(torch.int32), r"expected shape \(4, 2\) torch.float32, got \(4, 2\) torch.int32"),
        (X.view(2, 4), r"expected shape \(4, 2\) torch.float32, got \(2, 4\)"),
        (X[:3], r"expected shape \(4, 2\) torch.float32, got \(3, 2\)"),
    ],
)
def test_records_that_do_not_fit_are_refused(by, x, message):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(TensorDict({"x": X, "n": N}, [4]))
    version = buffer.storage.version
    wrong = TensorDict({"n": N}, [4])
    wrong._tensordict["x"] = x  # a TensorDict's own checks prevent this
    with pytest.raises(SchemaError, match=message):
        buffer.extend(wrong)
    assert buffer.storage.version == version and len(buffer) == 4


@pytest.mark.parametrize("dtype", [torch.uint4, torch.bits8, torch.float8_e5m2, torch.bfloat16])
def test_rare_dtypes_are_stored_exactly(by, dtype):
    rows = torch.arange(16, dtype=torch.uint8).view(8, 2).view(dtype)
    plain = torch.arange(8, dtype=torch.uint8).view(4, 2)
    shape = rows.shape[1:]
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(rows[:1])
    index = buffer.extend(rows[1:5])
    assert buffer[index].view(torch.uint8).equal(rows[1:5].view(torch.uint8)) and buffer[index].dtype == dtype
    with pytest.raises(SchemaError, match="uint8"):
        buffer.extend(plain[:, : shape[0]])
    before = buffer[:].view(torch.uint8).clone()
    index = buffer.extend(buffer[:])  # torch can't copy all of these dtypes
    assert buffer[index].view(torch.uint8).equal(before)


def test_rows_that_are_no_steps_are_left_out(by):
    steps = torch.tensor([True, False, True, False])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    rows = TensorDict({"x": X, "collector": {"mask": steps}}, [4])
    for _ in range(2):
        index = buffer.extend(rows)
        assert (index >= 0).equal(steps) and buffer[index[steps]]["x"].equal(X[steps])


def test_rows_of_the_buffer_itself_of_which_some_are_no_steps(by):
    rows = TensorDict({"x": N, "collector": {"mask": torch.ones(4, dtype=torch.bool)}}, [4])
    for copied in (False, True):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4))
        buffer.extend(rows)
        buffer[0] = TensorDict({"x": torch.tensor(0), "collector": {"mask": torch.tensor(False)}})
        given = buffer[0:4].clone() if copied else buffer[0:4]
        assert buffer.extend(given).tolist() == [-1, 0, 1, 2]
        assert buffer[:]["x"].tolist() == [1, 2, 3, 3] and buffer[:]["collector", "mask"].all()


def test_another_dimension_is_time(by):
    turned = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=1)
    for start in range(2):
        turned.extend(TensorDict({"x": torch.arange(6).view(2, 3) + 6 * start}, [2, 3]))
        assert turned.storage[start * 3 : start * 3 + 3]["x"].equal(
            torch.arange(6).view(2, 3).t() + 6 * start
        )
    with pytest.raises(SchemaError, match="expected batch dimensions"):
        turned.extend(TensorDict({"x": torch.arange(6).view(3, 2)}, [3, 2]))


@pytest.mark.parametrize(
    ("column", "seen"),
    [
        (torch.zeros(8, 2), True),
        (torch.zeros(8, dtype=torch.uint8).view(torch.uint4), True),
        (torch.zeros(8, dtype=torch.complex64), False),
        (torch.zeros(8, dtype=torch.uint8).view(torch.bits8), False),
    ],
)
def test_leaves_are_checked_by_the_core_or_in_python(by, column, seen, monkeypatch):
    store = OwnColumns([Field(column.shape[1:], column.dtype)], [column])
    leaf = column[:3].view(torch.uint8).clone().view(column.dtype)  # torch can't copy uint4
    lead = torch.Size([3])
    by_core = by == "core" and seen
    assert store.fits([leaf], lead) is by_core
    asked = []
    monkeypatch.setattr(
        HostColumns, "addresses", lambda self, leaves: asked.append(leaves) or [leaf.data_ptr()]
    )
    store.write(0, 3, [leaf])
    assert bool(asked) is not by_core


@pytest.mark.parametrize("kind", [UserColumns, ParentsColumns])
def test_columns_that_may_have_moved_or_are_not_to_be_written(by, kind):
    column = torch.zeros(8)
    assert not kind([Field(column.shape[1:], column.dtype)], [column]).fits(
        [column[:3].clone()], torch.Size([3])
    )


def within(transform):
    """Return a function that extends a buffer with the wrapped tensor of a transform of torch.func."""
    return lambda buffer: transform(lambda x: (buffer.extend(x), x.sum())[1])(torch.ones(3, 2))


def with_fakes(buffer):
    with torch._subclasses.FakeTensorMode():
        rows = torch.ones(3, 2)
    buffer.extend(rows)


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.extend(freed(torch.ones(3, 2))),
        lambda buffer: buffer.extend(torch._efficientzerotensor((3, 2))),
        lambda buffer: buffer.extend(torch._efficientzerotensor((9, 2))),  # more rows than the storage has
        lambda buffer: buffer.extend(freed(torch.ones(2, 3).t())),
        lambda buffer: buffer.extend(torch.ones(3, 2).to_mkldnn()),
        lambda buffer: buffer.extend(torch.ones(3, 2, device="meta")),
        within(torch.func.grad),
        with_fakes,
    ],
    ids=["freed", "zeros", "many-zeros", "strided", "mkldnn", "meta", "grad", "fake"],
)
@pytest.mark.parametrize("first", [True, False])
def test_tensors_without_memory_are_refused_before_anything_changes(by, write, first):
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    if not first:
        buffer.extend(torch.zeros(1, 2))
    before, version = len(buffer), buffer.storage.version
    with pytest.raises(SchemaError, match="extend: .* expected a dense tensor, got a"):
        write(buffer)
    assert len(buffer) == before and buffer.storage.version == version
    assert buffer.storage.generations.of_all(5).tolist() == [before, 0, 0, 0, 0]
    assert buffer.storage.initialized is not first


@pytest.mark.parametrize(
    "write", [lambda buffer, rows: buffer.extend(rows), lambda buffer, rows: buffer.__setitem__([0, 1], rows)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_without_memory_is_refused(by, write, masked):
    steps = torch.tensor([True, not masked])
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    rows = TensorDict({"x": torch.arange(2), "collector": {"mask": torch.ones(2, dtype=torch.bool)}}, [2])
    buffer.extend(rows)
    buffer[0:2] = TensorDict({"x": torch.arange(2), "collector": {"mask": steps}}, [2])
    before, version = buffer[:].clone(), buffer.storage.version
    wrong = TensorDict({"x": torch.arange(2), "collector": {"mask": freed(steps)}}, [2])
    with pytest.raises(SchemaError, match="expected a dense tensor, got a tensor without memory"):
        write(buffer, wrong)
    assert (buffer[:] == before).all() and buffer.storage.version == version
