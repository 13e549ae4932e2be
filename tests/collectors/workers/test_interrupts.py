"""After an interrupt at any line, the collector continues, every frame is counted, and no trajectory has a gap."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl._process.worker import Timeouts
from gleanrl.collectors.workers.shared_counters import SERVED
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from tests.chaos.oracle import STEP, Record, Tally, makers
from tests.collectors.helpers import Net
from tests.collectors.workers.crews import collecting
from tests.contract.multi import settled
from tests.fakes import Script
from tests.fakes_lists import TalkingEnv
from tests.interrupts import Interruptions, double_interruptions, interruptions

SCRIPT = Script(seed=3, low=1, high=9)
SOON = Timeouts(work_s=5.0)
"""A wait for an answer that can't come fails after five seconds."""


class Frames(Record):
    """The delivered frames, whose trajectories may have been abandoned."""

    def _check_order(self, root: np.ndarray) -> None:
        names = self.column("id")
        for name in np.unique(names):
            steps = root[names == name, STEP]
            assert (steps == np.arange(len(steps))).all(), f"trajectory {name} has a hole: {steps.tolist()}"


class Subject:
    """A collector, its delivered frames, and its environments' own counts."""

    def __init__(self, collector: Any, tally: Tally, kind: str) -> None:
        self.collector, self.tally, self.kind = collector, tally, kind
        self.record = Frames(SCRIPT)
        self.kills = 0
        self.seen = [-1, -1]

    def next(self) -> None:
        batch = self.collector.next()
        self.record.add(batch[batch["collector", "traj_ids"] >= 0] if batch.ndim == 1 else batch)

    def check(self) -> None:
        for _ in range(2):
            self.next()
        stats = self.collector.stats()
        assert stats.delivered == self.record.frames and stats.flagged == 0
        assert stats.stepped == stats.delivered + stats.discarded
        if self.kind == "sync":
            self.check_counts()

    def check_counts(self) -> None:
        """Check the counts when no work is pending; the step at which a worker was killed may be missing."""
        stats = self.collector.stats()
        assert 0 <= self.tally.steps - stats.stepped <= self.kills, (self.tally.steps, stats)
        assert sum(worker.frames for worker in stats.workers) == stats.stepped

    def kill(self) -> None:
        """Kill a worker that has finished a share since its last kill; its fifth loss in a row would be final."""
        self.kills += 1
        worker = self.kills % 2
        words = self.collector._worker_source.controller.counters[worker].words
        while words[SERVED] == self.seen[worker]:
            self.next()
        self.seen[worker] = words[SERVED]
        with suppress(ProcessLookupError):  # the killed worker waits for its replacement
            os.kill(self.collector.processes[worker], signal.SIGKILL)


@contextmanager
def drilled(kind: str, path: Path, **kwargs: Any) -> Iterator[Subject]:
    """Yield a subject; afterwards shut its collector down and compare the counts."""
    tally = Tally(path / "tally", 2)
    made = makers(2, tally=tally.path, script=SCRIPT)
    with collecting(kind, made, kwargs.pop("policy", None), timeouts=SOON, **kwargs) as collector:
        subject = Subject(collector, tally, kind)
        yield subject
        collector.shutdown()
        subject.check_counts()
        subject.record.check()


@contextmanager
def told(place: Any) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(str(place))
        raise


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
CALLS: dict[str, Callable[[Subject], Any]] = {
    "next": Subject.next,
    "update": lambda subject: subject.collector.update_policy_weights_(Net(0.25)),
    "update of one": lambda subject: subject.collector.update_policy_weights_(Net(0.25), worker_ids=[1]),
    "reset": lambda subject: subject.collector.reset(),
    "reset of one": lambda subject: subject.collector.reset([False, True]),
    "set_seed": lambda subject: subject.collector.set_seed(3),
    "state_dict": lambda subject: subject.collector.state_dict(),
    "load_state_dict": lambda subject: subject.collector.load_state_dict(subject.state, strict=False),
}


