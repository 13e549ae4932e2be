"""Synchronous workers each make a share of every batch."""

from __future__ import annotations

import pytest
import torch

from gleanrl.errors import EnvironmentFailure
from tests.collectors.helpers import NEVER
from tests.collectors.workers.crews import Stream, check_streams, collecting, rows


@pytest.mark.parametrize("cat", ["stack", 0, -1])
@pytest.mark.parametrize("batch_size", [(), (2,)])
def test_rows_are_in_worker_order_and_streams_continue(cat: object, batch_size: tuple[int, ...]) -> None:
    makers = [Stream(100 * worker, batch_size=batch_size) for worker in range(3)]
    with collecting("sync", makers, frames=24, total_frames=72, cat_results=cat) as collector:
        batches = list(collector)
    check_streams(batches)
    assert sum(batch.numel() for batch in batches) == 72 and collector.stats().delivered == 72
    for batch in batches:
        workers = batch["observation"][..., 0].long() // 100
        order = (
            workers
            if cat == "stack"
            else workers.unique_consecutive(dim=0 if cat == 0 or not batch_size else -1)
        )
        assert order.reshape(3, -1)[:, 0].tolist() == [0, 1, 2] or cat == -1
        if cat == -1:
            assert workers.reshape(-1, workers.shape[-1])[0].unique_consecutive().tolist() == [0, 1, 2]


def test_shares_of_other_workers_are_discarded_when_one_raises() -> None:
    class Failing(Stream):
        def __call__(self):  # type: ignore[no-untyped-def]
            env = super().__call__()
            step, calls = env._step, []

            def failing(tensordict):  # type: ignore[no-untyped-def]
                calls.append(1)
                if len(calls) == 8:
                    raise ZeroDivisionError("on purpose")
                return step(tensordict)

            env._step = failing
            return env

    with collecting("sync", [Stream(0, NEVER), Failing(100, NEVER)], total_frames=48) as collector:
        batches = [collector.next()]
        with pytest.raises(
            ZeroDivisionError, match="environment 1 .*step raised ZeroDivisionError: on purpose"
        ) as caught:
            collector.next()
        assert isinstance(caught.value, EnvironmentFailure)
        batches += list(collector)
        stats = collector.stats()
    check_streams(batches)
    assert stats.delivered == 48 and set(stats.reasons) == {"environment", "sibling"}
    assert stats.reasons["environment"] == 1 and stats.stepped == 48 + stats.discarded


def test_preempted_steps_are_masked_and_not_counted() -> None:
    with collecting("sync", 3, frames=30, total_frames=120, preemptive_threshold=0.3) as collector:
        batches = list(collector)
    check_streams(batches)
    assert len(rows(batches)) == collector.stats().delivered >= 120
    for batch in batches:
        assert torch.equal(batch["collector", "mask"], batch["collector", "traj_ids"] >= 0)
