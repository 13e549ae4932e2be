"""The frame ledger: every frame that was stepped is delivered, flagged or discarded for a reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from gleanrl.collectors.tracking import NUM_RECENT, Episode, Trajectories
from gleanrl.state import StateReader


@dataclass(frozen=True)
class WorkerStats:
    """A worker's counters at one moment, those of the processes that had its place before included.

    Attributes:
        frames: frames that its environments were stepped for.
        episodes: episodes that ended.
        mean_return: mean undiscounted return of its last 100 episodes; NaN before the first.
        mean_length: their mean length in steps; NaN before the first.
        frames_per_s: frames per second of collection, waiting not included.
        idle_share: the part of its time that it waited for leave to go on, in ``[0, 1]``.
        versions_behind: how many versions of the policy's weights were published since those that it uses.
        restarts: how often its process was made anew.
    """

    frames: int
    episodes: int
    mean_return: float
    mean_length: float
    frames_per_s: float
    idle_share: float
    versions_behind: int
    restarts: int


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
        mean_return: mean undiscounted return of the last 100 episodes, those of all workers together by the time of
            their ends; NaN before the first.
        mean_length: their mean length in steps; NaN before the first.
        frames_per_s: frames per second of collection alone, the learner's time not included.
        workers: of each worker process; none without any.
        cut: trajectories that were under way in a state that was loaded, and couldn't go on.
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
    workers: tuple[WorkerStats, ...] = ()
    cut: int = 0


@dataclass(frozen=True)
class Ledger:
    """The counts of a source, an immutable value. Python integers: no count ever wraps."""

    delivered: int = 0
    """Frames that were handed out and are good."""
    flagged: int = 0
    """Frames that were handed out and are marked."""
    discards: Mapping[str, int] = field(default_factory=dict)
    """Frames that were stepped and never handed out, by reason."""
    seconds: float = 0.0
    """Time that collection took, the learner's not included."""
    spent: int = 0
    """Frames that count against the budget."""
    batches: int = 0
    """Batches that do."""
    cut: int = 0
    """Trajectories that were under way in a state that was loaded, and couldn't go on."""

    @property
    def discarded(self) -> int:
        """Frames that were stepped and never handed out."""
        return sum(self.discards.values())

    @property
    def stepped(self) -> int:
        """Frames that environments were stepped for."""
        return self.delivered + self.flagged + self.discarded

    def lasting(self, seconds: float) -> Ledger:
        """Return the counts after collecting for so much longer."""
        return replace(self, seconds=self.seconds + seconds)

    def delivering(self, frames: int, flagged: int = 0, counted: bool = True, seconds: float = 0.0) -> Ledger:
        """Return the counts after another batch was handed out.

        Args:
            frames: that it has.
            flagged: how many of them are marked.
            counted: whether it counts against the budget.
            seconds: that its collection took.
        """
        return Ledger(  # `replace` would take three times as long, for each batch
            self.delivered + frames - flagged,
            self.flagged + flagged,
            self.discards,
            self.seconds + seconds,
            self.spent + frames * counted,
            self.batches + counted,
            self.cut,
        )

    def cutting(self, trajectories: int) -> Ledger:
        """Return the counts after so many trajectories couldn't go on."""
        return replace(self, cut=self.cut + trajectories)

    def discarding(self, frames: int, reason: str) -> Ledger:
        """Return the counts after `frames` more were stepped that will never be handed out."""
        if not frames:
            return self
        return replace(self, discards={**self.discards, reason: self.discards.get(reason, 0) + frames})

    def stats(self, trajectories: Trajectories | None = None) -> CollectorStats:
        """Return the counters that users see; without trajectories those of none, for who follows them elsewhere."""
        mean_return, mean_length = means_of(() if trajectories is None else trajectories.recent)
        return CollectorStats(
            stepped=self.stepped,
            delivered=self.delivered,
            flagged=self.flagged,
            discarded=self.discarded,
            reasons=MappingProxyType(dict(self.discards)),
            batches=self.batches,
            episodes=0 if trajectories is None else trajectories.num_ended,
            mean_return=mean_return,
            mean_length=mean_length,
            frames_per_s=self.stepped / self.seconds if self.seconds else 0.0,
            cut=self.cut,
        )

    @staticmethod
    def read(state: Any) -> Ledger:
        """Return the counts of a saved state; `SchemaError` for anything else."""
        reader = StateReader(state, "a frame ledger")
        discards = reader.part("discards")
        return Ledger(
            reader.integer("delivered"),
            reader.integer("flagged"),
            {reason: discards.integer(reason) for reason in discards},
            reader.number("seconds", 0),
            reader.integer("spent"),
            reader.integer("batches"),
            reader.integer("cut"),
        )


def means_of(episodes: Iterable[Episode]) -> tuple[float, float]:
    """Return the mean return and the mean length of the last `NUM_RECENT`; NaN without any.

    Args:
        episodes: by the time of their ends.
    """
    recent = [*episodes][-NUM_RECENT:]
    if not recent:
        return math.nan, math.nan
    return fmean([one.episode_return for one in recent]), fmean([one.length for one in recent])
