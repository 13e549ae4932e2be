"""The controller replaces workers after real kills."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tensordict import TensorDictBase

from gleanrl._process.worker import Timeouts
from gleanrl.collectors.workers.shared_counters import SERVED
from gleanrl.errors import ClosedError, WorkerCrashedError, WorkerError, WorkerTimeoutError
from tests.chaos.faults import Fault
from tests.chaos.oracle import Record, Tally, makers
from tests.collectors.helpers import NEVER, Net
from tests.collectors.workers.crews import check_streams, collecting
from tests.fakes import FakeFailure
from tests.fakes_base import CountingEnv


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_worker_is_reported_and_the_collector_ends(kind: str) -> None:
    with collecting(kind) as collector:
        collector.next()
        os.kill(collector.processes[1], signal.SIGKILL)
        with pytest.raises(WorkerCrashedError, match="worker 1 .*SIGKILL"):
            while True:
                collector.next()
        with pytest.raises(ClosedError, match="worker 1 was lost"):
            collector.next()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_share_with_fewer_steps_than_its_grant_is_refused(kind: str) -> None:
    with collecting(kind) as collector:
        batches = [collector.next()]
        worker = collector._worker_source.controller._pool.workers[1]
        worker.halt()
        with pytest.raises(WorkerError, match=r"worker 1 .* made \d+ of the (6|12) steps"):
            while True:
                batches.append(collector.next())
        worker.halt(False)
        for _ in range(6):
            with suppress(WorkerError):  # one more error, if the worker had already begun its next grant
                batches.append(collector.next())
        check_streams(batches)
        stats = collector.stats()
    assert stats.delivered == sum(batch.numel() for batch in batches)
    assert stats.stepped == stats.delivered + stats.discarded


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_worker_is_replaced(kind: str) -> None:
    with collecting(kind, on_worker_error="restart") as collector:
        ids: set[int] = set()
        for round_ in range(4):
            pid = collector.processes[round_ % 2]
            os.kill(pid, signal.SIGKILL)
            while collector.processes[round_ % 2] == pid:
                batch = collector.next()
                ids |= set(batch["collector", "traj_ids"].unique().tolist())
        stats = collector.stats()
    assert [worker.restarts for worker in stats.workers] == [2, 2]
    assert stats.stepped == stats.delivered + stats.discarded and set(stats.reasons) <= {"worker"}


@pytest.mark.parametrize(("kind", "error"), [("kill", WorkerCrashedError), ("raise", FakeFailure)])
def test_a_worker_that_is_lost_while_it_is_made(kind: str, error: type[Exception], tmp_path: Path) -> None:
    fault = Fault(kind, "construction", tmp_path / "token", os.getpid(), 6)
    with pytest.raises(error), collecting("sync", makers(2, fault=fault)):
        pass
    fault.token.unlink()
    with collecting(
        "sync", makers(2, fault=fault), total_frames=24, on_worker_error="restart", max_restarts=1
    ) as collector:
        record = Record()
        assert sum(record.add(batch) for batch in collector) == 24
        record.check()
        assert sum(worker.restarts for worker in collector.stats().workers) == 1


def test_a_fork_is_refused_and_does_no_damage() -> None:
    with collecting("async", 2, Net(0.5), total_frames=120) as collector:
        batches = [collector.next()]
        child = os.fork()
        if not child:  # pragma: no cover
            refused = 0
            for call in (
                collector.next,
                collector.update_policy_weights_,
                collector.reset,
                collector.state_dict,
            ):
                try:
                    call()
                except ClosedError:
                    refused += 1
            collector.shutdown()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        batches += list(collector)
        stats = collector.stats()
    check_streams(batches)
    assert stats.delivered == 120 == stats.stepped


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_final_loss_counts_the_frames_in_progress(kind: str, tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally", 2)
    with collecting(kind, makers(2, tally=tally.path)) as collector:
        for _ in range(3):
            collector.next()
        os.kill(collector.processes[1], signal.SIGKILL)
        with pytest.raises(WorkerCrashedError):
            while True:
                collector.next()
        stats = collector.stats()
    assert stats.stepped == stats.delivered + stats.discarded
    assert 0 <= tally.steps - stats.stepped <= 1  # the step at which the worker was killed may be missing
    assert sum(worker.frames for worker in stats.workers) == stats.stepped


def test_counters_continue_after_a_replacement(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally", 2)
    with collecting("sync", makers(2, tally=tally.path), on_worker_error="restart") as collector:
        for _ in range(4):
            collector.next()
        before = collector.stats().workers[1]
        os.kill(collector.processes[1], signal.SIGKILL)
        while not collector.stats().workers[1].restarts:
            collector.next()
        after = collector.stats()
    assert after.workers[1].frames > before.frames and after.workers[1].episodes >= before.episodes
    assert 0 <= tally.steps - after.stepped <= 1


class Hanging(CountingEnv):
    """Waits for ever in its 20th step, in one worker."""

    def __init__(self, token: Path) -> None:
        self.__dict__["token"] = token
        super().__init__(NEVER)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if len(self.actions) == 20:
            with suppress(FileExistsError):  # only one of the workers creates the file
                self.token.touch(exist_ok=False)
                threading.Event().wait()
        return super()._step(tensordict)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hung_worker_is_reported_with_its_stack_or_replaced(kind: str, tmp_path: Path) -> None:
    short = Timeouts(work_s=0.5)
    hanging = [partial(Hanging, tmp_path / "first")] * 2
    message = r"made no progress for 0.5 s in step \d of its share[\s\S]*in _step"
    with (
        collecting(kind, hanging, timeouts=short) as collector,
        pytest.raises(WorkerTimeoutError, match=message),
    ):
        while True:
            collector.next()
    hanging = [partial(Hanging, tmp_path / "second")] * 2
    with collecting(kind, hanging, timeouts=short, on_worker_error="restart") as collector:
        while not any(worker.restarts for worker in collector.stats().workers):
            collector.next()
        stats = collector.stats()
    assert stats.reasons["worker"] == 2 or kind == "async"
    assert stats.stepped == stats.delivered + stats.discarded


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_stopped_worker_is_replaced_and_never_heard_of_again(kind: str) -> None:
    with collecting(kind, timeouts=Timeouts(work_s=0.5), on_worker_error="restart") as collector:
        batches = [collector.next()]
        stopped = collector.processes[1]
        os.kill(stopped, signal.SIGSTOP)
        while collector.processes[1] == stopped:
            batches.append(collector.next())
        with suppress(ProcessLookupError):  # it is dead, but not yet reaped by its parent
            os.kill(stopped, signal.SIGCONT)
        names = [int(name) for batch in batches[:-1] for name in batch["collector", "traj_ids"].unique()]
        for _ in range(6):
            batch = collector.next()
            found = batch["collector", "traj_ids"][batch["observation"][..., 0] == 100]
            assert not len(found) or int(found.min()) > max((name for name in names if name % 2), default=-1)


def test_the_error_of_a_failed_share_comes_before_later_shares(tmp_path: Path) -> None:
    fault = Fault("raise", "within a batch", tmp_path / "token", os.getpid(), 6)
    with collecting("sync", makers(2, fault=fault)) as collector:
        collector.next()
        source, worker = collector._worker_source, 1
        controller = source.controller
        source._grant_missing([worker])
        while controller.under_way(worker) and not controller.counters[worker].words[SERVED] > 1:
            os.sched_yield()
        assert not controller.ready(worker) and controller.raises(worker)
        source._grant_missing([worker])
        assert not controller.under_way(worker)
        with pytest.raises(FakeFailure):
            while controller.raises(worker):  # an answer of the other worker may come first
                controller.wait()
        assert not controller.raises(worker)
        collector.next()
