"""Several processes can extend and sample a buffer at once."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import warnings

import cloudpickle
import pytest
import torch
import torch.multiprocessing

from gleanrl.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MinSize,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gleanrl.data.replay_buffers.storages.shared import SharedTensorStorage
from gleanrl.errors import UnsupportedError
from tests.data.replay_buffers.familiar import Ring
from tests.data.replay_buffers.sharing import check, die, in_child, made, rows, work, write_for_ever
from tests.interrupts import interruptions

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def started(way: str, act, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.multiprocessing if way == "torch" else multiprocessing
        process = module.get_context("spawn" if way == "torch" else way).Process(target=act, args=arguments)
        process.start()
    return process


@pytest.mark.parametrize(
    ("way", "stored"),
    [
        ("fork", 0),
        ("fork", 100),
        pytest.param("spawn", 0, marks=pytest.mark.slow),
        pytest.param("torch", 100, marks=pytest.mark.slow),
    ],
)
def test_processes_extend_and_sample_at_once(way, stored):
    buffer, writes, count = made(100, stored), 60, 7
    others = [started(each, work, buffer, n, writes, count) for n, each in ((1, way), (2, "fork"))]
    work(buffer, 3, writes, count)
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    assert len(buffer) == 100 and buffer.stats().rows_written == stored + 3 * writes * count
    check(buffer[:])
    # Each write is contiguous and whole, also around the end of the ring.
    key = buffer[:]["key"].roll(-buffer.storage.end)[100 % count :].view(-1, count)
    assert (key.diff(dim=1) == 1).all() and (key[:, 0] % 100_000 % count == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_buffer_that_is_sent_to_a_spawned_process_becomes_shared(storage):
    buffer = ReplayBuffer(storage=storage(100), batch_size=16)
    buffer.extend(rows(0, 0, 50))
    other = started("spawn", work, buffer, 1, 10, 7)
    assert buffer.shared
    other.join(60)
    assert other.exitcode == 0 and buffer.stats().rows_written == 50 + 10 * 7
    check(buffer[:])


def test_other_processes_continue_after_a_writer_is_killed():
    buffer = made(50, 50)
    for turn in range(15):
        seen, begun = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            victim, other = os.fork(), 0
            if not victim:
                write_for_ever(buffer, 1 + turn, begun)
            other = os.fork()
            if not other:
                try:
                    work(buffer, 50 + turn, 20, 3)
                    os._exit(0)
                except BaseException:
                    os._exit(1)
        assert os.read(seen, 1) == b"x"
        for _ in range(turn):  # varies the moment of the kill
            check(buffer.sample())
        os.kill(victim, signal.SIGKILL)
        work(buffer, 99, 5, 4)
        assert os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == -signal.SIGKILL
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
        check(buffer[:])
        buffer.storage.check_valid()
        os.close(seen)
        os.close(begun)


def test_the_lock_is_free_though_a_child_of_the_killed_one_lives():
    buffer = made(10, 3)
    kept, wait = os.pipe()

    def hold() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if not os.fork():
                os.close(wait)
                os.read(kept, 1)  # lives until the test ends
                os._exit(0)
        with buffer.storage.guard():
            die()

    assert in_child(hold) == -signal.SIGKILL
    assert len(buffer) == 3
    os.close(wait)
    os.close(kept)


def test_rows_that_another_process_overwrites_during_a_fetch_are_drawn_again(monkeypatch):
    buffer = made(50, 50)
    fetch, overtaken = SharedTensorStorage.fetch, []

    def overtake(self, slots, paths=None):
        found = fetch(self, slots, paths)
        if not overtaken:
            overtaken.append(in_child(lambda: buffer.extend(rows(1, 0, 50))))
        return found

    monkeypatch.setattr(SharedTensorStorage, "fetch", overtake)
    batch, info = buffer.sample(return_info=True)
    assert overtaken == [0] and (batch["key"] >= 100_000).all() and buffer.stats().rows_redrawn == 16
    assert torch.equal(info["generation"], buffer.generation(info["index"]))


def test_each_process_has_separate_epochs():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(seed=0), batch_size=5, shared=True
    )
    buffer.extend(rows(0, 0, 20))
    first = buffer.sample()["key"].tolist()

    def epoch() -> None:
        assert sorted(torch.cat([batch["key"] for batch in buffer]).tolist()) == [*range(20)]

    assert in_child(epoch) == 0
    rest = torch.cat([buffer.sample()["key"] for _ in range(3)]).tolist()
    assert sorted(first + rest) == [*range(20)]
    assert in_child(lambda: buffer.extend(rows(1, 0, 20))) == 0
    assert (buffer.sample()["key"] >= 100_000).all()


def test_slices_include_the_writes_of_another_process():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=3, seed=0), batch_size=30, shared=True
    )
    buffer.extend(rows(0, 0, 40))
    buffer.sample()
    for turn in range(6):
        assert in_child(lambda turn=turn: buffer.extend(rows(1, 15 * turn, 15))) == 0
        key = buffer.sample()["key"].view(-1, 3)
        assert (key.diff(dim=1) == 1).all() and (key[:, 0] // 5 == key[:, 2] // 5).all()
    assert (buffer.sample()["key"] >= 100_000).all()


def test_copies_draw_other_numbers_the_same_in_every_run():
    def drawn() -> list[list[int]]:
        buffer = made(1000, 1000, sampler=RandomSampler(seed=0))
        copies = [
            copy.deepcopy(buffer),
            pickle.loads(pickle.dumps(buffer)),
            cloudpickle.loads(cloudpickle.dumps(buffer)),
        ]
        return [one.sample()["key"].tolist() for one in (buffer, *copies)]

    sequences = drawn()
    assert len({*map(tuple, sequences)}) == 4 and drawn() == sequences


def test_prefetch_and_the_state_of_all():
    buffer = made(30, 20, prefetch=2)
    for _ in range(5):
        check(buffer.sample())
    state = buffer.state_dict()
    assert in_child(lambda: buffer.extend(rows(1, 0, 30))) == 0
    assert (buffer.sample()["key"] >= 100_000).all()
    assert in_child(lambda: buffer.load_state_dict(state)) == 0
    assert sorted(buffer[:]["key"].tolist()) == [*range(20)] and (buffer.sample()["key"] < 20).all()
    assert in_child(buffer.empty) == 0 and len(buffer) == 0


def test_unshareable_parts_are_refused_by_name():
    storage = LazyTensorStorage(4)
    refused = {
        "a PrioritizedSampler keeps its priorities": {"sampler": PrioritizedSampler(4, 1.0, 1.0)},
        "a TensorDictMaxValueWriter tracks": {"writer": TensorDictMaxValueWriter()},
        "a Ring tracks the records": {"writer": Ring()},
    }
    for message, parts in refused.items():
        with pytest.raises(UnsupportedError, match=message):
            ReplayBuffer(storage=storage, shared=True, **parts)
    assert type(storage) is LazyTensorStorage
    with pytest.raises(UnsupportedError, match="PrioritizedSampler"):
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4)).share()
    buffer = ReplayBuffer(storage=storage).share()
    assert buffer.shared and buffer.share() is buffer and len(buffer) == 0
    for change in (
        lambda: buffer.set_sampler(PrioritizedSampler(4, 1.0, 1.0)),
        lambda: buffer.set_writer(TensorDictMaxValueWriter()),
        lambda: buffer.set_storage(LazyTensorStorage(4)),
        lambda: buffer.share(False),
    ):
        with pytest.raises(UnsupportedError):
            change()
    buffer.set_sampler(SamplerWithoutReplacement())


def test_a_shared_storage_makes_its_next_buffer_shared():
    storage = made(4).storage
    buffer = ReplayBuffer(storage=storage)
    assert buffer.shared and in_child(lambda: buffer.extend(rows(1, 0, 3))) == 0 and len(buffer) == 3


def test_a_name_of_memory_that_is_gone():
    pickled, read = [], os.pipe()

    def give() -> None:
        os.write(read[1], pickle.dumps(made(4, 2)))

    assert in_child(give) == 0
    with pytest.raises(FileNotFoundError, match="the process has ended or closed it"):
        pickle.loads(os.read(read[0], 1 << 16))
    del pickled
    for end in read:
        os.close(end)


@pytest.mark.parametrize("stored", [5, 25])
def test_an_interrupt_leaves_the_lock_free_and_a_write_whole(stored):
    calls = {
        "extend": lambda buffer: buffer.extend(rows(1, 0, 7)),
        "empty": lambda buffer: buffer.empty(),
        "sample": lambda buffer: buffer.sample(),
    }
    for call in calls.values():
        outcomes = set()
        for buffer, place in interruptions(lambda: made(20, stored), call, most=60):
            other = copy.deepcopy(buffer)
            key = other[:]["key"].tolist() if len(other) else []
            assert key == (buffer[:]["key"].tolist() if len(buffer) else []), place
            new = len({*key} & {*range(100_000, 100_007)})
            assert new in (0, 7), place
            outcomes.add((len(key), new))
            if key:
                check(other[:])
            other.extend(rows(2, 0, 2))
            other.storage.check_valid()
        assert len(outcomes) <= 2


def test_unshareable_buffer_names_a_remedy_for_a_spawned_process():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), sampler=PrioritizedSampler(4, 0.6, 0.4), batch_size=2
    )
    with pytest.raises(
        UnsupportedError, match=r"spawned .*: pass its state_dict\(\) instead, or create the buffer there"
    ):
        started("spawn", print, buffer)


def test_refused_sharing_is_refused_again_at_the_next_use():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(10),
        sampler=PrioritizedSampler(10, 1.0, 1.0),
        shared=True,
        delayed_init=True,
    )
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="PrioritizedSampler"):
            buffer.extend(torch.arange(3))
        assert not buffer.initialized


@pytest.mark.parametrize(
    ("sampler", "options"),
    [(PrioritizedSampler(10, 1.0, 1.0), {}), (RandomSampler(), {"rate_limiter": MinSize(2)})],
    ids=["sampler", "rate limiter"],
)
def test_refused_sharing_leaves_the_parts_usable_in_another_buffer(sampler, options):
    storage = LazyTensorStorage(10)
    reader = ReplayBuffer(storage=storage)
    with pytest.raises(UnsupportedError) as refused:
        ReplayBuffer(storage=storage, sampler=sampler, shared=True, **options)
    # The traceback in `refused` keeps the failed buffer alive.
    assert refused.value.__traceback__ is not None and sampler.owner is None
    assert type(storage) is LazyTensorStorage and not reader.shared and reader.stats().rate_limiter is None
    assert ReplayBuffer(storage=storage, sampler=sampler).extend(torch.arange(3)).tolist() == [0, 1, 2]
    assert len(reader) == 3
