"""The writer of the best records agrees with a sorted list of all offered records."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from gleanrl.errors import (
    InvalidArgumentError,
    MissingKeyError,
    NonFiniteError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import clock, fill, fingerprint, ted


def records(ranks: list[float], start: int = 0) -> TensorDict:
    count = len(ranks)
    return TensorDict(
        {
            "rank": torch.tensor(ranks, dtype=torch.float64),
            "id": torch.arange(start, start + count),
            "wide": torch.arange(start, start + count)[:, None].expand(count, 3).float(),
        },
        [count],
    )


def best(storage=LazyTensorStorage, capacity: int = 3, **options) -> ReplayBuffer:
    writer = TensorDictMaxValueWriter(**{"rank_key": "rank", **options})
    return ReplayBuffer(storage=storage(capacity), writer=writer, batch_size=2, seed=0)


def stored(rb: ReplayBuffer) -> list[int]:
    """Return the ids by slot, after checking that no record is mixed."""
    items = rb.storage.get(slice(None)) if len(rb) else []
    whole = torch.stack(list(items)) if isinstance(items, list) and items else items
    if not len(rb):
        return []
    assert torch.equal(whole["wide"], whole["id"][:, None].expand(-1, 3).float())
    return whole["id"].tolist()


@settings(deadline=None)
@given(
    kind=st.sampled_from([LazyTensorStorage, LazyMemmapStorage, ListStorage]),
    capacity=st.integers(1, 8),
    batches=st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=12), max_size=8),
    duplicated=st.sets(st.integers(0, 7)),
    loaded=st.sets(st.integers(0, 7)),
)
def test_the_content_is_the_top_of_everything_offered(kind, capacity, batches, duplicated, loaded):
    rb = best(kind, capacity)
    offered: list[tuple[int, int]] = []
    for turn, ranks in enumerate(batches):
        start = len(offered)
        offered += [(-rank, start + offset) for offset, rank in enumerate(ranks)]
        data = records(ranks, start)
        index = torch.tensor([rb.add(data[0])]) if len(ranks) == 1 else rb.extend(data)
        ids = stored(rb)
        assert sorted(ids) == sorted(name for _, name in sorted(offered)[:capacity])
        assert index.dtype == torch.int64 and len(index) == len(ranks)
        for offset, slot in enumerate(index.tolist()):
            if slot >= 0:
                assert ids[slot] == start + offset
            else:
                assert start + offset not in ids
        rb.writer.check_valid()
        rb.storage.check_valid()
        if turn in duplicated:
            rb = copy.deepcopy(rb)
        if turn in loaded:
            other = best(kind, capacity)
            other.load_state_dict(pickle.loads(pickle.dumps(rb.state_dict())))
            rb = other


@pytest.mark.parametrize(
    "reduction, expected", [("sum", 3), ("mean", 3), ("max", 1), ("min", 2), ("median", 0)]
)
def test_several_values_become_one(reduction, expected):
    values = torch.tensor([[2.0, 4, 4], [-9, 0, 10], [3, 3, 3], [1, 3, 8]])
    # Sums are 10, 1, 9, 12; maxima 4, 10, 3, 8; minima 2, -9, 3, 1; medians 4, 0, 3, 3.
    rb = best(capacity=1, reduction=reduction)
    index = rb.extend(TensorDict({"rank": values, "id": torch.arange(4)}, [4]))
    assert index.tolist() == [0 if position == expected else -1 for position in range(4)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_ranks_of_any_dtype_are_compared(dtype):
    rb = best(capacity=1)
    rb.extend(TensorDict({"rank": torch.tensor([0, 1, 0]).to(dtype), "id": torch.arange(3)}, [3]))
    assert rb[:]["id"].tolist() == [1]


def test_the_default_rank_is_the_reward():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter())
    rb.extend(ted(20))
    rb.extend(ted(5, start=10))
    assert sorted(clock(rb[:]).tolist()) == [16, 17, 18, 19]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_rank_that_is_no_number_changes_nothing(storage):
    rb = best(storage)
    before = fingerprint(rb.state_dict())
    bad = records([1.0, float("nan"), 2.0])
    with pytest.raises(NonFiniteError, match="extend: the rank 'rank' of record 1 is NaN"):
        rb.extend(bad)
    with pytest.raises(NonFiniteError, match="add"):
        rb.add(bad[1])
    assert fingerprint(rb.state_dict()) == before, "not even the schema is fixed"
    rb.extend(records([1.0, 2.0]))
    before = fingerprint(rb.state_dict())
    for write in (lambda: rb.extend(bad), lambda: rb.__setitem__(0, bad[1])):
        with pytest.raises(NonFiniteError):
            write()
    assert fingerprint(rb.state_dict()) == before


def test_records_without_a_rank_are_refused():
    rb = best()
    before = fingerprint(rb.state_dict())
    with pytest.raises(
        MissingKeyError, match="extend: expected .* at the rank key 'rank', the record has \\['x'\\]"
    ):
        rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
    with pytest.raises(ValueError, match="takes TensorDicts, got Tensor"):
        rb.extend(torch.zeros(2))
    with pytest.raises(SchemaError, match="holds no value"):
        rb.extend(TensorDict({"rank": torch.zeros(2, 0)}, [2]))
    assert fingerprint(rb.state_dict()) == before


def test_arguments_and_storages_that_cant_work():
    with pytest.raises(InvalidArgumentError, match="reduction: expected one of"):
        TensorDictMaxValueWriter(reduction="product")
    with pytest.raises(ValueError, match="ndim=2"):
        ReplayBuffer(storage=LazyTensorStorage(4, ndim=2), writer=TensorDictMaxValueWriter())
    rb = best()
    storage = rb.storage
    with pytest.raises(ValueError, match="ndim=2"):
        rb.set_storage(LazyTensorStorage(4, ndim=2))
    assert rb.storage is storage and storage.owner is rb
    with pytest.raises(UnsupportedError, match="no storage"):
        _ = TensorDictMaxValueWriter().storage


def test_a_filled_storage_is_ranked_when_the_writer_comes():
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(records([5, 1, 3, 2]))  # record 2 replaced record 5
    writer = rb.writer
    with pytest.raises(MissingKeyError, match="'reward'"):
        rb.set_writer(TensorDictMaxValueWriter("reward"))
    assert rb.writer is writer
    rb.set_writer(TensorDictMaxValueWriter("rank"))
    assert rb.extend(records([2.5, 0, 4], start=4)).tolist() == [1, -1, 0] or stored(rb) == [6, 4, 2]
    rb.set_writer(RoundRobinWriter())
    assert rb.extend(records([0.0], start=7)).tolist() == [0]


def test_writer_follows_external_changes_of_the_storage():
    rb = best()
    rb.extend(records([5, 1, 3]))
    rb[0] = records([0.0], start=3)[0]
    assert rb.extend(records([0.5], start=4)).tolist() == [0]
    rb.empty()
    assert rb.extend(records([-1.0, -2.0], start=5)).tolist() == [0, 1]
    fill(rb.storage, records([-3.0], start=7), 2)
    assert rb.extend(records([-2.5], start=8)).tolist() == [2]
    rb.writer.check_valid()
    other = LazyTensorStorage(3)
    while other.version.changes < rb.storage.version.changes:
        fill(other, records([7.0, 8.0, 9.0], start=20))
    rb.set_storage(other)
    assert rb.extend(records([7.5], start=30)).tolist() == [0]
    rb.set_storage(LazyTensorStorage(1))
    assert rb.extend(records([0.0, 1.0], start=9)).tolist() == [-1, 0]


def test_a_wrapped_storage_counts_as_full():
    rb = ReplayBuffer(storage=TensorStorage(records([1.0, 2.0])), writer=TensorDictMaxValueWriter("rank"))
    assert rb.extend(records([1.0, 1.5], start=2)).tolist() == [-1, 0]


def test_failed_write_leaves_the_ranking_unchanged(monkeypatch):
    rb = best()
    rb.extend(records([5, 1, 3]))

    def fail(*args: object) -> None:
        raise OSError("disk")

    with monkeypatch.context() as broken:
        broken.setattr(type(rb.storage), "write_selected", fail)
        with pytest.raises(OSError, match="disk"):
            rb.extend(records([9, 9, 9], start=3))
    rb.writer.check_valid()
    assert rb.extend(records([2.0], start=6)).tolist() == [1]


@pytest.mark.parametrize(
    "state",
    [{}, {"cursor": 0}, {"ages": [0, 1]}, {"ages": torch.tensor([0, 2])}, {"ages": torch.tensor([0, 1, 2])}],
)
def test_a_state_of_something_else_is_refused(state):
    rb = best()
    rb.extend(records([5, 1]))
    before = fingerprint(rb.state_dict())
    with pytest.raises(SchemaError, match="'ages'"):
        rb.load_state_dict({**rb.state_dict(), "_writer": state})
    assert fingerprint(rb.state_dict()) == before


def test_equal_records_are_replaced_newest_first_also_after_a_restore(tmp_path):
    rb = best()
    rb.extend(records([1, 2, 2]))
    rb.extend(records([2.0], start=3))  # goes to slot 0, and is the newest of the equal records
    torch.save(rb.state_dict(), tmp_path / "state.pt")
    other = best()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (rb, other, copy.deepcopy(rb)):
        assert each.extend(records([3.0], start=4)).tolist() == [0]
        assert stored(each) == [4, 1, 2]


def test_samples_hold_the_stored_records():
    rb = best(capacity=5)
    rb.extend(records([float(rank % 17) for rank in range(100)]))
    kept = set(stored(rb))
    seen = {int(name) for _ in range(50) for name in rb.sample(20)["id"]} if rb.batch_size is None else set()
    for _ in range(100):
        batch, info = rb.sample(return_info=True)
        seen |= set(batch["id"].tolist())
        assert torch.equal(rb[info["index"]]["id"], batch["id"])
    assert seen == kept
