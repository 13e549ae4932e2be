"""Budgets of collectors with workers are exact to the frame, for any number of workers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from gleanrl.errors import GleanError
from tests.collectors.workers.crews import KINDS, collecting
from tests.contract.helpers import check_ledger
from tests.contract.multi import WHOLE, check_workers, done_with, frames, makers


def up(count: int, unit: int) -> int:
    return math.ceil(count / unit) * unit


SIZES = [
    # number of workers, environments per worker, frames_per_batch, total_frames
    (1, 1, 7, 20),
    (2, 1, 7, 22),
    (3, 1, 10, 25),
    (3, 1, 2, 8),
    (4, 1, 9, 9),
    (2, 2, 9, 30),
    (3, 2, 10, 31),
]


@pytest.mark.parametrize(
    ("cat", "size"),
    [
        *[("stack", SIZES[i]) for i in (0, 2, 3, 6)],
        *[(0, SIZES[i]) for i in (1, 3, 4, 5)],
        *[(-1, SIZES[i]) for i in (2, 5, 6)],
    ],
)
def test_synchronous_budget_is_exact(cat: Any, size: tuple[int, int, int, int]) -> None:
    workers, p, per_batch, total = size
    unit = workers * p if cat == "stack" or (cat == 0 and p > 1) else p
    full = up(per_batch, unit)
    kind = "single" if p == 1 else "batched"
    with collecting(
        "sync", makers(workers, kind=kind), frames=per_batch, total_frames=total, cat_results=cat
    ) as collector:
        assert (collector.requested_frames_per_batch, collector.frames_per_batch) == (per_batch, full)
        assert collector.total_frames == up(total, unit)
        assert len(collector) == math.ceil(up(total, unit) / full)
        batches = list(collector)
    sizes = [batch.numel() for batch in batches]
    assert sizes[:-1] == [full] * (len(sizes) - 1) and 0 < sizes[-1] <= full
    assert sum(sizes) == up(total, unit) == collector.stats().delivered == collector.stats().stepped
    check_workers(batches, workers, cat)
    check_ledger(collector)


@pytest.mark.parametrize(("workers", "p", "per_batch", "total"), SIZES[1:3] + SIZES[5:])
def test_asynchronous_budget_is_exact(workers: int, p: int, per_batch: int, total: int) -> None:
    kind = "single" if p == 1 else "batched"
    with collecting("async", makers(workers, kind=kind), frames=per_batch, total_frames=total) as collector:
        assert collector.frames_per_batch == up(per_batch, p)
        batches = list(collector)
        assert frames(batches) == up(total, p) == collector.stats().stepped
    assert all(0 < batch.numel() <= up(per_batch, p) for batch in batches)
    check_workers(batches, workers, WHOLE)
    check_ledger(collector)


@pytest.mark.parametrize(("kind", "total"), [("sync", -1), ("async", None)])
def test_no_total_means_endless(kind: str, total: int | None) -> None:
    with collecting(kind, 2, frames=4, total_frames=total) as collector:
        assert [collector.next().numel() for _ in range(20)] == [4] * 20
        assert collector.total_frames == float("inf")
        with pytest.raises(TypeError):
            len(collector)


@pytest.mark.parametrize("kind", KINDS)
def test_random_frames_round_up_to_whole_batches_and_count(kind: str) -> None:
    def policy(observation: Any) -> Any:
        return observation[..., :2] * 0 + 0.5

    with collecting(kind, 2, policy, frames=8, total_frames=48, init_random_frames=9) as collector:
        assert collector.init_random_frames == 16
        batches = list(collector)
    assert frames(batches) == 48
    fixed = [(batch["action"] == 0.5).all().item() for batch in batches]
    anything = [(batch["action"] == 0.5).any().item() for batch in batches]
    assert anything == fixed, "a batch is random as a whole"
    assert sum(batch.numel() for batch, own in zip(batches, fixed, strict=True) if not own) == 16
    if kind == "sync":
        assert fixed == [False] * 2 + [True] * 4
    for batch in batches:
        assert batch["action"].abs().max() <= 1 and set(batch.keys()) >= {"observation", "action", "next"}


@pytest.mark.parametrize("kind", ["async"])
def test_random_frames_carry_zeros_in_the_policys_own_columns(kind: str) -> None:
    def policy(tensordict: Any) -> Any:
        tensordict["action"] = tensordict["observation"][..., :2] * 0 + 0.5
        tensordict["value"] = tensordict["observation"][..., :1] * 0 + 7
        return tensordict

    with collecting(kind, 2, policy, frames=8, total_frames=32, init_random_frames=8) as collector:
        batches = list(collector)
    for batch in batches:
        random = not bool((batch["action"] == 0.5).all())
        assert (batch["value"] == (0 if random else 7)).all()


@pytest.mark.parametrize("kind", ["sync"])
def test_negative_random_frames_are_none(kind: str) -> None:
    def policy(observation: Any) -> Any:
        return observation[..., :2] * 0 + 0.5

    with collecting(kind, 2, policy, total_frames=12, init_random_frames=-1) as collector:
        assert all((batch["action"] == 0.5).all() for batch in collector)


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_inexact_budget_warns_once_at_construction(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def caught(frames_per_batch: int, total_frames: int) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            collector = cls(makers(2), None, frames_per_batch=frames_per_batch, total_frames=total_frames)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(collector)
        done_with(collector)
        return [str(warning.message) for warning in found]

    assert caught(10, 30) == []
    (message,) = caught(10, 24)
    assert "24" in message
    if cls is MultiSyncDataCollector:
        assert any("frames_per_batch" in message for message in caught(9, 20))
    monkeypatch.setenv("RL_WARNINGS", "0")
    assert caught(9, 25) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("frames", value) for value in (0, -1, 2.5, "10", float("nan"))],
        *[("total_frames", value) for value in (2.5, "20", float("inf"))],
    ],
)
def test_bad_values_name_argument_and_value(kind: str, name: str, value: Any) -> None:
    argument = "frames_per_batch" if name == "frames" else name
    with pytest.raises(ValueError, match=argument) as caught, collecting(kind, 2, **{name: value}):
        pass
    assert isinstance(caught.value, GleanError) and str(value) in str(caught.value)
