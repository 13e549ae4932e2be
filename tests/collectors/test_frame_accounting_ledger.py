"""Frame counts add up after any sequence of events."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl._state.state import plain
from gleanrl.collectors.frame_accounting import FrameCounts, TrajectoryIds
from gleanrl.errors import SchemaError

FRAMES = st.integers(0, 1000)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), FRAMES, FRAMES),
        st.tuples(st.just("discard"), FRAMES, st.sampled_from(["environment", "policy"])),
    ),
    max_size=20,
)


@given(EVENTS)
def test_every_frame_is_accounted_for(events: list[tuple[str, int, object]]) -> None:
    ledger = FrameCounts()
    given_out, flagged, batches, lost = 0, 0, 0, {"environment": 0, "policy": 0}
    for kind, frames, detail in events:
        if kind == "deliver":
            marked = min(frames, int(detail))  # type: ignore[call-overload]
            ledger = ledger.delivering(frames, marked)
            given_out, flagged, batches = given_out + frames - marked, flagged + marked, batches + 1
        else:
            ledger = ledger.discarding(frames, str(detail))
            lost[str(detail)] += frames
    assert (ledger.delivered, ledger.flagged, ledger.discarded) == (given_out, flagged, sum(lost.values()))
    assert ledger.stepped == given_out + flagged + sum(lost.values())
    assert (ledger.spent, ledger.batches) == (given_out + flagged, batches)
    assert ledger.discards == {reason: n for reason, n in lost.items() if n}
    assert FrameCounts.read(plain(ledger)) == ledger


def test_uncounted_frames_are_delivered_without_spending_the_budget() -> None:
    ledger = FrameCounts().delivering(10).delivering(5, 2, counted=False)
    assert (ledger.delivered, ledger.flagged, ledger.spent, ledger.batches) == (13, 2, 10, 1)


def test_frame_counts_are_immutable() -> None:
    ledger = FrameCounts()
    ledger.delivering(3)
    ledger.discarding(3, "policy")
    ledger.lasting(1.0)
    assert ledger == FrameCounts()


def test_counts_never_wrap() -> None:
    ledger = FrameCounts()
    for _ in range(4):
        ledger = ledger.delivering(2**62)
    assert ledger.stepped == ledger.delivered == 2**64


def test_stats_report_all_counts() -> None:
    ledger = FrameCounts().lasting(2.0).delivering(6, 1).discarding(3, "environment")
    stats = ledger.stats(
        replace(TrajectoryIds.begin(1), num_ended=2, recent_returns=(1.0, 2.0), recent_lengths=(3, 4))
    )
    assert (stats.stepped, stats.delivered, stats.flagged, stats.discarded) == (9, 5, 1, 3)
    assert (stats.batches, stats.episodes, stats.mean_return, stats.frames_per_s) == (1, 2, 1.5, 4.5)
    assert stats.mean_length == 3.5 and math.isnan(ledger.stats().mean_length)
    with pytest.raises(TypeError):
        stats.reasons["environment"] = 0  # type: ignore[index]


@pytest.mark.parametrize("field", [field.name for field in fields(FrameCounts)])
def test_a_state_that_does_not_fit_is_refused_by_name(field: str) -> None:
    state = plain(FrameCounts().discarding(3, "policy"))
    for wrong in (-1, None, "1", {"policy": -3}):
        with pytest.raises(SchemaError, match="expected"):
            FrameCounts.read({**state, field: wrong})
    del state[field]
    with pytest.raises(SchemaError, match=f"'{field}' is missing"):
        FrameCounts.read(state)
