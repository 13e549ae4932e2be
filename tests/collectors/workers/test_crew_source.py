"""The owner's side: losses, restarts, what is asked in between."""

from __future__ import annotations

import pytest

from tests.collectors.workers.crews import Stream, check_streams, collecting


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_state_comes_back_and_ids_go_on(kind: str) -> None:
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
