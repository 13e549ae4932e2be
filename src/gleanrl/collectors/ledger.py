"""The frame ledger: every frame that was stepped is delivered, flagged or discarded for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class CollectorStats:
    """A collector's counters at one moment; all counts are since its construction (or the loaded state).

    Attributes:
        stepped: frames that environments were stepped for: ``delivered + flagged + discarded``.
        delivered: frames handed out and good.
        flagged: frames handed out and marked (not finite).
        discarded: frames that were never handed out.
        reasons: discarded frames by reason.
        batches: batches handed out.
        episodes: episodes that ended.
        mean_return: mean undiscounted return of the recent episodes; NaN before the first.
        mean_length: mean length of the recent episodes in steps; NaN before the first.
        frames_per_s: frames per second of collection alone, the learner's time not included.
    """

    stepped: int
    delivered: int
    flagged: int
    discarded: int
    reasons: Mapping[str, int]
    batches: int
    episodes: int
    mean_return: float
    mean_length: float
    frames_per_s: float


@dataclass
class FrameLedger:
    """Counts frames and the time they took; one thread at a time. Python integers: no count ever wraps."""

    stepped: int = 0
    delivered: int = 0
    flagged: int = 0
    discards: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Time that collection took, the learner's not included."""

    def deliver(self, frames: int, flagged: int = 0) -> None:
        """Count `frames` that were stepped and handed out, `flagged` of them marked."""
        self.stepped += frames
        self.delivered += frames - flagged
        self.flagged += flagged

    def discard(self, frames: int, reason: str) -> None:
        """Count `frames` that were stepped and will never be handed out."""
        if frames:
            self.stepped += frames
            self.discards[reason] += frames

    @property
    def discarded(self) -> int:
        """Frames that were stepped and never handed out."""
        return sum(self.discards.values())

    @property
    def reasons(self) -> Mapping[str, int]:
        """A read-only copy of the discards by reason."""
        return MappingProxyType(dict(self.discards))

    def check_valid(self) -> None:
        """Raise AssertionError unless the accounts balance."""
        assert self.stepped == self.delivered + self.flagged + self.discarded, self

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the time."""
        return {
            "stepped": self.stepped,
            "delivered": self.delivered,
            "flagged": self.flagged,
            "discards": dict(self.discards),
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counts and time."""
        self.stepped = int(state["stepped"])
        self.delivered = int(state["delivered"])
        self.flagged = int(state["flagged"])
        self.discards = Counter(state["discards"])
        self.seconds = float(state["seconds"])
