"""After an interrupt at any line of a collector's methods, all frames are counted and no trajectory has a gap."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from tests.collectors.helpers import NEVER, Net, check_names, make, steps_of, take
from tests.fakes import Script
from tests.fakes_base import CountingEnv
from tests.interrupts import interruptions

pytestmark = pytest.mark.slow

SHORT = Script(lengths=(3, 4))


class Subject:
    """A collector, its environment and its delivered batches."""

    def __init__(self, batch_size: tuple[int, ...] = (), script: Script = SHORT) -> None:
        self.env, self.net = CountingEnv(script, batch_size), Net()
        self.collector: SyncDataCollector = make(self.env, self.net, max_frames_per_traj=5)
        self.batches: list[TensorDictBase] = take(self.collector, 1)

    @cached_property
    def state(self) -> dict[str, Any]:
        return self.collector.state_dict()

    def keep(self, batch: TensorDictBase | None) -> None:
        assert batch is not None
        self.batches.append(batch)

    def next(self) -> None:
        self.keep(self.collector.next())

    def iterate(self) -> None:
        self.keep(next(iter(self.collector)))

    def check(self, where: Any) -> None:
        """Check that the collector continues, and that its counts equal the environment's up to a step in progress."""
        frames = max(1, self.env.batch_size.numel())
        stats = self.collector.stats()
        assert stats.stepped == stats.delivered + stats.flagged + stats.discarded
        assert steps_of(self.env) - stats.stepped in (0, frames), where
        assert stats.delivered == sum(batch.numel() for batch in self.batches), where
        for _ in range(2):
            self.next()
        after = self.collector.stats()
        assert after.delivered == sum(batch.numel() for batch in self.batches), where
        check_names(self.batches)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [(), (2,)])
@pytest.mark.parametrize("call", [Subject.next, Subject.iterate, lambda s: s.collector.reset()])
def test_interrupted_steps_and_resets_are_counted(
    batch_size: tuple[int, ...], call: Callable[[Subject], Any]
) -> None:
    for subject, where in interruptions(lambda: Subject(batch_size), call, most=250):
        subject.check(where)


def test_interrupted_extend_is_stored_and_counted_or_neither() -> None:
    class Feeding(Subject):
        def __init__(self) -> None:
            self.env, self.net = CountingEnv(SHORT), Net()
            self.buffer = ReplayBuffer(storage=LazyTensorStorage(100))
            self.collector = make(self.env, self.net, replay_buffer=self.buffer)
            self.collector.next()

        def check(self, where: Any) -> None:
            for _ in range(2):
                stats = self.collector.stats()
                assert stats.delivered == len(self.buffer), where
                assert stats.stepped == stats.delivered + stats.discarded
                self.collector.next()
            check_names([self.buffer[:]])

    for subject, where in interruptions(Feeding, lambda subject: subject.collector.next(), most=100):
        subject.check(where)


def test_interrupted_trajectory_batches_are_delivered_and_counted_or_neither() -> None:
    class Whole(Subject):
        def __init__(self) -> None:
            self.env, self.net = CountingEnv(SHORT, (2,)), Net()
            self.collector = make(self.env, self.net, trajs_per_batch=2)
            self.batches = []
            self.next()

        def check(self, where: Any) -> None:
            for _ in range(3):
                stats = self.collector.stats()
                assert stats.stepped == stats.delivered + stats.discarded
                assert stats.delivered == sum(int(b["collector", "mask"].sum()) for b in self.batches), where
                self.next()
            rows = [row[row["collector", "mask"]] for batch in self.batches for row in batch]
            assert all((row["observation"][:, 2] == torch.arange(len(row))).all() for row in rows), where
            check_names(rows)

    for subject, where in interruptions(Whole, lambda subject: subject.next(), most=100):
        subject.check(where)


def test_interrupted_partial_resets_keep_the_counts() -> None:
    for subject, where in interruptions(
        lambda: Subject((2,), NEVER), lambda subject: subject.collector.reset([1]), most=150
    ):
        subject.check(where)


def test_interrupted_loads_are_complete_or_absent() -> None:
    def make_subject() -> Subject:
        subject = Subject()
        assert subject.state
        with torch.no_grad():
            subject.net.value.fill_(3.0)
        return subject

    def load(subject: Subject) -> None:
        subject.collector.load_state_dict(subject.state)

    for subject, where in interruptions(make_subject, load, most=200):
        assert subject.net.value.unique().tolist() in ([3.0], [0.5]), where
        subject.check(where)


def test_interrupted_weight_updates_are_complete_or_absent() -> None:
    weights = TensorDict.from_module(Net(7.0)).data.clone()
    weights["calls"] = torch.tensor(7)

    def push(subject: Subject) -> None:
        subject.collector.update_policy_weights_(weights)

    for subject, where in interruptions(Subject, push):
        both = subject.net.value.unique().tolist() == [7.0], int(subject.net.calls) == 7
        assert both in ((True, True), (False, False)), where
        subject.check(where)


def test_interrupted_shutdown_is_finished_by_the_next_one() -> None:
    for subject, where in interruptions(Subject, lambda subject: subject.collector.shutdown()):
        subject.collector.shutdown()
        assert subject.env.is_closed, where
        assert subject.collector.stats().delivered == 6