def check_goes_on(kind: str, name: str, folder: Path, interrupted: Interruptions, most: int) -> None:
    """Interrupt a call once or twice; check that later batches are complete and that every frame is counted."""
    with drilled(kind, folder, policy=Net(0.5)) as subject:
        subject.next()
        state = subject.collector.state_dict()
        subject.state = {key: value for key, value in state.items() if key.startswith("worker")}  # type: ignore[attr-defined]
        for _, place in interrupted(lambda: subject, CALLS[name], most):
            with told(place):
                subject.check()


@KINDS
@pytest.mark.parametrize("name", CALLS)
def test_collector_continues_after_an_interrupt(kind: str, name: str, tmp_path: Path) -> None:
    check_goes_on(kind, name, tmp_path, interruptions, 70)


@KINDS
def test_interrupted_restart_continues(kind: str, tmp_path: Path) -> None:
    def make() -> Subject:
        subject.kill()
        return subject

    with drilled(kind, tmp_path, on_worker_error="restart", max_restarts=1000) as subject:
        for _, place in interruptions(make, Subject.next, 90):
            with told(place):
                subject.check()


@KINDS
def test_interrupted_extend_is_stored_and_counted_or_neither(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
    with drilled(kind, tmp_path, replay_buffer=buffer) as subject:
        collector = subject.collector
        for _, place in interruptions(lambda: collector, lambda collector: collector.next(), 90):
            with told(place):
                for _ in range(2):
                    assert collector.stats().delivered == buffer.stats().rows_written
                    collector.next()
        rows = buffer[:]
        subject.record.add(rows)


@KINDS
def test_list_columns_match_their_frames_after_interrupts(kind: str) -> None:
    texts: list[str] = []

    def check(collector: Any) -> None:
        for _ in range(3):
            batch = collector.next()
            found = np.array(batch["text"]).ravel().tolist()
            codes = batch["code"].long().reshape(-1, 3).tolist()
            assert found == ["/".join(map(str, code)) for code in codes]
            texts.extend(found)

    with collecting(kind, [lambda: TalkingEnv(0), lambda: TalkingEnv(1)], timeouts=SOON) as collector:
        for _, place in interruptions(lambda: collector, lambda collector: collector.next(), 90):
            with told(place):
                check(collector)
        stats = collector.stats()
    assert len(set(texts)) == len(texts) and stats.stepped == stats.delivered + stats.discarded


@KINDS
def test_interrupted_update_reaches_all_workers_or_none(kind: str) -> None:
    def values(batch: Any) -> list[float]:
        found: list[float] = batch["action"].unique().tolist()
        return found

    with collecting(kind, 2, Net(0.0), frames=4, timeouts=SOON) as collector:
        sent, arrived = [0.0], [1 / 1024]  # the first call is the traced one

        def push(collector: Any) -> None:
            weights = TensorDict.from_module(Net(sent[-1])).data
            collector.update_policy_weights_(weights)

        def make() -> Any:
            sent.append(sent[-1] + 1 / 1024)
            return collector

        for _, place in interruptions(make, push, 100):
            with told(place):
                if kind == "async":
                    settled(collector, kind)  # drops the batches that were collected before
                found = [values(collector.next()) for _ in range(4)]
                assert found == found[:1] * 4 and found[0] in ([sent[-1]], arrived)
                arrived[:] = found[0]


@KINDS
@pytest.mark.parametrize(
    ("interrupted", "most"),
    [(interruptions, 25), pytest.param(double_interruptions, 5, marks=pytest.mark.timeout(1800))],
)
def test_interrupted_shutdown_is_finished_by_the_next_one(
    kind: str, interrupted: Interruptions, most: int, tmp_path: Path
) -> None:
    def make() -> Any:
        places.append(tmp_path / str(len(places)))
        places[-1].mkdir()
        opened = drilled(kind, places[-1])
        subject = opened.__enter__()
        for _ in range(3):
            subject.next()
        return opened, subject

    def check(found: Any) -> None:
        opened, subject = found
        opened.__exit__(None, None, None)
        assert subject.collector.stats().delivered == subject.record.frames
        torch.set_num_threads(1)

    places: list[Path] = []
    for found, place in interrupted(make, lambda found: found[1].collector.shutdown(), most, close=check):
        with told(place):
            check(found)
