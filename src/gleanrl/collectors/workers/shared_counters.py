"""What the owner of a crew of collections and one of its workers tell each other in shared memory.

All words are int64, written by one side only, each by one store; a worker that takes the place of another one finds
them as they were. The owner writes a grant into its slot, then counts it in `GRANTED`; the worker writes the share's
words into the slot, then counts it in `SERVED`. Grant number n uses slot n modulo the number of slots, the same one as
the worker's block. The order of the stores is what the other side sees on x86; elsewhere the calls of the system in
between see to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gleanrl._process.shared_columns import OWN, STEP, WORK
from gleanrl.collectors.frame_accounting import NUM_RECENT, Episode
from gleanrl.collectors.source import Grant

GRANTED, SERVED, BEGUN, CUT = range(OWN, OWN + 4)
"""Grants given; shares finished; shares begun; grants with numbers below this end after the step at hand."""
PUBLISHED, WRITING, WRITING_OWN, PULLED = range(OWN + 4, OWN + 8)
"""Weights (see `weights`): which are to be used; which are being written, of all workers and of this one; which the
worker uses."""
MARKED = OWN + 15
"""The least version that frames are to say, whatever that of the weights is."""
NEXT_ID, EPISODES, BUSY, IDLE = range(OWN + 8, OWN + 12)
"""The first local id that no frame has; what the worker has done: ended trajectories, nanoseconds of collecting and
waiting."""
_SLOTS = OWN + 16
_NUM_STEPS, _RANDOM, _MOST, _RESET, _COUNT, _FRAMES, _FLAGGED, _EXCESS, _REASON = range(9)
_SLOT_WORDS = 9
_TOTALS = OWN + 50  # frames of all shares: of an even number of them in the first of two words
_RECENT = OWN + 56  # three words for each of the last ended trajectories: time of the end, return, length
_FAILED = -1

REASONS = ("environment", "policy", "nonfinite", "error", "interrupted", "budget")
"""Why frames of a share that failed are discarded; the words hold the index."""


class Share(NamedTuple):
    """What came of a grant."""

    failed: bool
    num_steps: int
    """Steps of the block that it holds."""
    frames: int
    """Frames in it; if it failed, those that were stepped for it."""
    flagged: int
    excess: int
    """Frames that were stepped, and masked because they are beyond the budget."""
    reason: str
    """Why it failed."""


class SharedCounters:
    """The words of one worker, seen from either side.

    Args:
        words: of its progress.
        num_slots: grants that can be under way.
    """

    def __init__(self, words: memoryview, num_slots: int) -> None:
        self.words, self._num_slots = words, num_slots
        self.floats = words.cast("B").cast("d")
        """The same words, as float64."""

    def _slot(self, number: int) -> int:
        return _SLOTS + number % self._num_slots * _SLOT_WORDS

    # ------------------------------------------------------------------ owner
    def grant(self, grant: Grant, reset: bool) -> None:
        """Give a grant; the worker begins with it once it is woken.

        Args:
            grant: at most as many steps as its blocks have.
            reset: whether its environments are reset first.
        """
        words, number = self.words, self.words[GRANTED]
        slot = self._slot(number)
        words[slot + _NUM_STEPS], words[slot + _RANDOM] = grant.num_steps, grant.random
        words[slot + _MOST] = -1 if grant.most is None else grant.most
        words[slot + _RESET] = reset
        words[GRANTED] = number + 1

    def has_failed(self, number: int) -> bool:
        """Return whether a grant that was served brought a failure instead of a share."""
        return self.words[self._slot(number) + _COUNT] == _FAILED

    def granted_steps(self, number: int) -> int:
        """Return the steps of a grant that is under way, or was served and not followed by another one in its slot."""
        return self.words[self._slot(number) + _NUM_STEPS]

    def share(self, number: int) -> Share:
        """Return what came of a grant that was served, before the next one that uses its slot."""
        words, slot = self.words, self._slot(number)
        count = words[slot + _COUNT]
        return Share(
            count == _FAILED,
            max(count, 0),
            words[slot + _FRAMES],
            words[slot + _FLAGGED],
            words[slot + _EXCESS],
            REASONS[words[slot + _REASON]],
        )

    def is_short(self, number: int) -> bool:
        """Return whether a share that was served has other steps than its grant, and its owner didn't cut it."""
        return self.share(number).num_steps != self.granted_steps(number) and self.words[CUT] <= number

    @property
    def frames(self) -> int:
        """Frames of all shares that were finished."""
        return self.words[_TOTALS + self.words[SERVED] % 2]

    def recent_episodes(self) -> list[tuple[float, Episode]]:
        """Return the last episodes that have ended, in order, each with the time of its end."""
        count = self.words[EPISODES]
        found = self.floats[
            _RECENT : _RECENT + 3 * NUM_RECENT
        ].tolist()  # at once: the worker may write meanwhile
        places = [3 * (number % NUM_RECENT) for number in range(max(count - NUM_RECENT, 0), count)]
        return [(found[at], Episode(found[at + 1], int(found[at + 2]))) for at in places]

    @property
    def is_at_work(self) -> bool:
        """Whether a share was begun and isn't finished."""
        return self.words[BEGUN] > self.words[SERVED]

    @property
    def under_way(self) -> int:
        """Steps that were made of a share that isn't finished."""
        return self.words[STEP] if self.is_at_work else 0

    def go_on(self) -> None:
        """Take back what a lost worker hasn't finished: the next one goes on after its last share."""
        for word in (BEGUN, GRANTED, CUT):
            self.words[word] = self.words[SERVED]

    # ----------------------------------------------------------------- worker
    def begin(self) -> tuple[int, Grant, bool] | None:
        """Return the next grant's number, itself, and whether a reset comes first; None if there is none."""
        words, number = self.words, self.words[BEGUN]
        if number == words[GRANTED]:
            return None
        slot = self._slot(number)
        most = words[slot + _MOST]
        grant = Grant(words[slot + _NUM_STEPS], bool(words[slot + _RANDOM]), None if most < 0 else most)
        words[STEP] = 0
        words[WORK] += 1  # step 7 of one share isn't step 7 of another one
        words[BEGUN] = number + 1
        return number, grant, bool(words[slot + _RESET])

    def note_episodes(self, count: int, fresh: Sequence[Episode], begun: float, ended: float) -> None:
        """Say which episodes have ended.

        Args:
            count: how many have ended since the worker's place was first taken, `fresh` included.
            fresh: the last ones of these, which aren't known yet.
            begun: when the first of them can have ended, by the clock that all processes of the machine share.
            ended: when the last one had.
        """
        for place, episode in enumerate(fresh, 1):
            at = _RECENT + 3 * ((count - len(fresh) + place - 1) % NUM_RECENT)
            self.floats[at] = begun + (ended - begun) * place / len(fresh)
            self.floats[at + 1], self.floats[at + 2] = episode
        self.words[EPISODES] = count

    def finish(self, number: int, share: Share) -> None:
        """Say what came of a grant."""
        words, slot = self.words, self._slot(number)
        words[slot + _COUNT] = _FAILED if share.failed else share.num_steps
        words[slot + _FRAMES], words[slot + _FLAGGED] = share.frames, share.flagged
        words[slot + _EXCESS] = share.excess
        words[slot + _REASON] = REASONS.index(share.reason) if share.failed else 0
        words[_TOTALS + (number + 1) % 2] = words[_TOTALS + number % 2] + share.frames + share.excess
        words[SERVED] = number + 1

    def __repr__(self) -> str:
        """Show the counts."""
        words: Any = self.words
        return f"Words(granted={words[GRANTED]}, begun={words[BEGUN]}, served={words[SERVED]})"
