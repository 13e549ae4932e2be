"""The public collectors with workers: arguments, shapes, names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector, aSyncDataCollector
from gleanrl.compat.names import UNSERVED_KEYWORDS
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    LengthError,
    MissingArgumentError,
    PolicyError,
    UnsupportedError,
)
from tests.collectors.helpers import Net
from tests.collectors.workers.crews import Stream, check_streams, collecting, values


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"frames_per_batch": 0}, InvalidArgumentError, "frames_per_batch"),
        ({"total_frames": 0}, InvalidArgumentError, "total_frames"),
        ({"cat_results": "cat"}, InvalidArgumentError, "cat_results"),
        ({"preemptive_threshold": "1"}, InvalidArgumentError, "preemptive_threshold"),
        ({"device": ["cpu"]}, LengthError, "device: expected 2 entries"),
        ({"num_sub_threads": 0}, InvalidArgumentError, "num_sub_threads"),
        ({"timeouts": 3}, InvalidTypeError, "timeouts"),
        ({"reset_when_done": False}, InvalidArgumentError, "reset_when_done"),
        ({"create_env_fn": Stream(0)}, InvalidTypeError, r"\[create_env_fn\] \* num_workers"),
        ({"create_env_fn": []}, LengthError, "create_env_fn"),
        ({"collector_class": aSyncDataCollector}, UnsupportedError, "pass a ParallelEnv in create_env_fn"),
        ({"traj_format": "cat"}, MissingArgumentError, "trajs_per_batch"),
        ({"init_fn": 3}, InvalidTypeError, "init_fn"),
        ({"weight_sync_schemes": {}}, UnsupportedError, "MultiSyncDataCollector: .* pass weight_updater="),
        ({"frames": 3}, InvalidTypeError, "MultiSyncDataCollector.__init__.*did you mean"),
    ],
)
def test_bad_arguments_raise_before_workers_start(
    arguments: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        MultiSyncDataCollector(**{"create_env_fn": [Stream(0)] * 2, "frames_per_batch": 4, **arguments})


def test_a_sync_collector_uses_one_worker() -> None:
    collector = aSyncDataCollector(Stream(0), frames_per_batch=6, total_frames=24)
    batches = list(collector)
    check_streams(batches)
    assert [batch.numel() for batch in batches] == [6, 6, 6, 6]
    with pytest.raises(LengthError, match="expected one, got 2"):
        aSyncDataCollector([Stream(0)] * 2, frames_per_batch=6)


@pytest.mark.parametrize("cls", [SyncDataCollector, MultiSyncDataCollector])
def test_no_op_keywords_of_other_releases_are_accepted(cls: Any) -> None:
    off = {name: row.off for name, row in UNSERVED_KEYWORDS[constructor(cls)].items()}
    create = Stream(0) if cls is SyncDataCollector else [Stream(0)]
    collector = cls(create, frames_per_batch=6, total_frames=6, **off)
    assert [batch.numel() for batch in collector] == [6]


def constructor(cls: type) -> str:
    """Return the name of the class that defines the constructor."""
    return next(base.__name__ for base in cls.__mro__ if "__init__" in base.__dict__)


def test_frames_per_batch_are_split_among_workers() -> None:
    with collecting("sync", 2, frames=[5, 5], collector_class=SyncDataCollector) as collector:
        assert collector.frames_per_batch_worker() == collector.frames_per_batch_worker(1) == 5
        assert collector.next().shape == (2, 5)
    with collecting("async", 2, frames=[5, 5]) as collector:
        assert collector.frames_per_batch_worker(worker_idx=1) == collector.next().numel() == 5


class Noted:
    """Keeps the notes of `init_fn` in its process for the environment that is made next."""

    notes: tuple[int, ...] = ()


def note() -> None:
    Noted.notes = (*Noted.notes, 7)


def noting() -> Any:
    assert Noted.notes == (7,)
    return Stream(0)()


def test_init_fn_runs_first_in_each_worker() -> None:
    with collecting("sync", [noting] * 2, init_fn=note) as collector:
        assert collector.next().numel() == 12
    assert Noted.notes == ()


def test_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with collecting("sync", num_threads=1) as collector:
        assert torch.get_num_threads() == 1
        assert (collector.num_workers, len(set(collector.processes))) == (2, 2)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_trajectory_batches_are_padded(kind: str) -> None:
    with collecting(kind, total_frames=240, trajs_per_batch=3) as collector:
        batches = list(collector)
    assert batches and all(batch.shape[0] == 3 for batch in batches)
    for batch in batches:
        last = batch["collector", "mask"].sum(-1) - 1
        assert batch["next", "done"].squeeze(-1)[torch.arange(3), last].all()
        assert (batch["observation"][:, 0, 2] == 0).all()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_trajectory_batches_may_be_concatenated(kind: str) -> None:
    with collecting(kind, total_frames=240, trajs_per_batch=3, traj_format="cat") as collector:
        batches = list(collector)
    check_streams(batches)
    assert batches and all(batch["next", "done"].sum() == 3 for batch in batches)
    assert all(batch.ndim == 1 and batch["next", "done"][-1] for batch in batches)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_trajectory_batches_go_into_a_buffer(kind: str) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(300))
    more = {"trajs_per_batch": 3, "trajs_per_write": 2, "replay_buffer": buffer}
    with collecting(kind, total_frames=240, **more) as collector:
        assert set(collector) == {None}
    found = buffer[:]
    assert found["next", "done"][-1] and len(found) > 100
    check_streams([found])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_one_dimensional_buffer_gets_concatenated_shares(kind: str) -> None:
    buffer, rows = (ReplayBuffer(storage=LazyTensorStorage(300, ndim=ndim)) for ndim in (1, 2))
    with collecting(kind, total_frames=36, replay_buffer=buffer) as collector:
        assert set(collector) == {None}
    assert len(buffer) == 36 and buffer[:].shape == (36,)
    check_streams([buffer[:]])
    if kind == "sync":  # the batch keeps its shape if the storage has dimensions for workers and steps
        with collecting(kind, total_frames=36, replay_buffer=rows) as collector:
            assert set(collector) == {None}
        assert len(rows) == 36 and rows[:].ndim == 2


def test_postproc_before_a_buffer_gets_stacked_shares() -> None:
    buffer, seen = ReplayBuffer(storage=LazyTensorStorage(300)), list[tuple[int, ...]]()

    def flat(batch: Any) -> Any:
        seen.append(tuple(batch.shape))
        return batch.reshape(-1)

    with collecting("sync", total_frames=36, replay_buffer=buffer, postproc=flat) as collector:
        assert set(collector) == {None}
    assert len(buffer) == 36 and all(len(shape) == 2 for shape in seen)
    check_streams([buffer[:]])


def test_workers_are_reset_by_index_or_reset_idx() -> None:
    for name in ("index", "reset_idx"):
        with collecting("sync", 2) as collector:
            before = collector.next()["observation"][:, -1, 1]
            collector.reset(**{name: [False, True]})
            after = collector.next()["observation"][:, 0]
            assert after[1, 1] > before[1] and after[1, 2] == 0 and after[0, 1] == before[0]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_hooks_are_called_around_every_batch(kind: str) -> None:
    before, after = [], []
    hooks = {"pre_collect_hook": lambda: before.append(len(after)), "post_collect_hook": after.append}
    with collecting(kind, total_frames=36, **hooks) as collector:
        batches = list(collector)
    assert before == [0, 1, 2] and all(one is other for one, other in zip(batches, after, strict=True))


@pytest.mark.parametrize("factory", [lambda: Net(0.25), [lambda: Net(0.25), lambda: Net(0.75)]])
def test_workers_make_policies_by_policy_factory(factory: Any) -> None:
    with collecting("sync", 2, policy_factory=factory) as collector:
        assert [values(part) for part in collector.next()] == [
            [0.25],
            [0.75 if isinstance(factory, list) else 0.25],
        ]
        with pytest.raises(PolicyError, match="the policy exists in the workers only; pass a TensorDict"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(weights=Net(0.5))
        assert values(collector.next()) == [0.5]
