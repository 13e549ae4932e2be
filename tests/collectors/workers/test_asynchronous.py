"""Asynchronous workers make one batch each."""

from __future__ import annotations

import pytest

from tests.collectors.workers.crews import check_streams, collecting


@pytest.mark.parametrize("total", [12, 30, 96])
def test_budget_is_met_and_streams_continue(total: int) -> None:
    with collecting("async", 3, total_frames=total) as collector:
        batches = list(collector)
    check_streams(batches)
    assert sum(batch.numel() for batch in batches) == total == collector.stats().stepped
    assert all(batch["observation"][:, 0].unique().numel() == 1 for batch in batches)


def test_lost_batch_and_its_successors_are_discarded() -> None:
    calls: list[int] = []

    def postproc(batch):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("on purpose")
        return batch

    batches = []
    with collecting("async", 2, total_frames=120, postproc=postproc) as collector:
        while len(calls) < 3:
            try:
                batches.append(collector.next())
            except KeyError:
                break
        batches += list(collector)
        stats = collector.stats()
    check_streams(batches)
    assert stats.delivered == 120 and stats.reasons["postproc"] >= 12
