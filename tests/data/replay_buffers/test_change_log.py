"""The change log agrees with a list of all changes, and followers catch up after missed changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleanrl.data.replay_buffers.change_log import (
    Change,
    ChangeLog,
    Follower,
    Version,
    Versioned,
    moved_past,
    same_generations,
    slots_in,
    touched,
    version_from,
    version_state,
)

SIZE = 7


class Ring(Versioned):
    def __init__(self) -> None:
        self.log = ChangeLog()

    @property
    def version(self) -> Version:
        return self.log.version

    def changed_since(self, version: Version) -> list[Change] | None:
        return self.log.since(version)


class Copy(Follower[Ring]):
    """Follows and records the changes that it receives; fails while `failing` is set."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.failing = False

    def _look_at_all(self, storage: Ring) -> None:
        self._fail()
        self.told.append("everything")

    def _look_at(self, storage: Ring, changes: list[Change]) -> None:
        self._fail()
        self.told.append(changes)

    def _fail(self) -> None:
        if self.failing:
            self.failing = False
            raise KeyboardInterrupt


@given(
    notes=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, 2 * SIZE), st.booleans(), st.booleans()),
        max_size=12,
    ),
    since=st.integers(0, 12),
)
def test_log_lists_the_changes_since_any_version(notes, since):
    log, versions, changed = ChangeLog(), [], []
    at = 0
    for start, count, amended, onward in notes:
        start = at if onward else start
        versions.append(log.version)
        changed.append((start, count, amended))
        log.note_ranges([(start, count)], SIZE, amended) if amended else log.note(start, count, SIZE)
        at = (start + count) % SIZE
    versions.append(log.version)
    since = min(since, len(notes))
    fresh, altered = set(), set()
    for start, count, amended in changed[since:]:
        (altered if amended else fresh).update((start + k) % SIZE for k in range(count))
    found = log.since(versions[since])
    assert found is not None
    assert [slot for c in found if not c.amended for slot in range(c.start, c.stop)] == sorted(fresh)
    assert [slot for c in found if c.amended for slot in range(c.start, c.stop)] == sorted(altered - fresh)
    assert found == sorted(found)


def test_ring_writes_are_remembered_for_ever_in_one_run():
    log = ChangeLog()
    first = log.version
    log.note(0, 3, 100)
    early = log.version
    for k in range(10_000):
        log.note((3 + k) % 100, 1, 100)
    late = log.version
    log.note(3, 2, 100)
    assert log.since(first) == log.since(early) == [Change(0, 100, False)]
    assert log.since(late) == [Change(3, 5, False)]
    assert len(log._runs) == 1


def test_log_separates_single_writes_up_to_a_number():
    log = ChangeLog()
    first = log.version
    for _ in range(1025):
        log.note(3, 1, 100)
    assert log.since(first) == [Change(0, 100, False)]
    assert log.since(Version(first.content, 1)) == [Change(3, 4, False)]


def test_dropped_amendments_are_never_reported_as_new_records():
    log = ChangeLog()
    log.note(0, 100, 100)
    before = log.version
    for _ in range(1025):
        log.note_ranges([(3, 1)], 100, amended=True)
    assert log.since(before) == [Change(0, 100, True)]
    log.note(7, 2, 100)
    assert log.since(before) == [Change(0, 7, True), Change(7, 9, False), Change(9, 100, True)]
    between = log.version
    log.note_ranges([(2 * k, 1) for k in range(1025)], 5000)
    log.note_ranges([(2 * k, 1) for k in range(1025)], 5000, amended=True)
    log.note_ranges([(3, 1)], 5000, amended=True)
    assert log.since(before) == log.since(between) == [Change(0, 5000, False)], (
        "new records were dropped, too"
    )


def test_log_separates_any_number_of_ranges_of_one_write():
    log = ChangeLog()
    before = log.version
    log.note(3, 1, 10_000)
    since = log.version
    log.note_ranges([(2 * k, 1) for k in range(3000)], 10_000)
    assert log.since(since) == [Change(2 * k, 2 * k + 1, False) for k in range(3000)]
    assert log.since(before) == [Change(0, 10_000, False)]


def test_changes_since_another_content_or_a_later_version_are_all_slots():
    log, other = ChangeLog(), ChangeLog()
    log.note(0, 1, SIZE)
    assert log.since(other.version) is None
    assert log.since(Version(log.version.content, 2)) == [Change(0, SIZE, False)]
    before = log.version
    log.renew()
    assert log.since(before) is None and log.since(log.version) == []


def test_a_follower_looks_only_where_something_changed():
    ring, copy = Ring(), Copy()
    copy.sync(ring)
    copy.sync(ring)
    ring.log.note(1, 2, SIZE)
    ring.log.note(3, 1, SIZE)
    copy.sync(ring)
    copy.sync(ring)
    ring.log.renew()
    copy.sync(ring)
    copy.unfollow()
    copy.sync(ring)
    assert copy.told == ["everything", [Change(1, 4, False)], "everything", "everything"]


@pytest.mark.parametrize("followed", [False, True])
def test_a_follower_that_was_interrupted_catches_up(followed):
    ring, copy = Ring(), Copy()
    if followed:
        copy.sync(ring)
        ring.log.note(1, 2, SIZE)
    copy.failing = True
    with pytest.raises(KeyboardInterrupt):
        copy.sync(ring)
    ring.log.note(5, 1, SIZE)
    copy.sync(ring)
    assert copy.told[-1] == ([Change(1, 3, False), Change(5, 6, False)] if followed else "everything")


def test_slots_of_changes():
    changes = [Change(0, 2, False), Change(4, 6, True)]
    assert slots_in(changes).tolist() == [0, 1, 4, 5]
    slots = torch.tensor([5, 1, 3, 0])
    assert touched(slots, changes).tolist() == [True, True, False, True]
    assert touched(slots, None).all() and not touched(slots, []).any()


def test_which_slots_were_touched_by_many_changes():
    random = np.random.default_rng(0)
    for count in (1, 2, 7, 500):
        edges = np.sort(random.choice(3 * count + 2, 2 * count, replace=False))
        edges[2::4] = edges[1::4][: len(edges[2::4])]  # makes some changes adjacent
        changes = [Change(start, stop, bool(stop % 2)) for start, stop in edges.reshape(-1, 2).tolist()]
        slots = torch.from_numpy(random.integers(0, 3 * count + 2, 200))
        written = {slot for start, stop, _ in changes for slot in range(start, stop)}
        assert touched(slots, changes).tolist() == [slot in written for slot in slots.tolist()]


def test_versions_are_saved_as_numbers():
    version = Version(5, 3)
    assert version_from(version_state(version)) == version
    for state in (None, [1], ["a", 2], {"a": 1}, [1, 2, 3]):
        assert version_from(state) is None


def test_generations_of_a_copy_never_come_again_and_are_the_same():
    saved = torch.tensor([3, 5, 1])
    assert torch.equal(moved_past(saved, torch.tensor([3, 4, 0])), saved), "a fresh storage"
    moved = moved_past(saved, torch.tensor([3, 9, 0]))
    assert bool((moved > 9).all()) and len((moved - saved).unique()) == 1
    assert same_generations(moved, saved).all()
    assert same_generations(moved, torch.tensor([3, 4, 1])).tolist() == [True, False, True]
    assert moved_past(saved[:0], saved[:0]).shape == (0,)
