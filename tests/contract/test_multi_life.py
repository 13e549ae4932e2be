"""Collectors with workers run in the background, pause, report statistics, and leave nothing behind at their end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from gleanrl._os.proc import state_of
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, aSyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import GleanError
from tests.collectors.workers.crews import KINDS, Stream, collecting
from tests.contract.helpers import check_ledger
from tests.contract.multi import SCRIPT, WHOLE, Waiting, check_workers, done_with, frames, gate, makers, take
from tests.leaks import Holdings

BOTH = pytest.mark.parametrize("kind", KINDS)


def buffer(size: int = 10_000, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(size, **kwargs), batch_size=8)


def running(pid: int) -> bool:
    """Return whether a process still runs; a zombie doesn't."""
    return state_of(pid) not in ("", "Z", "X")


@BOTH
def test_next_is_none_at_the_end_and_the_workers_are_gone(kind: str) -> None:
    with collecting(kind, makers(2), total_frames=36) as collector:
        pids = list(collector.processes)
        assert len(set(pids)) == 2 and all(map(running, pids)) and os.getpid() not in pids
        assert frames(take(collector, 3)) == 36
        assert collector.next() is None
        assert not any(map(running, pids))


@pytest.mark.parametrize("kind", ["async"])
def test_an_iterator_after_shutdown_raises(kind: str) -> None:
    with collecting(kind, makers(2)) as collector:
        take(collector, 1)
        pids = list(collector.processes)
        collector.shutdown()
        collector.shutdown()
        assert not any(map(running, pids))
        with pytest.raises(RuntimeError) as caught:
            next(iter(collector))
        assert isinstance(caught.value, GleanError)
        assert collector.stats().delivered == 12 and collector.state_dict()


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector, aSyncDataCollector])
def test_an_abandoned_collector_ends_its_processes(cls: Any) -> None:
    collector = cls(Stream(0) if cls is aSyncDataCollector else makers(2), None, frames_per_batch=12)
    collector.next()
    iterator = iter(collector)
    next(iterator)
    pids, alive = list(collector.processes), weakref.ref(collector)
    del collector, iterator
    gc.collect()
    assert alive() is None
    assert not any(map(running, pids))


