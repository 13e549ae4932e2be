"""With `preemptive_threshold` the last workers stop after their current step, and only steps made are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.beside import repeated
from tests.collectors.workers.crews import KINDS, Stream, collecting
from tests.contract.helpers import IDS, MASK, check_ledger, leaf_keys, valid_rows
from tests.contract.multi import (
    NEVER,
    WHOLE,
    Gate,
    Waiting,
    check_workers,
    frames,
    gate,
    makers,
    take,
)

BOTH = pytest.mark.parametrize("kind", KINDS)


@contextmanager
def dripping(held: Gate) -> Iterator[None]:
    """Let a step pass every 10 ms: workers are slow, but not stuck."""
    try:
        with repeated(held.open, 0.01):
            yield
    finally:
        held.open(100)


@pytest.mark.parametrize("cat", ["stack", -1, 0])
def test_slow_worker_delivers_its_finished_steps(cat: Any, tmp_path: Path) -> None:
    share = 400
    with gate(tmp_path) as held, dripping(held):
        entries = [Stream(0, NEVER), Waiting(held, 3, 100), Stream(200, NEVER)]
        with collecting(
            "sync",
            entries,
            frames=3 * share,
            total_frames=9 * share,
            cat_results=cat,
            preemptive_threshold=0.5,
        ) as collector:
            batches = take(collector, 2)
            stats = collector.stats()
            check_ledger(collector)
    assert frames(batches) == stats.delivered < 6 * share and stats.discarded == 0
    check_workers(batches, 3, cat, NEVER)
    for batch in batches:
        owners = (batch["observation"][..., 0] // 100).long()
        if cat == "stack":
            assert batch.shape == (3, share)
            mask, ids = batch[MASK], batch[IDS]
            assert torch.equal(mask, ids >= 0) and mask[1].sum() < share
            assert torch.equal(mask, mask.sort(-1, descending=True).values), "real steps come first"
            for key in leaf_keys(batch) - {IDS, MASK}:
                assert not batch[key][~mask].any(), "what wasn't made is zero"
        else:
            assert MASK not in leaf_keys(batch) and (batch[IDS] >= 0).all()
            assert (owners == 1).sum() < share


@pytest.mark.parametrize(("kind", "threshold"), [("sync", 1.0), ("sync", 1.5), ("async", 1.0)])
def test_threshold_of_one_waits_for_all(kind: str, threshold: float | None) -> None:
    with collecting(kind, makers(2), total_frames=48, preemptive_threshold=threshold) as collector:
        batches = list(collector)
        assert [valid_rows(batch) for batch in batches] == [12] * 4
    check_workers(batches, 2, "stack" if kind == "sync" else WHOLE)


@pytest.mark.parametrize(
    ("kind", "threshold"), [("sync", 0.0), ("sync", 0.34), ("sync", 0.75), ("async", -1.0), ("async", 0.5)]
)
def test_preemption_meets_the_budget_exactly(kind: str, threshold: float) -> None:
    with collecting(
        kind, makers(4, kind="batched"), frames=80, total_frames=800, preemptive_threshold=threshold
    ) as collector:
        batches = list(collector)
        stats = collector.stats()
        check_ledger(collector)
    assert frames(batches) == stats.delivered == 800
    assert set(stats.reasons) <= {"budget"}, "steps too many that were made meanwhile, at most"
    check_workers(batches, 4, "stack" if kind == "sync" else WHOLE)


def test_a_slow_worker_of_an_asynchronous_collector_comes_too(tmp_path: Path) -> None:
    with (
        gate(tmp_path) as held,
        dripping(held),
        collecting(
            "async", [Stream(0, NEVER), Waiting(held, 3, 100)], frames=400, preemptive_threshold=0.5
        ) as collector,
    ):
        batches: list[Any] = []
        while len([b for b in batches if b["observation"][0, 0] == 100]) < 2:
            batches.append(collector.next())
            assert len(batches) < 5000
        check_ledger(collector)
    slow = [batch for batch in batches if batch["observation"][0, 0] == 100]
    assert all(0 < valid_rows(batch) < 400 for batch in slow)
    check_workers(batches, 2, WHOLE, NEVER)


@BOTH
def test_random_frames_limits_and_resets_with_preemption(kind: str) -> None:
    with collecting(
        kind,
        makers(3, NEVER),
        frames=60,
        total_frames=600,
        preemptive_threshold=0.3,
        init_random_frames=60,
        max_frames_per_traj=7,
        reset_at_each_iter=True,
    ) as collector:
        batches = list(collector)
        check_ledger(collector)
    check_workers(batches, 3, "stack" if kind == "sync" else WHOLE, NEVER, limit=7, fresh_batches=True)


@pytest.mark.parametrize("cat", ["stack", -1])
def test_the_last_step_that_was_made_is_truncated(cat: Any, tmp_path: Path) -> None:
    with (
        gate(tmp_path) as held,
        dripping(held),
        collecting(
            "sync",
            [Stream(0, NEVER), Waiting(held, 3, 100)],
            frames=800,
            cat_results=cat,
            preemptive_threshold=0.5,
            set_truncated=True,
        ) as collector,
    ):
        batch = collector.next()
    owners = (batch["observation"][..., 0] // 100).long()
    real = batch[IDS] >= 0
    for worker in range(2):
        flags = batch["next", "truncated"][real & (owners == worker)]
        assert flags[-1].all() and not flags[:-1].any()
    assert not batch["next", "terminated"].any() and not batch["next", "truncated"][~real].any()


@pytest.mark.parametrize("kind", ["sync"])
def test_split_trajectories_have_real_steps_only(kind: str) -> None:
    with collecting(
        kind, makers(3), frames=60, total_frames=240, preemptive_threshold=0.3, split_trajs=True
    ) as collector:
        batches = list(collector)
        delivered = collector.stats().delivered
    assert sum(int(batch[MASK].sum()) for batch in batches) == delivered
    for batch in batches:
        for row in batch.unbind(0):
            real = row[row[MASK]]
            assert len(real) and (real[IDS] >= 0).all() and len(real[IDS].unique()) == 1
