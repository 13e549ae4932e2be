"""The frame ledger balances after any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.collectors.ledger import FrameLedger

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
    ledger = FrameLedger()
    given_out, flagged, lost = 0, 0, {"environment": 0, "policy": 0}
    for kind, frames, detail in events:
        if kind == "deliver":
            marked = min(frames, int(detail))  # type: ignore[call-overload]
            ledger.deliver(frames, marked)
            given_out, flagged = given_out + frames - marked, flagged + marked
        else:
            ledger.discard(frames, str(detail))
            lost[str(detail)] += frames
        ledger.check_valid()
    assert (ledger.delivered, ledger.flagged, ledger.discarded) == (given_out, flagged, sum(lost.values()))
    assert dict(ledger.reasons) == {reason: n for reason, n in lost.items() if n}
    other = FrameLedger()
    other.load_state_dict(ledger.state_dict())
    assert other == ledger
    other.discard(5, "policy")
    assert ledger.discarded == sum(lost.values()), "a loaded ledger shares nothing with the saved one"


def test_a_discard_of_nothing_leaves_no_reason() -> None:
    ledger = FrameLedger()
    ledger.discard(0, "environment")
    assert (dict(ledger.reasons), ledger.stepped) == ({}, 0)


def test_counts_never_wrap() -> None:
    ledger = FrameLedger()
    for _ in range(4):
        ledger.deliver(2**62)
    assert ledger.stepped == ledger.delivered == 2**64
    ledger.check_valid()


def test_reasons_are_a_read_only_copy() -> None:
    ledger = FrameLedger()
    ledger.discard(3, "environment")
    reasons = ledger.reasons
    ledger.discard(3, "environment")
    assert reasons == {"environment": 3}
    with pytest.raises(TypeError):
        reasons["environment"] = 0  # type: ignore[index]


def test_books_that_do_not_balance_are_found() -> None:
    ledger = FrameLedger()
    ledger.deliver(10)
    ledger.delivered -= 1
    with pytest.raises(AssertionError, match="delivered=9"):
        ledger.check_valid()