@BOTH
def test_nothing_is_left_behind(kind: str) -> None:
    with collecting(kind, makers(2), total_frames=12) as collector:
        list(collector)  # resources that a first use keeps are now held
    before = Holdings.now()
    for members in ("single", "parallel") if kind == "sync" else ("single", "serial"):
        with collecting(kind, makers(2, kind=members), total_frames=24, frames=8) as collector:
            take(collector, 1)
        del collector
    with pytest.raises(ZeroDivisionError), collecting(kind, [Stream(0), lambda: 1 // 0]):
        pass
    before.check()


@BOTH
def test_stats_balance_at_any_time(kind: str) -> None:
    with collecting(kind, makers(3), total_frames=120) as collector:
        stats = collector.stats()
        assert (stats.delivered, stats.batches, len(stats.workers)) == (0, 0, 3)
        for count, batch in enumerate(collector, 1):
            stats = collector.stats()
            assert stats.delivered == 12 * count and stats.batches == count
            assert stats.stepped == stats.delivered + stats.flagged + stats.discarded
            assert batch.numel() == 12
            assert sum(worker.frames for worker in stats.workers) >= stats.stepped
            assert all(0 <= worker.idle_share <= 1 and worker.restarts == 0 for worker in stats.workers)
    for _ in range(2):  # the collector is shut down now
        stats = collector.stats()
        assert stats.stepped == stats.delivered == 120 and len(stats.workers) == 3
        assert sum(worker.frames for worker in stats.workers) == 120
        assert stats.frames_per_s > 0 and all(worker.frames_per_s > 0 for worker in stats.workers)
        assert stats.episodes == sum(worker.episodes for worker in stats.workers) > 10


@pytest.mark.parametrize("kind", ["async"])
def test_stats_know_episodes_and_their_returns(kind: str) -> None:
    with collecting(kind, makers(2), total_frames=480, frames=48) as collector:
        batches = list(collector)
    done = sum(int(batch["next", "done"].sum()) for batch in batches)
    stats = collector.stats()
    assert stats.episodes == done
    lengths = torch.cat([b["next", "observation"][..., 2][b["next", "done"][..., 0]] for b in batches])
    assert abs(stats.mean_length - lengths.mean().item()) < 1 and lengths.min() <= stats.mean_length <= 7


def test_stats_while_a_worker_is_at_work(tmp_path: Any) -> None:
    """Statistics are read without a request to the worker, which can't answer here."""
    with (
        gate(tmp_path) as held,
        collecting("async", [Stream(0, SCRIPT), Waiting(held, 4, 100)], frames=6) as collector,
    ):
        batches = take(collector, 5)
        assert {int(batch["observation"][0, 0]) for batch in batches} == {0}
        stats = collector.stats()
        assert stats.delivered == 30 and stats.workers[1].frames <= 3
        held.open(1000)
        while not any(batch["observation"][0, 0] == 100 for batch in batches):
            batches += take(collector, 1)


@pytest.mark.parametrize("kind", ["sync"])
def test_progress_shows_something_and_changes_nothing(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with collecting(kind, makers(2), total_frames=36, progress=True) as collector:
        batches = list(collector)
    assert frames(batches) == 36
    check_workers(batches, 2, "stack" if kind == "sync" else WHOLE)
    assert capsys.readouterr()


@BOTH
def test_in_the_background_into_a_buffer(kind: str) -> None:
    rb = buffer(ndim=2 if kind == "sync" else 1)
    with collecting(kind, makers(2), total_frames=600, replay_buffer=rb) as collector:
        assert not collector.is_running()
        collector.start()
        with pytest.raises(GleanError):
            collector.start()
        while collector.is_running():
            if len(rb) >= 8:
                sample = rb.sample()
                assert torch.equal(sample["next", "observation"][..., 2], sample["observation"][..., 2] + 1)
        assert collector.stats().delivered == 600 == len(rb)
        collector.async_shutdown()
        assert not collector.is_running()


@BOTH
def test_background_collection_pauses_stops_and_restarts(kind: str) -> None:
    rb = buffer(ndim=2 if kind == "sync" else 1)
    with collecting(kind, makers(2), replay_buffer=rb) as collector:
        collector.start()
        while not len(rb):
            pass
        with collector.pause():
            count = len(rb)
            assert collector.stats().delivered == count
            for _ in range(1000):
                assert len(rb) == count
        while len(rb) == count:
            pass
        collector.stop()
        assert not collector.is_running()
        count = len(rb)
        collector.start()
        assert collector.is_running()
        while len(rb) == count:
            pass
        collector.update_policy_weights_()
        collector.shutdown()
        check_ledger(collector)
        assert len(rb) == collector.stats().delivered


@BOTH
def test_background_error_is_raised_by_is_running(kind: str) -> None:
    class Failing(Stream):
        def __call__(self) -> Any:
            env = super().__call__()
            step = env._step

            def failing(tensordict: Any) -> Any:
                if len(env.actions) == 20:
                    raise ZeroDivisionError("on purpose")
                return step(tensordict)

            env._step = failing
            return env

    rb = buffer(ndim=2 if kind == "sync" else 1)
    with collecting(kind, [Stream(0, SCRIPT), Failing(100, SCRIPT)], replay_buffer=rb) as collector:
        collector.start()
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            while collector.is_running():
                pass
        assert not collector.is_running()


@pytest.mark.parametrize("kind", ["sync"])
def test_the_background_needs_a_buffer(kind: str) -> None:
    with collecting(kind, 2) as collector, pytest.raises(GleanError, match="replay_buffer"):
        collector.start()


def test_a_learner_may_take_its_time() -> None:
    """Idle workers stay alive while the learner is busy."""
    os.environ["MAX_IDLE_COUNT"] = "0"
    try:
        for kind in KINDS:
            with collecting(kind, makers(2), total_frames=48, timeouts=None) as collector:
                batches = take(collector, 1)
                for _ in range(20):
                    torch.randn(300, 300) @ torch.randn(300, 300)
                batches += list(collector)
            assert frames(batches) == 48
    finally:
        del os.environ["MAX_IDLE_COUNT"]


CTRL_C = """
import sys
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from gleanrl.envs import GymEnv

cls = {"sync": MultiSyncDataCollector, "async": MultiaSyncDataCollector}[sys.argv[1]]
collector = cls([lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=20)
batches = iter(collector)
next(batches)
try:
    print(*collector.processes, flush=True)
    while True:
        next(batches)
except KeyboardInterrupt:
    state = collector.state_dict()
    print(state["frames"] == collector.stats().delivered, state["frames"] % 20, flush=True)
    raise
"""


@pytest.mark.parametrize("kind", ["sync"])
def test_ctrl_c_is_one_traceback_and_the_state_can_be_saved(kind: str) -> None:
    """A terminal sends Ctrl-C to all processes of the program at once."""
    program = [sys.executable, "-c", CTRL_C, kind]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None
            pids = list(map(int, process.stdout.readline().split()))
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert out == "True 0\n" and len(pids) == 2 and not any(map(running, pids))
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt"), err


def test_several_collectors_run_at_once() -> None:
    first, second = (cls(makers(2), None, frames_per_batch=12, total_frames=48) for cls in KINDS.values())
    pairs = list(zip(first, second, strict=True))
    check_workers([a for a, _ in pairs], 2, "stack")
    check_workers([b for _, b in pairs], 2, WHOLE)
    done_with(first)
    done_with(second)


def test_collector_cannot_be_copied_or_indexed_and_has_a_repr() -> None:
    with collecting("sync", 2) as collector:
        assert "2" in repr(collector) and "MultiSync" in repr(collector) and bool(collector)
        for function in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
                function(collector)
