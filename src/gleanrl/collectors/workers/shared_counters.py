"""Shared-memory counters between the owner of a collector's worker pool and each worker.

Each entry is an int64 that one side writes, by a single store. A worker that replaces a lost one finds the entries
unchanged.

The owner writes a grant into its slot, then increments `GRANTED`. The worker writes the results of the share into the
slot, then increments `SERVED`. Grant n uses slot n modulo the number of slots, and the worker's block of that number.
The counter is stored last, so a reader that sees it also sees the slot and the block. A `fence` between the slot and
the counter keeps this order on every processor, on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._os.shared_memory import fence
from gleanrl._process.shared_columns import OWN, STEP, WORK, SharedRows
from gleanrl.collectors.frame_accounting import NUM_RECENT, Episode
from gleanrl.collectors.source import Grant

GRANTED, SERVED, BEGUN, CUT = range(OWN, OWN + 4)
"""Numbers of grants given, of shares finished, and of shares begun; and the cut.

Grants with a number below `CUT` end after the present step. The owner writes `GRANTED` and `CUT`, the worker `SERVED`
and `BEGUN`.
"""
PUBLISHED, WRITING, WRITING_OWN, PULLED = range(OWN + 4, OWN + 8)
"""Numbers of copies of the weights; see `weights`.

The owner writes the published copy, and the copies that are being written for all workers and for this worker. The
worker writes the copy that it uses.
"""
SAID = OWN + 12
"""Number of times that the worker has written other texts; see `SharedTexts`."""
MARKED = OWN + 15
"""The minimal version that frames carry, even if the weights have a lower one."""
NEXT_ID, EPISODES, BUSY, IDLE = range(OWN + 8, OWN + 12)
"""Counters of the worker's collection, which the worker writes.

They are the first local trajectory id without a frame, the number of ended trajectories, and the nanoseconds spent on
collecting and on waiting.
"""
_SLOTS = OWN + 16
_NUM_STEPS, _RANDOM, _MOST, _RESET, _COUNT, _FRAMES, _FLAGGED, _EXCESS, _REASON = range(9)
_SLOT_WORDS = 9
# Frames of all finished shares, double-buffered: `SERVED % 2` selects the valid entry, so one store changes both.
_TOTALS = OWN + 50
# A ring of the last ended trajectories, three float64 each: time of the end, return, length.
_RECENT = OWN + 56
_FAILED = -1

REASONS = ("environment", "policy", "nonfinite", "error", "interrupted", "budget")
"""The reasons for discarding the frames of a failed share. The slot holds the index."""


class Share(NamedTuple):
    """The result of a grant."""

    failed: bool
    num_steps: int
    """Number of steps in the block."""
    frames: int
    """Number of frames in the block; if the share failed, number of frames that were stepped for it."""
    flagged: int
    excess: int
    """Number of frames that were stepped but masked, because they exceed the budget."""
    reason: str
    """One of `REASONS`, why the share failed."""


class SharedCounters:
    """The counters of one worker, used by the owner and by the worker.

    Args:
        words: the worker's progress, see `gleanrl._process.shared_columns`.
        num_slots: maximal number of grants under way.
    """

    def __init__(self, words: memoryview, num_slots: int) -> None:
        self.words, self._num_slots = words, num_slots
        self.floats = words.cast("B").cast("d")
        """The same memory as float64."""

    def _slot(self, number: int) -> int:
        return _SLOTS + number % self._num_slots * _SLOT_WORDS

    # ------------------------------------------------------------------ owner
    def grant(self, grant: Grant, reset: bool) -> None:
        """Write a grant; the worker serves it when it is signalled.

        Args:
            grant: at most as many steps as a block has.
            reset: whether the worker resets its environments first.
        """
        words, number = self.words, self.words[GRANTED]
        slot = self._slot(number)
        words[slot + _NUM_STEPS], words[slot + _RANDOM] = grant.num_steps, grant.random
        words[slot + _MOST] = -1 if grant.most is None else grant.most
        words[slot + _RESET] = reset
        # The grant is complete before the worker sees its number. The owner has also read the slot's previous share.
        fence()
        words[GRANTED] = number + 1

    @property
    def num_served(self) -> int:
        """Number of finished shares. Read it before their results and rows."""
        number = self.words[SERVED]
        fence()  # the results and rows are read after the counter that says that they are complete
        return number

    def has_failed(self, number: int) -> bool:
        """Return whether a finished share failed."""
        return self.words[self._slot(number) + _COUNT] == _FAILED

    def granted_steps(self, number: int) -> int:
        """Return the number of steps of a grant. It must not have been followed by another one in its slot."""
        return self.words[self._slot(number) + _NUM_STEPS]

    def share(self, number: int) -> Share:
        """Return the result of a finished share. Its grant must not have been followed by another one in its slot."""
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
        """Return whether a finished share that wasn't cut has another number of steps than its grant."""
        return self.share(number).num_steps != self.granted_steps(number) and self.words[CUT] <= number

    @property
    def frames(self) -> int:
        """Number of frames of all finished shares."""
        return self.words[_TOTALS + self.num_served % 2]

    def recent_episodes(self) -> list[tuple[float, Episode]]:
        """Return the last ended episodes in order, each with the time of its end."""
        count = self.words[EPISODES]
        fence()  # the ring is read after the counter
        # One copy of the ring, since the worker may write to it meanwhile.
        found = self.floats[_RECENT : _RECENT + 3 * NUM_RECENT].tolist()
        places = [3 * (number % NUM_RECENT) for number in range(max(count - NUM_RECENT, 0), count)]
        return [(found[at], Episode(found[at + 1], int(found[at + 2]))) for at in places]

    @property
    def is_at_work(self) -> bool:
        """Whether a share was begun and isn't finished."""
        return self.words[BEGUN] > self.words[SERVED]

    @property
    def under_way(self) -> int:
        """Number of steps that were made of an unfinished share."""
        return self.words[STEP] if self.is_at_work else 0

    def go_on(self) -> None:
        """Remove the grants that a lost worker didn't finish, so that its replacement begins after the last share."""
        for word in (BEGUN, GRANTED, CUT):
            self.words[word] = self.words[SERVED]

    # ----------------------------------------------------------------- worker
    def begin(self) -> tuple[int, Grant, bool] | None:
        """Return the next grant's number, the grant, and whether a reset comes first; None if there is no grant."""
        words, number = self.words, self.words[BEGUN]
        if number == words[GRANTED]:
            return None
        fence()  # the grant is read, and the block written, after the counter was seen
        slot = self._slot(number)
        most = words[slot + _MOST]
        grant = Grant(words[slot + _NUM_STEPS], bool(words[slot + _RANDOM]), None if most < 0 else most)
        words[STEP] = 0
        words[WORK] += 1  # for `Worker.is_late`, which can't tell equal steps of two shares apart otherwise
        words[BEGUN] = number + 1
        return number, grant, bool(words[slot + _RESET])

    def note_episodes(self, count: int, episodes: Sequence[Episode], begun: float, ended: float) -> None:
        """Write the episodes that have ended.

        Args:
            count: number of episodes that have ended in this worker and its predecessors, `episodes` included.
            episodes: the last ones of these, which weren't written before.
            begun: the earliest time at which one of `episodes` can have ended, by the monotonic clock of the machine.
            ended: the time by which all of them had ended. The ends are spread evenly between both times.
        """
        for position, episode in enumerate(episodes, 1):
            at = _RECENT + 3 * ((count - len(episodes) + position - 1) % NUM_RECENT)
            self.floats[at] = begun + (ended - begun) * position / len(episodes)
            self.floats[at + 1], self.floats[at + 2] = episode
        fence()  # the episodes are complete before the owner sees their number
        self.words[EPISODES] = count

    def finish(self, number: int, share: Share) -> None:
        """Write the result of a grant."""
        words, slot = self.words, self._slot(number)
        words[slot + _COUNT] = _FAILED if share.failed else share.num_steps
        words[slot + _FRAMES], words[slot + _FLAGGED] = share.frames, share.flagged
        words[slot + _EXCESS] = share.excess
        words[slot + _REASON] = REASONS.index(share.reason) if share.failed else 0
        words[_TOTALS + (number + 1) % 2] = words[_TOTALS + number % 2] + share.frames + share.excess
        fence()  # the results and the block's rows are complete before the owner sees the number
        words[SERVED] = number + 1

    def __repr__(self) -> str:
        """Return the counters of grants as text."""
        words: Any = self.words
        return f"Words(granted={words[GRANTED]}, begun={words[BEGUN]}, served={words[SERVED]})"


