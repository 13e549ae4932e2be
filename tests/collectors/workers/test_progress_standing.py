"""The progress of a collection is an immutable value; each event makes a new one."""

from __future__ import annotations

from gleanrl.collectors.workers.progress import Consumed, Losses, Progress
from gleanrl.collectors.workers.shared_counters import Share

BATCH = Consumed({0: 0, 2: 0}, frames=10, flagged=1, excess=2, counted=True, seconds=0.5)


def test_repeated_delivery_counts_a_batch_once() -> None:
    before = Progress.begin(3)
    after = before.delivering(BATCH)
    assert after.num_consumed == (1, 0, 1) and after.delivering(BATCH) is after
    counts = after.counts
    assert (counts.delivered, counts.flagged, counts.discards, counts.batches) == (9, 1, {"budget": 2}, 1)


def test_delivery_keeps_events_of_other_workers() -> None:
    meanwhile = Progress.begin(3).without(1, Share(True, 0, 4, 0, 0, "policy")).delivering(BATCH)
    assert meanwhile.num_consumed == (1, 1, 1) and meanwhile.counts.discards == {"policy": 4, "budget": 2}


def test_unwanted_and_lost_shares_are_discarded_with_their_reasons() -> None:
    now = Progress.begin(2).with_worker(0, unwanted="state", resets=True)
    now = now.without(0, Share(False, 3, 3, 0, 1, ""))
    assert now.num_consumed == (1, 0) and now.counts.discards == {"state": 3, "budget": 1}
    now = now.losing(0, 2, "worker", Losses(1, frames=2))
    assert now.counts.discards["worker"] == 2 and now.losses[0].number == 1
    assert (now.unwanted, now.resets) == (("", ""), (False, False))
