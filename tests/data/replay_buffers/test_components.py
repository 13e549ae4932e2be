"""Components can be exchanged, and their common state is saved and loaded."""

from __future__ import annotations

import io

import pytest
import torch

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MinSize,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
)
from gleanrl.errors import IncompatibleCheckpointError, InvalidArgumentError, SchemaError, UnsupportedError
from tests.data.replay_buffers.oracle import clock, fill, fingerprint, ted


def buffer(
    storage=LazyTensorStorage, sampler=RandomSampler, ndim: int = 1, seed: int | None = None
) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(40, ndim=ndim), sampler=sampler(seed=seed), batch_size=6)


def data(start: int, count: int, ndim: int):
    return ted(count, start, streams=2 if ndim == 2 else None)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("written", [5, 20, 53])
def test_restored_buffer_continues_with_the_same_samples(storage, sampler, ndim, written):
    rb = buffer(storage, sampler, ndim, seed=0)
    rb.extend(data(0, written, ndim))
    for _ in range(2):
        rb.sample()
    stream = io.BytesIO()
    torch.save(rb.state_dict(), stream)
    stream.seek(0)
    other = buffer(storage, sampler, ndim)
    other.load_state_dict(torch.load(stream, weights_only=True))
    for step in range(6):
        mine, info = rb.sample(return_info=True)
        theirs, other_info = other.sample(return_info=True)
        assert (mine == theirs).all()
        assert torch.equal(info["generation"], other_info["generation"])
        if step % 2:
            more = data(written + 4 * step, 4, ndim)
            assert torch.equal(rb.extend(more), other.extend(more))
    assert fingerprint(rb.state_dict()) == fingerprint(other.state_dict())
    other._storage.check_valid()
    other._writer.check_valid()


def test_the_state_aliases_nothing():
    rb = buffer(seed=0)
    rb.extend(ted(20))
    state = rb.state_dict()
    saved = fingerprint(state)
    other = buffer()
    other.load_state_dict(state)
    for one in (rb, other):
        one.extend(ted(30, 100))
        one.sample()
        one.empty()
    assert fingerprint(state) == saved


@pytest.mark.parametrize("broken", ["_storage", "_sampler", "_writer"])
@pytest.mark.parametrize("how", ["missing", "empty", "foreign"])
def test_a_state_that_doesnt_fit_changes_nothing(broken, how):
    rb = buffer(seed=0)
    rb.extend(ted(20))
    rb.sample()
    state, before = buffer(seed=5).state_dict(), fingerprint(rb.state_dict())
    donor = buffer(seed=5)
    donor.extend(ted(33, 7))
    state = donor.state_dict()
    if how == "missing":
        del state[broken]
    elif how == "empty":
        state[broken] = {}
    else:
        lists = ReplayBuffer(storage=ListStorage(39))
        lists.extend([1, 2])
        state[broken] = lists.state_dict()["_storage"]
    with pytest.raises(SchemaError, match="load_state_dict|generator state"):
        rb.load_state_dict(state)
    assert fingerprint(rb.state_dict()) == before


def test_generations_never_come_again_after_a_restore():
    rb = buffer(seed=0)
    rb.extend(ted(20))
    state = rb.state_dict()
    rb.extend(ted(40, 20))
    _, before = rb.sample(return_info=True)
    rb.load_state_dict(state)
    now = rb._storage.generation(before["index"] % 20)
    assert bool((now > 1).all()), "rows drawn before the restore can be told from those after it"


def test_another_storage_takes_writer_and_sampler_along():
    rb = buffer(sampler=SamplerWithoutReplacement, seed=0)
    rb.extend(ted(20))
    rb.sample()
    old = rb._storage
    fresh = LazyTensorStorage(10)
    fill(fresh, ted(4, 100))
    assert rb.set_storage(fresh) is old
    assert rb.storage is rb._storage is rb._writer.storage is fresh
    assert rb.extend(ted(3, 200)).tolist() == [4, 5, 6]
    assert len(old) == 20
    epoch = torch.cat([clock(batch) for batch in rb])
    assert sorted(epoch.tolist()) == [100, 101, 102, 103, 200, 201, 202]


def test_new_writer_continues_at_the_cursor():
    rb = buffer()
    rb.extend(ted(47))
    old, new = rb._writer, RoundRobinWriter()
    assert rb.set_writer(new) is old
    assert rb.writer is rb._writer is new
    assert rb.add(ted(1, 47)[0]) == 7
    new.check_valid()


def test_exchanged_sampler_draws_stored_rows():
    rb = buffer(seed=0)
    rb.extend(ted(20))
    old, new = rb._sampler, SamplerWithoutReplacement(shuffle=False)
    assert rb.set_sampler(new) is old
    assert rb.sampler is rb._sampler is new
    assert clock(rb.sample()).tolist() == list(range(6))


