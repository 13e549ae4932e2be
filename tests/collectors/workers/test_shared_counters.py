"""Shared counters written by one process are read by the other."""

from __future__ import annotations

import numpy as np
import pytest

from gleanrl._process.shared_columns import STEP, WORK
from gleanrl.collectors.frame_accounting import Episode
from gleanrl.collectors.source import Grant
from gleanrl.collectors.workers import shared_counters
from gleanrl.collectors.workers.shared_counters import (
    BEGUN,
    CUT,
    EPISODES,
    GRANTED,
    NEXT_ID,
    REASONS,
    SERVED,
    Share,
    SharedCounters,
)
from tests.collectors.workers.traced import TracedWords


def made(num_slots: int = 2) -> SharedCounters:
    return SharedCounters(memoryview(np.zeros(384, np.int64)), num_slots)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_grants_are_served_in_order_and_shares_come_back(num_slots: int) -> None:
    words = made(num_slots)
    assert words.begin() is None
    for number in range(7):
        grant = Grant(number + 1, number % 2 == 0, None if number % 3 else number)
        words.grant(grant, reset=number == 2)
        assert words.granted_steps(number) == number + 1 and not words.is_at_work
        assert words.begin() == (number, grant, number == 2) and words.begin() is None
        assert words.is_at_work and words.under_way == 0
        words.words[STEP] = 3
        assert words.under_way == 3
        share = Share(False, number, 10 * number, 1, 2, REASONS[0])
        words.finish(number, share)
        assert words.share(number) == share and words.under_way == 0
        assert words.words[SERVED] == words.words[GRANTED] == number + 1


def test_a_share_that_its_owner_did_not_cut_must_have_the_steps_of_its_grant() -> None:
    words = made()
    for number, (num_steps, cut, short) in enumerate(
        [(5, 0, False), (0, 0, True), (3, 3, False), (4, 3, True)]
    ):
        words.grant(Grant(5), False)
        words.begin()
        words.words[CUT] = cut
        words.finish(number, Share(False, num_steps, num_steps, 0, 0, ""))
        assert words.is_short(number) == short


@pytest.mark.parametrize("reason", REASONS)
def test_failed_share_carries_its_reason(reason: str) -> None:
    words = made()
    words.grant(Grant(5), False)
    words.begin()
    words.finish(0, Share(True, 0, 4, 0, 0, reason))
    assert words.share(0) == Share(True, 0, 4, 0, 0, reason)


def test_two_grants_have_separate_slots() -> None:
    words = made()
    words.grant(Grant(5), False)
    words.grant(Grant(6), True)
    assert [words.begin(), words.begin()] == [(0, Grant(5), False), (1, Grant(6), True)]


def test_replacement_continues_after_the_last_share_of_the_lost_worker() -> None:
    words = made()
    words.grant(Grant(5), False)
    words.begin()
    words.finish(0, Share(False, 5, 5, 0, 0, REASONS[0]))
    words.grant(Grant(5), False)
    words.grant(Grant(5), False)
    words.begin()
    words.words[CUT], words.words[NEXT_ID] = 3, 12
    words.go_on()
    assert words.begin() is None and not words.is_at_work and words.words[NEXT_ID] == 12
    assert words.words[CUT] == words.words[SERVED] == 1
    words.grant(Grant(3), False)
    assert words.begin() == (1, Grant(3), False)


def test_every_share_counts_as_work() -> None:
    words = made()
    for number in range(2):
        words.grant(Grant(5), False)
        words.begin()
        assert words.words[WORK] == number + 1


def test_frames_are_counted_with_the_share_or_not_at_all() -> None:
    words = made()
    for number, frames in enumerate((3, 5, 7)):
        words.grant(Grant(9), False)
        words.begin()
        before = words.frames
        words.finish(number, Share(number == 1, 9, frames, 0, 1, REASONS[0]))
        assert words.frames == before + frames + 1
        words.words[SERVED] = number  # as if it had been killed just before it published
        assert words.frames == before
        words.words[SERVED] = number + 1


def test_floats_are_the_same_words() -> None:
    words = made()
    words.floats[NEXT_ID] = 1.5
    assert words.floats[NEXT_ID] == 1.5 and words.words[NEXT_ID] == np.float64(1.5).view(np.int64)
    assert repr(words) == "Words(granted=0, begun=0, served=0)"


def test_the_last_hundred_episodes_are_kept_with_the_times_of_their_ends() -> None:
    words = made()
    assert words.recent_episodes() == []
    words.note_episodes(2, [Episode(1.0, 3), Episode(2.0, 4)], 10.0, 12.0)
    assert words.recent_episodes() == [(11.0, Episode(1.0, 3)), (12.0, Episode(2.0, 4))]
    words.note_episodes(250, [Episode(float(n), n) for n in range(150, 250)], 20.0, 120.0)
    assert words.recent_episodes() == [(20.0 + n - 149, Episode(float(n), n)) for n in range(150, 250)]
    words.note_episodes(253, [Episode(float(n), n) for n in range(250, 253)], 200.0, 203.0)
    found = words.recent_episodes()
    assert (
        len(found) == 100
        and found[0] == (24.0, Episode(153.0, 153))
        and found[-1] == (203.0, Episode(252.0, 252))
    )


def test_a_fence_precedes_each_published_counter_and_follows_each_read_one(monkeypatch) -> None:
    traced = TracedWords(monkeypatch, shared_counters)
    counters, log = SharedCounters(traced, 2), traced.log  # type: ignore[arg-type]

    def logged(call):
        log.clear()
        call()
        return log

    assert logged(lambda: counters.grant(Grant(5), False))[-2:] == ["fence", ("write", GRANTED)]
    assert logged(counters.begin)[:3] == [("read", BEGUN), ("read", GRANTED), "fence"]
    assert logged(lambda: counters.note_episodes(1, [Episode(1.0, 3)], 0.0, 1.0))[-2:] == [
        "fence",
        ("write", EPISODES),
    ]
    share = Share(False, 5, 5, 0, 0, "")
    assert logged(lambda: counters.finish(0, share))[-2:] == ["fence", ("write", SERVED)]
    assert logged(lambda: counters.num_served) == [("read", SERVED), "fence"]
    assert logged(lambda: counters.frames)[:2] == [("read", SERVED), "fence"]
    assert logged(counters.recent_episodes)[:2] == [("read", EPISODES), "fence"]