_TEXT = ("text",)
_TEXT_BYTES = 8192


class SharedTexts:
    """The texts of `CollectorStats.policy` in shared memory, used by the owner and by the worker.

    Double-buffered, as the texts change rarely: a reader would get mixed texts only if they changed twice meanwhile.

    Args:
        words: the worker's progress.
        blocks: the worker's part of the two blocks of `rows`.
    """

    def __init__(self, words: memoryview, blocks: Sequence[Block]) -> None:
        self._words = words
        self._bytes: list[Any] = [block.column(_TEXT).reshape(-1).numpy() for block in blocks]
        self._written: tuple[str, ...] = ()

    @staticmethod
    def rows(num_workers: int) -> SharedRows:
        """Return the rows of one block of texts."""
        field = Field(torch.Size((_TEXT_BYTES,)), torch.uint8)
        return SharedRows(Schema({_TEXT: field}), torch.Size((num_workers,)), 1)

    def write(self, texts: tuple[str, ...]) -> None:
        """Write the texts if they differ from the last ones. Longer ones than 8 KiB are cut; called by the worker."""
        if texts == self._written:
            return
        number = self._words[SAID] + 1
        data = "\0".join(texts).encode()[:_TEXT_BYTES]
        buffer = self._bytes[number % 2]
        buffer[: len(data)], buffer[len(data) :] = memoryview(data), 0
        fence()  # the texts are complete before the owner sees their number
        self._words[SAID], self._written = number, texts

    def read(self) -> tuple[str, ...]:
        """Return the last texts; empty if there are none."""
        number = self._words[SAID]
        fence()  # the texts are read after the number
        text = self._bytes[number % 2].tobytes().rstrip(b"\0").decode(errors="ignore")
        return tuple(text.split("\0")) if text else ()
