"""Collectors with workers accept lists of environments, devices and numbers of threads, and reject other arguments."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import pytest
import torch

from gleanrl import collectors as names
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, aSyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper, ParallelEnv
from gleanrl.errors import EnvironmentFailure, GleanError, WorkerCrashedError
from tests.collectors.workers.crews import KINDS, Stream, collecting
from tests.contract.helpers import IDS, check_ledger
from tests.contract.multi import SCRIPT, frames, makers, take
from tests.fakes import FakeFailure, OracleEnv, RaisingEnv
from tests.fakes_base import CountingEnv, CrookedEnv

BOTH = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("kind", "same"), [("sync", "parallel"), ("async", "counting")])
def test_the_same_unstarted_environment_several_times(kind: str, same: str) -> None:
    env = {
        "parallel": lambda: ParallelEnv(2, Stream(0, SCRIPT)),
        "counting": lambda: CountingEnv(SCRIPT),
    }[same]()
    with collecting(kind, [env] * 4, frames=16, total_frames=64) as collector:
        batches = list(collector)
    if kind == "sync":
        assert [tuple(batch.shape) for batch in batches] == [(4, 4) if same == "counting" else (4, 2, 2)] * 4
    assert frames(batches) == 64
    names = {(int(name) % 4) for batch in batches for name in batch[IDS].reshape(-1)}
    assert names <= {0, 1, 2, 3}
    with collecting(kind, [env] * 2) as collector:  # the given environment was never started
        take(collector, 1)


@pytest.mark.parametrize("kind", ["sync"])
def test_a_started_environment_raises(kind: str) -> None:
    started = ParallelEnv(2, Stream(0, SCRIPT))
    started.reset()
    used = CountingEnv(SCRIPT)
    used.rollout(3)
    try:
        for env in (started, used):
            with pytest.raises(GleanError, match=r"started|used"), collecting(kind, [env] * 2):
                pass
    finally:
        started.close()


@pytest.mark.parametrize("kind", ["async"])
def test_makers_of_all_kinds_are_accepted(kind: str) -> None:
    script = SCRIPT
    entries = [
        lambda: GymWrapper(OracleEnv(0, script)),
        functools.partial(CountingEnv, script),
        Stream(200, script),
        CountingEnv(script),
    ]
    with collecting(kind, entries, frames=16) as collector:
        assert frames(take(collector, 3)) == 48


@pytest.mark.parametrize("kind", ["sync"])
def test_create_env_kwargs_reach_the_makers(kind: str) -> None:
    def make(stream: int = 0) -> Any:
        return Stream(stream, SCRIPT)()

    with collecting(kind, [make] * 2, create_env_kwargs={"stream": 7}) as collector:
        assert {7.0} == {
            float(x) for batch in take(collector, 3) for x in batch["observation"][..., 0].reshape(-1)
        }
    kwargs = [{"stream": 0}, {"stream": 100}]
    with collecting("sync", [make] * 2, create_env_kwargs=kwargs) as collector:
        assert collector.next()["observation"][:, 0, 0].tolist() == [0, 100]
    with (
        pytest.raises(RuntimeError, match="create_env_kwargs"),
        collecting(kind, [make] * 2, create_env_kwargs=kwargs[:1]),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sync", "device"), ("async", "storing_device"), ("sync", "env_device"), ("async", "policy_device")],
)
def test_device_lists_have_one_entry_for_each_worker(kind: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=name) as caught, collecting(kind, 2, **{name: ["cpu"] * 3}):
        pass
    assert isinstance(caught.value, GleanError)
    with collecting(kind, 2, **{name: ["cpu", torch.device("cpu")]}, total_frames=24) as collector:
        batches = list(collector)
    assert all(batch["observation"].device.type == "cpu" for batch in batches)
    assert batches[0].device in (None, torch.device("cpu"))


def test_next_returns_a_batch_without_a_device() -> None:
    for kind in KINDS:
        with collecting(kind, 2, device="cpu") as collector:
            assert collector.next().device is None
            assert next(iter(collector)).device in (None, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["sync"])
def test_number_of_threads_is_set_and_restored(kind: str) -> None:
    before = torch.get_num_threads()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.full((*observation.shape[:-1], 2), torch.get_num_threads() / 8)

    try:
        torch.set_num_threads(6)
        with collecting(kind, 2, policy, num_sub_threads=3) as collector:
            assert torch.get_num_threads() == 4
            assert (collector.next()["action"] == 3 / 8).all()
        assert torch.get_num_threads() == 6
        with collecting(kind, 2, policy, num_threads=2, total_frames=12) as collector:
            assert torch.get_num_threads() == 2
            assert (collector.next()["action"] == 1 / 8).all()
            list(collector)
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


@BOTH
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"reset_when_done": False}, ValueError, "reset_when_done"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"preemptive_threshold": float("nan")}, ValueError, "preemptive_threshold"),
        ({"on_worker_error": "ignore"}, ValueError, "on_worker_error"),
        ({"init_random_frames": 2.5}, ValueError, "init_random_frames"),
        ({"max_frames_per_traj": 2.5}, ValueError, "max_frames_per_traj"),
        ({"exploration_type": "often"}, ValueError, "exploration"),
        ({"surprise": 1}, TypeError, "surprise"),
    ],
)
def test_bad_arguments_raise(kind: str, kwargs: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match), collecting(kind, 2, **kwargs):
        pass


def test_one_worker_class_rejects_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="surprise"):
        aSyncDataCollector(Stream(0), None, frames_per_batch=4, total_frames=4, surprise=1)


@pytest.mark.parametrize("kind", ["sync"])
@pytest.mark.parametrize("entry", [3, b"CartPole-v1", None])
def test_maker_that_makes_no_environment_is_refused(kind: str, entry: Any) -> None:
    with pytest.raises(TypeError) as caught, collecting(kind, [entry] * 2):
        pass
    assert isinstance(caught.value, GleanError)
    with pytest.raises(TypeError) as caught, collecting(kind, [lambda: entry] * 2):
        pass
    assert isinstance(caught.value, GleanError)


def failing_maker() -> Any:
    raise FileNotFoundError("no such rom")


@pytest.mark.parametrize("kind", ["async"])
def test_an_error_of_a_maker_is_its_own_type_and_shows_where(kind: str) -> None:
    with (
        pytest.raises(FileNotFoundError, match="no such rom") as caught,
        collecting(kind, [Stream(0), failing_maker]),
    ):
        pass
    told = "".join(map(str, (caught.value, caught.value.__cause__)))
    assert "failing_maker" in told and "1" in told


@BOTH
@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_error_in_a_worker_is_its_own_type_with_traceback_and_environment(kind: str, where: str) -> None:
    def failing() -> Any:
        return GymWrapper(RaisingEnv(4 if where == "step" else 3, where, stream=100, script=SCRIPT))

    with collecting(kind, [Stream(0, SCRIPT), failing], total_frames=120) as collector:
        got: list[Any] = []
        with pytest.raises(FakeFailure, match="the fake broke on purpose") as caught:
            while True:
                got.append(collector.next())
        error = caught.value
        assert isinstance(error, EnvironmentFailure) and isinstance(error, GleanError)
        assert "environment 1" in str(error), str(error)
        assert "fakes.py" in str(error.__cause__) or "fakes.py" in str(error), "the worker's traceback"
        got += list(collector)
        check_ledger(collector)
        stats = collector.stats()
    assert frames(got) == 120 == stats.delivered and stats.discarded > 0 and "environment" in stats.reasons


@pytest.mark.parametrize("kind", ["async"])
def test_stop_iteration_of_an_environment_is_raised(kind: str) -> None:
    def failing() -> Any:
        return GymWrapper(RaisingEnv(3, error=StopIteration("over"), script=SCRIPT))

    with (
        collecting(kind, [failing] * 2, total_frames=24) as collector,
        pytest.raises(StopIteration, match="over"),
    ):
        collector.next()
    with (
        collecting(kind, [failing] * 2, total_frames=24) as collector,
        pytest.raises(EnvironmentFailure, match="over"),
    ):
        list(collector)


class Unpicklable(Exception):
    """Can't be pickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", ["sync"])
