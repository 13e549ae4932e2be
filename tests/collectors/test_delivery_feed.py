"""A collector with a buffer extends it with each batch and returns None or the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.collectors.delivery import BufferSink
from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer
from gleanrl.errors import GleanError, InvalidTypeError, UnsupportedError
from tests.collectors.helpers import SCRIPT, make
from tests.fakes_base import CountingEnv


class Recorder:
    """A buffer of another library; records its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.data: list[Any] = []

    def extend(self, data: Any) -> None:
        self.calls.append(("extend", tuple(data.shape)))
        self.data.append(data)

    def add(self, data: Any) -> None:
        self.calls.append(("add", tuple(data.shape)))
        self.data.append(data)


def test_batches_go_in_whole_and_the_iterator_yields_none() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = make(CountingEnv(SCRIPT), total_frames=20, replay_buffer=rb)
    assert list(collector) == [None] * 4 and len(rb) == 20
    torch.manual_seed(0)
    plain = make(CountingEnv(SCRIPT), total_frames=20)
    expected = torch.cat([batch.select("observation", ("collector", "traj_ids")) for batch in plain])
    assert (rb[:].select("observation", ("collector", "traj_ids")) == expected).all()
    stats = collector.stats()
    assert (stats.delivered, stats.batches, stats.discarded) == (20, 4, 0)


def test_a_batch_of_environments_keeps_its_shape() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    collector = make(CountingEnv(SCRIPT, (2,)), frames=10, total_frames=30, replay_buffer=rb)
    assert collector.next() is None and len(rb) == 10 and rb[:].numel() == 10


@pytest.mark.parametrize(("size", "calls"), [((), [("add", ())] * 6), ((2,), [("extend", (2,))] * 3)])
def test_extend_buffer_false_adds_steps_one_by_one(size: tuple[int, ...], calls: list[Any]) -> None:
    rb = Recorder()
    make(CountingEnv(SCRIPT, size), replay_buffer=rb, extend_buffer=False).next()
    assert rb.calls == calls
    for before, after in zip(rb.data, rb.data[1:], strict=False):
        assert before["next", "done"].any() or (before["next", "observation"] == after["observation"]).all()


def test_step_by_step_into_a_storage_with_the_dimensions_of_the_environments() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    make(CountingEnv(SCRIPT, (2,)), frames=10, replay_buffer=rb, extend_buffer=False).next()
    whole = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    make(CountingEnv(SCRIPT, (2,)), frames=10, replay_buffer=whole).next()
    assert rb[:].shape == (2, 5) and torch.equal(rb["observation"], whole["observation"])


def test_any_object_with_extend_and_add_is_a_buffer() -> None:
    rb = Recorder()
    list(make(CountingEnv(SCRIPT), total_frames=10, replay_buffer=rb))
    assert rb.calls == [("extend", (6,)), ("extend", (4,))]
    with pytest.raises(InvalidTypeError, match="replay_buffer: expected a replay buffer, got list"):
        make(replay_buffer=[])


def test_buffer_gets_the_processed_batch() -> None:
    rb, seen = ReplayBuffer(storage=ListStorage(100)), []

    def postproc(batch: Any) -> Any:
        return batch.set("mark", torch.ones(batch.shape))

    collector = make(
        CountingEnv(SCRIPT),
        replay_buffer=rb,
        postproc=postproc,
        split_trajs=True,
        post_collect_hook=seen.append,
    )
    collector.next()
    assert len(rb) == len(seen[0]) and "mark" in rb[0].keys() and "mask" in rb[0]["collector"].keys()
    for extra in ({"postproc": postproc}, {"split_trajs": True}):
        with pytest.raises(UnsupportedError, match="extend_buffer=False"):
            make(replay_buffer=rb, extend_buffer=False, **extra)


def test_rollout_is_returned_to_the_user() -> None:
    rb = Recorder()
    assert make(CountingEnv(SCRIPT), replay_buffer=rb).rollout().shape == (6,) and not rb.calls


def test_batch_refused_by_the_buffer_is_discarded() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(CountingEnv(SCRIPT).rollout(4).select("observation"))
    collector = make(CountingEnv(SCRIPT), replay_buffer=rb)
    with pytest.raises(GleanError, match="extend"):
        collector.next()
    stats = collector.stats()
    assert len(rb) == 4 and stats.delivered == 0 and stats.reasons == {"buffer": 6}


@pytest.mark.parametrize("whole", [True, False])
def test_an_interrupt_after_the_write_finds_it_counted(whole: bool) -> None:
    class Interrupted(ReplayBuffer):
        def extend(self, data: Any) -> Any:
            super().extend(data)
            raise KeyboardInterrupt

        def add(self, data: Any) -> Any:
            super().add(data)
            raise KeyboardInterrupt

    calls: list[int] = []
    feed = BufferSink(Interrupted(storage=ListStorage(100)), whole)
    with pytest.raises(KeyboardInterrupt):
        feed.put(CountingEnv(SCRIPT).rollout(4), lambda: calls.append(1))
    assert calls == [1]
