"""The buffer writes, samples, indexes and iterates, and rejects invalid calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from gleanrl.errors import (
    EmptyBufferError,
    IndexRangeError,
    InvalidArgumentError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.oracle import clock, fingerprint, ted

STORAGES = [LazyTensorStorage, LazyMemmapStorage]
SAMPLERS = [RandomSampler, SamplerWithoutReplacement]


@pytest.mark.parametrize("chunks", [[5], [20, 20], [20, 21], [7, 100, 3], [40], [1] * 50])
@pytest.mark.parametrize("streams", [None, 1, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_each_index_and_sample_refers_to_the_right_row(storage, sampler, streams, chunks):
    ndim = 1 if streams is None else 2
    rb = ReplayBuffer(storage=storage(40, ndim=ndim), sampler=sampler(seed=0))
    per_step = streams or 1
    capacity = -(-40 // per_step)
    start = 0
    for chunk in chunks:
        index = rb.extend(ted(chunk, start, streams))
        start += chunk
        kept = min(chunk, capacity)
        assert index.shape == ((chunk,) if ndim == 1 else (chunk * per_step, 2)), "one for each row"
        gone = (chunk - kept) * per_step
        assert (index[:gone] == -1).all()
        written = rb[index[gone:]]
        newest = torch.arange(start - kept, start).repeat_interleave(per_step)
        assert torch.equal(clock(written), newest)
        if ndim == 2:
            assert torch.equal(written["observation"][:, 0], torch.arange(per_step).repeat(kept).float())
        low = max(start - capacity, 0)
        assert len(rb) == (start - low) * per_step
        rows, info = rb.sample(60, return_info=True)
        times = clock(rows)
        assert bool((times >= low).all() and (times < start).all())
        where = info["index"] if ndim == 1 else info["index"][0]
        assert torch.equal(where, times % capacity)
        if ndim == 2:
            assert torch.equal(rows["observation"][:, 0].long(), info["index"][1])
        assert (rb[info["index"]] == rows).all()
        assert bool((info["generation"] >= 1).all())
        rb._storage.check_valid()
        rb._writer.check_valid()


def test_generations_count_writes():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(25))
    for _ in range(3):
        rb.add(ted(1, 99)[0])
    rb[0] = ted(1, 98)[0]
    generations = rb._storage.generation(torch.arange(10)).tolist()
    assert generations == [2, 1, 1, 1, 1, 2, 2, 2, 1, 1]
    _, info = rb.sample(200, return_info=True)
    assert info["generation"].tolist() == [generations[slot] for slot in info["index"].tolist()]


def test_add_one_row_at_a_time():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    data = ted(8)
    assert [rb.add(data[t]) for t in range(8)] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert clock(rb[:]).tolist() == [5, 6, 7, 3, 4]
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    data = ted(4, streams=3)
    assert [rb.add(data[:, t]).tolist() for t in range(3)] == [
        [[0, 0], [0, 1], [0, 2]],
        [[1, 0], [1, 1], [1, 2]],
        [[0, 0], [0, 1], [0, 2]],
    ]


def test_time_is_moved_to_the_front():
    data = torch.arange(24).view(2, 3, 4)
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3))
    rb.extend(data)
    assert rb.dim_extend == 2 and rb._storage.shape == (4, 3, 2)
    assert torch.equal(rb[:], data) and torch.equal(rb.storage[:], data.transpose(0, 2))
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2), dim_extend=0)
    rb.extend(data)
    assert torch.equal(rb[:], data)
    rb = ReplayBuffer(storage=LazyTensorStorage(24), dim_extend=1)
    rb.extend(TensorDict({"x": data}, [2, 3]))
    assert rb._storage.shape == (3,) and torch.equal(rb[:]["x"], data.transpose(0, 1))
    with pytest.raises(InvalidArgumentError, match="dim_extend"):
        ReplayBuffer(dim_extend=-1)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("call", ["extend", "add", "set"])
def test_a_failed_write_changes_nothing(call, ndim):
    rb = ReplayBuffer(storage=LazyTensorStorage(9, ndim=ndim), sampler=SamplerWithoutReplacement(seed=0))
    streams = 3 if ndim == 2 else None
    rb.extend(ted(5, 0, streams))
    rb.sample(2)
    before = fingerprint(rb.state_dict()), rb.stats(), rb._storage.version
    good = ted(2, 5, streams)
    bad = [
        # An assignment by index would create a column.
        good.clone().set("extra", torch.zeros(*good.batch_size, 1)),
        good.exclude("action"),
        good.clone().set("observation", good["observation"].double()),
        good.clone().set(("next", "reward"), torch.zeros(*good.batch_size, 2)),
        torch.zeros(2, 3),
    ]
    for data in bad[call == "set" :]:
        one = data[:, 0] if ndim == 2 else data[0]
        with pytest.raises((SchemaError, TypeError)):
            if call == "extend":
                rb.extend(data)
            elif call == "add":
                rb.add(one)
            else:
                rb[0 if ndim == 1 else (slice(None), 0)] = one
    assert (fingerprint(rb.state_dict()), rb.stats(), rb._storage.version) == before


def test_extend_leaves_its_input_alone_and_keeps_nothing_of_it():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    data = ted(6).lock_()
    before = fingerprint({str(k): v for k, v in data.items(True, True)})
    rb.extend(data)
    assert fingerprint({str(k): v for k, v in data.items(True, True)}) == before
    data.unlock_()["observation"].zero_()
    assert clock(rb[:]).tolist() == list(range(6))


def test_samples_can_be_written_again():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(6))
    rows, info = rb.sample(4, return_info=True)
    assert set(rows.keys()) == set(ted(1).keys()), "sample adds no key"
    rows["index"], rows["_weight"] = info["index"], torch.ones(4)
    rows["priority_weight"], rows["_generation"] = torch.ones(4), info["generation"]
    rb.extend(rows)
    assert "_weight" in rows.keys()
    assert set(rb.sample(2).keys()) == set(ted(1).keys())
    rb.add(rows[0])
    rb[0] = rows[0]


def test_a_buffer_can_be_extended_from_its_own_rows():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(8))
    rb.extend(rb[:5])
    assert clock(rb[:]).tolist() == [2, 3, 4, 3, 4, 5, 6, 7, 0, 1]


def test_a_list_holds_single_records():
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    data = ted(5)
    assert rb.extend([data[t] for t in range(5)]).tolist() == [0, 1, 2, 3, 4]
    assert clock(rb[:]).tolist() == [0, 1, 2, 3, 4]
    trees = ReplayBuffer(storage=LazyTensorStorage(30))
    trees.extend(
        [{"a": torch.tensor(1), "b": (torch.ones(2),)}, {"a": torch.tensor(2), "b": (torch.zeros(2),)}]
    )
    assert trees[:]["a"].tolist() == [1, 2]
    steps = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2))
    data = ted(5, streams=3)
    steps.extend([data[:, t] for t in range(5)])
    assert steps._storage.shape == (5, 3)
    assert (steps[:] == data).all() and (steps.storage[:] == data.transpose(0, 1)).all()
    for bad in ([ted(1)[0], torch.ones(1)], [torch.ones(1), torch.ones(2)], []):
        with pytest.raises(SchemaError, match="extend"):
            rb.extend(bad)


def test_strided_data_is_stored():
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    rb.extend(ted(20)[::2])
    assert clock(rb[:]).tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_empty_buffer_cant_be_sampled(sampler):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(), batch_size=2)
    for act in (rb.sample, lambda: next(iter(rb))):
        with pytest.raises(EmptyBufferError, match="the storage is empty"):
            act()
    rb.extend(ted(3))
    rb.empty()
    with pytest.raises(RuntimeError, match="the storage is empty"):
        rb.sample()


@pytest.mark.parametrize("size", [0, -1, 1.5, "3", True])
def test_bad_batch_sizes_raise(size):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(3))
    with pytest.raises(InvalidArgumentError, match="batch_size: expected an integer of 1 or more"):
        rb.sample(size)
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        ReplayBuffer(batch_size=size)


def test_missing_batch_size_raises():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(3))
    with pytest.raises(RuntimeError, match="no batch_size was given"):
        rb.sample()
    with pytest.raises(RuntimeError, match="needs the batch_size argument"):
        next(iter(rb))
    with pytest.raises(ValueError, match="drop_last"):
        ReplayBuffer(sampler=SamplerWithoutReplacement(drop_last=True))


def test_another_batch_size_warns_and_is_used():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(ted(3))
    assert rb.sample().batch_size == (4,)
    with pytest.warns(UserWarning, match="batch_size=7 differs"):
        assert rb.sample(7).batch_size == (7,)
    assert rb.sample(4).batch_size == (4,)


def test_iteration_is_one_epoch():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(seed=0), batch_size=4)
    rb.extend(ted(10))
    for _ in range(3):
        batches = [clock(batch) for batch in rb]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_iteration_after_a_break_is_a_whole_epoch(shuffle, drop_last):
    sampler = SamplerWithoutReplacement(drop_last, shuffle, seed=0)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(ted(10))
    for taken in (1, 2):
        for number, _ in enumerate(rb, 1):
            if number == taken:
                break
        batches = [clock(batch) for batch in rb]
        assert [len(batch) for batch in batches] == ([4, 4] if drop_last else [4, 4, 2])
        assert len(set(torch.cat(batches).tolist())) == (8 if drop_last else 10)
    rb.sample()
    assert len(list(rb)) == (2 if drop_last else 3), "samples before the loop don't shorten it"


def test_restored_buffer_continues_the_epoch():
    def make() -> ReplayBuffer:
        sampler = SamplerWithoutReplacement(seed=0)
        return ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)

    rb, other = make(), make()
    rb.extend(ted(10))
    epoch = clock(next(iter(rb))).tolist()
    other.load_state_dict(rb.state_dict())
    for again in (rb, other):
        rest = torch.cat([clock(again.sample()), clock(again.sample())]).tolist()
        assert sorted(epoch + rest) == list(range(10)) and again.sampler.ran_out


def test_pin_memory_without_cuda_is_refused():
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="pin_memory=True needs a CUDA device"):
            ReplayBuffer(pin_memory=True)
    ReplayBuffer(prefetch=0)


def test_index_applies_collate_fn_and_keys():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), collate_fn=lambda rows: rows["next", "reward"].flatten())
    rb.extend(ted(6))
    assert rb[[4, 1]].tolist() == [4, 1]
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(6))
    assert rb["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert rb["collector"].batch_size == (6,)
    assert clock(rb[-1][None]).tolist() == [5]
    with pytest.raises(IndexRangeError):
        rb[6]
    rb["next", "reward"] = torch.arange(6.0)[:, None] * 10
    assert rb[2]["next", "reward"].tolist() == [20]
    assert rb[2]["observation"].tolist() == ted(6)[2]["observation"].tolist()
    with pytest.raises(SchemaError, match="expected shape"):
        rb["next", "reward"] = torch.zeros(6, 2)
    rb["more"] = torch.ones(6, 2)
    assert (
        rb["more"].unique().tolist() == [1] and rb["observation"].tolist() == ted(6)["observation"].tolist()
    )


def test_positions_can_be_replaced():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(ted(6))
    rb[[0, 3, 0]] = ted(3, 100)
    rb[4:] = ted(2, 200)
    assert clock(rb[:]).tolist() == [102, 1, 2, 101, 200, 201]
    assert rb._writer.cursor == 6 and len(rb) == 6
    with pytest.raises(SchemaError, match="the index selects"):
        rb[:2] = ted(3)
    with pytest.raises(IndexRangeError):
        rb[6] = ted(1)[0]
    rb[torch.zeros(6, dtype=torch.bool)] = ted(0)


def test_seed_determines_the_samples():
    def first(**options: int) -> list[int]:
        rb = ReplayBuffer(storage=LazyTensorStorage(100), **options)
        rb.extend(ted(100))
        return clock(rb.sample(20)).tolist()

    assert first(seed=3) == first(seed=3) != first(seed=4)
    torch.manual_seed(0)
    expected = first()
    torch.manual_seed(0)
    assert first() == expected
    rb = ReplayBuffer(storage=LazyTensorStorage(100), seed=9)
    rb.extend(ted(100))
    rb.set_seed(3)
    assert clock(rb.sample(20)).tolist() == first(seed=3)


def test_stats_count():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    rb.extend(ted(7))
    rb.extend(ted(7))
    rb[0] = ted(1)[0]
    rb.sample()
    assert rb.stats() == (10, 10, 15, 1, 0, 0, None, None)
    assert "LazyTensorStorage(10 of 10 rows" in repr(rb)


@pytest.mark.parametrize("position", [torch.tensor(2), np.array(2), torch.tensor(-2, dtype=torch.int32)])
def test_a_single_position_may_be_a_number_of_any_library(position):
    rows = TensorDict({"x": torch.arange(4), "y": torch.arange(8).view(4, 2)}, [4])
    for storage in (LazyTensorStorage(5), ListStorage(5)):
        rb = ReplayBuffer(storage=storage)
        rb.extend(rows)
        for found in (rb[position], rb[(position,)]):
            assert found.batch_size == () and int(found["x"]) == 2 and found["y"].tolist() == [4, 5]
    objects = ReplayBuffer(storage=ListStorage(5))
    objects.extend([*"abcd"])
    assert objects[position] == "c"
    wide = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    wide.extend(rows.expand(2, 4))
    assert wide[:, position]["x"].tolist() == [2, 2] and int(wide[position - position, position]["x"]) == 2


def test_stats_can_be_read_by_name_like_a_dictionary():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    rb.extend(ted(4))
    rb.sample()
    stats = rb.stats()
    assert stats["size"] == stats["rows"] == stats.size == 4 and stats["capacity"] == 10
    assert stats["utilization"] == 0.4 and stats["batches_sampled"] == 1 and stats[0] == 4
    assert dict(stats) == {name: getattr(stats, name) for name in stats.keys()}
    with pytest.raises(KeyError, match="'reward' isn't a counter of a buffer; there are rows"):
        stats["reward"]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_records_without_the_first_dimensions_of_an_index_are_repeated_over_them(storage):
    rb = ReplayBuffer(storage=storage(100, ndim=2))
    rb.extend(TensorDict({"a": torch.zeros(4, 25), "n": {"b": torch.zeros(4, 25, 2)}}, [4, 25]))
    ten = torch.arange(10.0)
    rb[:, 10:20] = TensorDict({"a": ten, "n": {"b": ten[:, None].expand(10, 2)}}, [10])
    assert torch.equal(rb[:]["a"][:, 10:20], ten.expand(4, 10)) and rb[:]["a"].sum() == 4 * 45
    assert torch.equal(rb[:]["n", "b"][:, 10:20, 1], ten.expand(4, 10))
    rb[1:3] = TensorDict({"a": torch.ones(25), "n": {"b": torch.ones(25, 2)}}, [25])
    assert rb[:]["a"][1:3].eq(1).all() and rb[:]["a"][[0, 3]].sum() == 2 * 45
    for size in ([1, 10], [4, 1], [5], [4], []):
        wrong = TensorDict({"a": torch.zeros(size), "n": {"b": torch.zeros(*size, 2)}}, size)
        with pytest.raises(SchemaError):
            rb[:, 10:20] = wrong
    flat = ReplayBuffer(storage=storage(10))
    flat.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    with pytest.raises(SchemaError):
        flat[2:5] = TensorDict({"a": torch.tensor(1.0)}, [])
