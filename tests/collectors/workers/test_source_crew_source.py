"""The owner of workers handles losses, restarts, and calls between batches."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from gleanrl.errors import SchemaError
from tests.collectors.helpers import Net
from tests.collectors.workers.crews import Stream, check_streams, collecting


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_state_is_restored_and_ids_continue(kind: str) -> None:
    with collecting(kind, total_frames=48) as collector:
        first = [collector.next()]
        state = collector.state_dict()
        assert state["frames"] == 12 and {"worker0", "worker1"} <= set(state)
    with collecting(kind, [Stream(500), Stream(600)], total_frames=48) as other:
        other.load_state_dict(state)
        batches = first + list(other)
    check_streams(batches)
    assert sum(batch.numel() for batch in batches) == 48


def test_seeds_are_chained() -> None:
    makers = [Stream(0, batch_size=(2,)), Stream(100, batch_size=(2,))]
    with collecting("sync", makers) as collector:
        assert collector.set_seed(3) == 6 and collector.set_seed(3, static_seed=True) == 3


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_load_that_fails_changes_nothing_and_throws_nothing_away(kind: str) -> None:
    policy = Net(0.5)
    with collecting(kind, 2, policy, total_frames=48) as collector:
        batches = [collector.next()]
        state = collector.state_dict()
        wrong = {**state["worker1"], "policy_state_dict": {"value": torch.zeros(3), "calls": torch.tensor(0)}}
        for damaged in (
            {**state, "worker1": {**state["worker1"], "source": 3}},
            {**state, "worker1": wrong},
            {**state, "worker0": wrong},
        ):
            with pytest.raises(SchemaError):
                collector.load_state_dict(damaged)
        assert policy.value.tolist() == [0.5, 0.5]
        batches += list(collector)
        stats = collector.stats()
    check_streams(batches)
    assert stats.stepped == stats.delivered == 48 and not stats.reasons


def test_loaded_state_restores_the_weights_of_each_worker() -> None:
    with collecting("sync", 2, Net(0.5)) as collector:
        collector.update_policy_weights_(Net(-0.5), worker_ids=[1])
        collector.next()
        state = collector.state_dict()
        collector.update_policy_weights_(Net(0.25))
        collector.load_state_dict(state)
        assert [part["action"].unique().tolist() for part in collector.next()] == [[0.5], [-0.5]]


def test_entries_missing_in_a_partial_state_are_kept() -> None:
    with collecting("sync", 2) as collector:
        collector.next()
        state = collector.state_dict()
        collector.load_state_dict({"worker1": state["worker1"]}, strict=False)
        assert collector.stats().delivered == 12


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_source_is_freed_with_the_last_reference_after_a_shutdown(kind: str) -> None:
    with collecting(kind, policy=Net()) as collector:
        collector.next()
        source = weakref.ref(collector.source)
    gc.collect()
    gc.disable()  # with the collector off, a reference cycle would keep the source and its memory alive
    try:
        del collector
        assert source() is None
    finally:
        gc.enable()


def workers_counted(collector: Any) -> int:
    """Return how many workers ended one of the latest hundred episodes."""
    times = [
        [end for end, _ in words.recent_episodes()] for words in collector._worker_source.controller.counters
    ]
    merged = sorted(end for some in times for end in some)[-100:]
    assert all(some == sorted(some) for some in times)
    return sum(some[-1] >= merged[0] for some in times)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_mean_return_is_that_of_the_last_hundred_episodes_of_all_workers(kind: str) -> None:
    with collecting(kind, 4, frames=400) as collector:
        ended: list[tuple[float, int]] = []
        sums: dict[int, tuple[float, int]] = {}
        window = []
        for _ in range(12):
            batch = collector.next()
            rewards = batch["next", "reward"].reshape(-1).tolist()
            ids = batch["collector", "traj_ids"].reshape(-1).tolist()
            for reward, done, name in zip(
                rewards, batch["next", "done"].reshape(-1).tolist(), ids, strict=True
            ):
                total, length = sums.pop(name, (0.0, 0))
                if done:
                    ended.append((total + reward, length + 1))
                else:
                    sums[name] = (total + reward, length + 1)
            window.append(len(ended))
            stats = collector.stats()
            if kind == "sync":
                assert stats.episodes == len(ended)
                latest = collector._worker_source.recent_episodes()
                assert len(latest) == min(len(ended), 100)
                known = Counter((round(total, 3), length) for total, length in ended[-window[-1] :])
                assert not Counter((round(one.episode_return, 3), one.length) for one in latest) - known
                assert stats.mean_length == pytest.approx(sum(one.length for one in latest) / len(latest))
                assert stats.mean_return == pytest.approx(
                    sum(one.episode_return for one in latest) / len(latest)
                )
        assert len(ended) > 200
        counted = workers_counted(collector)
        for _ in range(200):  # on a busy machine an asynchronous worker may pause for a hundred episodes
            if counted == 4:
                break
            collector.next()
            counted = workers_counted(collector)
        assert counted == 4, "all workers' latest episodes count"