def test_unpicklable_error_keeps_its_class_and_text(kind: str) -> None:
    def failing() -> Any:
        return GymWrapper(RaisingEnv(3, error=Unpicklable(1, 2), script=SCRIPT))

    with (
        collecting(kind, [failing] * 2) as collector,
        pytest.raises(EnvironmentFailure, match="1 and 2") as caught,
    ):
        collector.next()
    assert "Unpicklable" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fault"), [("sync", "missing"), ("async", "shape"), ("sync", "dtype"), ("async", "nan")]
)
def test_crooked_environments_are_named(kind: str, fault: str) -> None:
    def make() -> Any:
        return CrookedEnv(fault, at=5, batch_size=(2,))

    with collecting(kind, [Stream(0, batch_size=(2,)), make], frames=20) as collector:
        with pytest.raises((RuntimeError, ValueError), match="observation") as caught:
            while True:
                take(collector, 1)
        assert isinstance(caught.value, GleanError)
        assert "environment 2" in str(caught.value) or "In worker 1" in str(caught.value.__cause__)


@BOTH
def test_a_worker_that_exits_is_reported_and_ends_the_collector(kind: str) -> None:
    class Leaving(CountingEnv):
        def _step(self, tensordict: Any) -> Any:
            os._exit(7)

    with collecting(kind, [Stream(0), Leaving]) as collector:
        with pytest.raises(WorkerCrashedError, match="7") as caught:
            while True:
                collector.next()
        assert isinstance(caught.value, RuntimeError) and "1" in str(caught.value)
        with pytest.raises(RuntimeError):
            take(collector, 1)


@pytest.mark.parametrize("kind", ["sync"])
def test_workers_of_unlike_environments_are_refused(kind: str) -> None:
    with pytest.raises(RuntimeError) as caught, collecting(kind, [Stream(0), lambda: GymEnv("CartPole-v1")]):
        pass
    assert isinstance(caught.value, GleanError)
    with pytest.raises(RuntimeError), collecting(kind, [Stream(0), Stream(100, batch_size=(2,))]):
        pass


def test_names_of_other_releases_make_the_same_collectors() -> None:
    assert names.MultiSyncCollector is MultiSyncDataCollector
    assert names.MultiAsyncCollector is MultiaSyncDataCollector
    assert names.AsyncCollector is aSyncDataCollector
    for sync, cls in ((True, MultiSyncDataCollector), (False, MultiaSyncDataCollector)):
        collector = names.MultiCollector(makers(2), None, frames_per_batch=12, total_frames=12, sync=sync)
        assert isinstance(collector, cls)
        assert frames(list(collector)) == 12
    with pytest.raises(NotImplementedError):
        MultiSyncDataCollector[0]
