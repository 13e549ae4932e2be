"""Frames of several workers are exact and ids unique, over resets, limits, restarts and restored states."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from gleanrl.collectors import MultiSyncDataCollector
from gleanrl.envs import GymWrapper
from tests.collectors.workers.crews import KINDS, Stream, collecting
from tests.contract.helpers import IDS, check_ledger
from tests.contract.multi import SCRIPT, WHOLE, check_workers, frames, makers, shares, take
from tests.fakes import OracleEnv, ReusingEnv, Script
from tests.fakes_base import ReusingBase

B = 3
CAT: dict[str, Any] = {"sync": "stack", "async": WHOLE}


def all_ids(batches: list[Any]) -> set[int]:
    return {name for batch in batches for name in batch[IDS].unique().tolist()}


@pytest.mark.parametrize(("kind", "env"), [("sync", "single"), ("sync", "batched"), ("async", "batched")])
def test_a_limit_truncates_and_trajectories_cross_batches(kind: str, env: str) -> None:
    script = Script(seed=63, low=2, high=12)
    with collecting(
        kind, makers(B, script, env), frames=30, total_frames=150, max_frames_per_traj=5
    ) as collector:
        batches = list(collector)
    check_workers(batches, B, CAT[kind], script, limit=5)
    for batch in batches:
        assert torch.equal(batch["step_count"].squeeze(-1), batch["observation"][..., 2].long())
        assert batch["next", "step_count"].max() <= 5
    assert any(batch["next", "truncated"].any() for batch in batches)


@pytest.mark.parametrize(("kind", "limit"), [("sync", 0), ("async", -1)])
def test_no_limit_adds_no_step_count(kind: str, limit: int) -> None:
    with collecting(kind, 2, total_frames=12, max_frames_per_traj=limit) as collector:
        assert all("step_count" not in batch.keys() for batch in collector)


@pytest.mark.parametrize(("kind", "env"), [("sync", "batched"), ("async", "single")])
def test_a_reset_at_each_batch_begins_new_trajectories(kind: str, env: str) -> None:
    with collecting(
        kind, makers(2, kind=env), frames=12, total_frames=60, reset_at_each_iter=True
    ) as collector:
        batches = list(collector)
    check_workers(batches, 2, CAT[kind], fresh_batches=True)
    for batch in batches:
        assert (batch["observation"][..., 0, 2] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reset_gives_new_ids(kind: str) -> None:
    with collecting(kind, makers(2), frames=12, total_frames=96) as collector:
        before = take(collector, 2)
        collector.reset()
        after = list(collector)
        check_ledger(collector)
    assert all_ids(before).isdisjoint(all_ids(after))
    check_workers(before, 2, CAT[kind])
    check_workers(after, 2, CAT[kind])
    assert frames(before + after) == 96
    seen = {tuple(row) for batch in before for row in batch["observation"].reshape(-1, 3).tolist()}
    for batch in after:
        assert seen.isdisjoint(tuple(row) for row in batch["observation"].reshape(-1, 3).tolist())


def test_each_iteration_continues_after_the_last_one() -> None:
    for kind in KINDS:
        with collecting(kind, makers(2), frames=12, total_frames=60) as collector:
            batches = []
            for _ in range(2):
                for count, batch in enumerate(collector):
                    batches.append(batch)
                    if count == 1:
                        break
            batches += list(collector)
            assert frames(batches) == 60
            assert collector.next() is None and collector.next() is None
        check_workers(batches, 2, CAT[kind])


@pytest.mark.parametrize("kind", ["async"])
def test_environments_that_use_their_arrays_again(kind: str) -> None:
    script = SCRIPT

    def arrays() -> Any:
        return GymWrapper(ReusingEnv(0, script))

    def tensordicts() -> Any:
        env = ReusingBase(script)
        env._streams += 100
        return env

    with collecting(kind, [arrays, tensordicts], total_frames=60) as collector:
        check_workers(list(collector), 2, CAT[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_is_replaced_uses_no_id_again(kind: str) -> None:
    with collecting(kind, makers(2), frames=12, total_frames=120, on_worker_error="restart") as collector:
        batches = take(collector, 2)
        for worker in range(2):
            os.kill(collector.processes[worker], signal.SIGKILL)
            batches += take(collector, 2)
        batches += list(collector)
        stats = collector.stats()
        check_ledger(collector)
    assert frames(batches) == 120 == stats.delivered
    assert sum(worker.restarts for worker in stats.workers) >= 1
    places: dict[int, list[tuple[int, ...]]] = {}
    for batch in batches:
        for share in shares(batch, 2, CAT[kind]).values():
            for name, row in zip(share[IDS].tolist(), share["observation"].long().tolist(), strict=True):
                places.setdefault(name, []).append(tuple(row))
            step = share["next", "observation"] - share["observation"]
            assert torch.equal(step, torch.tensor([0.0, 0.0, 1.0]).expand_as(step))
    for name, rows in places.items():
        assert {row[:2] for row in rows} == {rows[0][:2]}, name
        steps = [row[2] for row in rows]
        assert steps == list(range(len(steps))), f"id {name} goes on after its environment was lost: {rows}"


@pytest.mark.parametrize("kind", ["sync"])
def test_postproc_sees_whole_batches_after_the_split_and_hooks_are_called(kind: str) -> None:
    shapes, hooks, delivered = [], [], []

    def postproc(batch: Any) -> Any:
        shapes.append(tuple(batch.shape))
        return batch.set("mark", torch.full(batch.shape, float(len(shapes))))

    with collecting(
        kind,
        makers(2),
        frames=12,
        total_frames=36,
        postproc=postproc,
        pre_collect_hook=lambda: hooks.append("pre"),
        post_collect_hook=delivered.append,
        split_trajs=True,
    ) as collector:
        batches = list(collector)
    assert [tuple(batch.shape) for batch in batches] == shapes
    assert [batch["mark"].unique().item() for batch in batches] == [1, 2, 3]
    assert hooks == ["pre"] * 3 and len(delivered) == 3
    assert all("mark" in batch.keys() for batch in delivered)


def test_a_long_run_keeps_every_stream_exact() -> None:
    """All sizes are odd: workers, frames, limits, and episodes of one step."""
    script = Script(seed=64, low=1, high=3)
    for kind in KINDS:
        with collecting(
            kind, makers(5, script, "batched"), frames=70, total_frames=700, max_frames_per_traj=2
        ) as collector:
            batches = list(collector)
        assert frames(batches) == 700
        check_workers(batches, 5, CAT[kind], script, limit=2)


def test_one_environment_for_all_is_copied() -> None:
    """Each worker gets its own copy: streams don't mix, and the caller's environment is unchanged."""
    env = GymWrapper(OracleEnv(script=SCRIPT))
    collector = MultiSyncDataCollector([env] * 2, None, frames_per_batch=12, total_frames=24)
    for batch in collector:
        for row in batch.unbind(0):
            assert torch.equal(row["next", "observation"][:, 2], row["observation"][:, 2] + 1)
        assert torch.equal(batch["observation"][0], batch["observation"][1]), "the same, made twice"
        assert set(batch[IDS][0].tolist()).isdisjoint(batch[IDS][1].tolist())
    assert env._env.episode == -1 and Stream(0, SCRIPT)()._episode.item() == -1