def test_a_refused_storage_stays_unbounded():
    rb = ReplayBuffer(
        storage=ListStorage(5), sampler=PrioritizedSampler(10, 0.7, 0.5), rate_limiter=MinSize(1)
    )
    refused = ListStorage()
    size = refused.max_size
    with pytest.raises(UnsupportedError, match="rate limiter"):
        rb.set_storage(refused)
    assert refused.max_size == size != 10


def test_a_number_as_storage_names_the_storage_to_write():
    with pytest.raises(InvalidArgumentError, match=r"got 1000; write LazyTensorStorage\(1000\)"):
        ReplayBuffer(storage=1000)


@pytest.mark.parametrize("part", ["storage", "sampler", "writer"])
def test_values_that_are_no_part_are_refused(part):
    with pytest.raises(InvalidArgumentError, match=f"{part}: expected a "):
        ReplayBuffer(**{part: 3})
    rb = buffer()
    with pytest.raises(InvalidArgumentError, match=f"{part}: expected a "):
        getattr(rb, f"set_{part}")(None)
    assert rb._storage.max_size == 40 and rb._writer.storage is rb._storage


@pytest.mark.parametrize(
    "small", [PrioritizedSampler(39, 1.0, 1.0), PrioritizedSliceSampler(39, 1.0, 1.0, slice_len=2)]
)
def test_a_sampler_without_room_for_the_storage_is_refused_before_anything_is_stored(small):
    with pytest.raises(InvalidArgumentError, match="max_capacity=39 is less than the 40 rows"):
        ReplayBuffer(storage=LazyTensorStorage(40), sampler=small)
    rb = ReplayBuffer(storage=LazyTensorStorage(39), sampler=small)
    with pytest.raises(InvalidArgumentError, match="max_capacity=39"):
        rb.set_storage(LazyTensorStorage(40))
    assert rb.storage.max_size == 39 and rb.writer.storage is rb.storage
    large = buffer()
    rb.set_sampler(RandomSampler())
    with pytest.raises(InvalidArgumentError, match="max_capacity=39"):
        large.set_sampler(small)
    assert isinstance(large.sampler, RandomSampler) and small.owner is None


def test_emptying_keeps_memory_schema_and_random_state():
    rb = buffer(seed=0)
    rb.extend(ted(47))
    columns = rb._storage._table
    _, info = rb.sample(return_info=True)
    rb.empty()
    assert len(rb) == 0 and rb._writer.cursor == 0
    assert bool((rb._storage.generation(info["index"]) > info["generation"]).all())
    assert rb.extend(ted(3)).tolist() == [0, 1, 2]
    assert rb._storage._table is columns
    with pytest.raises(SchemaError):
        rb.extend(ted(3).exclude("action"))


@pytest.mark.parametrize("part", ["_storage", "_sampler", "_writer", "_transforms"])
@pytest.mark.parametrize("broken", [None, 3, torch.arange(3)], ids=str)
def test_invalid_state_of_a_part_changes_nothing(part, broken):
    rb = buffer()
    rb.extend(ted(20))
    before = fingerprint(rb)
    with pytest.raises(SchemaError, match="load_state_dict"):
        rb.load_state_dict({**buffer().state_dict(), part: broken})
    assert fingerprint(rb) == before


def test_default_storage_has_the_capacity_of_the_sampler():
    buffer = ReplayBuffer(sampler=PrioritizedSampler(50, 0.6, 0.4), batch_size=10)
    assert buffer.storage.max_size == 50 and ReplayBuffer().storage.max_size == 1000
    buffer.extend(list(range(60)))
    assert set(buffer.sample().tolist()) <= set(range(10, 60))
    with pytest.raises(InvalidArgumentError, match="max_capacity=50 is less than the 100 rows"):
        ReplayBuffer(storage=ListStorage(100), sampler=PrioritizedSampler(50, 0.6, 0.4))


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(20, 0.7, 0.9)],
    ids=["random", "epochs", "priorities"],
)
def test_part_continues_from_its_dump(sampler, tmp_path):
    saved, other = (
        ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler(), batch_size=4) for _ in "ab"
    )
    for buffer in (saved, other):
        buffer.extend(ted(10))
    index = saved.sample(return_info=True)[1]["index"]
    if saved.sampler.takes_priorities:
        saved.update_priority(index, torch.rand(4))
    for name in ("sampler", "writer"):
        getattr(saved, name).dumps(tmp_path / name)
        getattr(other, name).loads(tmp_path / name)
    for _ in range(4):
        want, found = (buffer.sample(return_info=True)[1]["index"] for buffer in (saved, other))
        assert torch.equal(found, want)
    saved.storage.save(tmp_path / "storage")
    empty = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    empty.storage.load(tmp_path / "storage")
    assert (empty[:] == saved[:]).all()
    with pytest.raises(
        IncompatibleCheckpointError,
        match="expected a checkpoint of a RandomSampler, got one of a RoundRobinWriter",
    ):
        empty.sampler.loads(tmp_path / "writer")
