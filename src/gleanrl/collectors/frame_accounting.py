"""The frame ledger, and the trajectory ids, step counts and returns of collected frames.

The ledger keeps one invariant: every stepped frame is delivered, flagged or discarded for a reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl._arrays.native import record
from gleanrl._arrays.results import html_parts, parts_text
from gleanrl._state.state import StateReader

Array = np.ndarray[Any, Any]

NUM_RECENT = 100
"""Number of ended trajectories whose returns and lengths are kept, over all workers."""


class Episode(NamedTuple):
    """The return and the length of an ended trajectory."""

    episode_return: float
    """NaN if returns are not tracked."""
    length: int


class Numbering(NamedTuple):
    """Maps local trajectory ids to global ones, unique over workers: worker w of W uses ``local id * W + w``."""

    worker: int
    num_workers: int

    def __call__(self, ids: Any) -> Any:
        """Return the global ids of local ids."""
        return ids * self.num_workers + self.worker


@dataclass(frozen=True)
class TrajectoryIds:
    """The open trajectories of P environments between two batches; an immutable value.

    An id never names two trajectories. The environments begin with 0 … P-1. When a trajectory ends, its environment
    gets the next free id. Ends at the same step are ordered by environment. An id without frames is used again after a
    reset.
    """

    ids: Array  # (P,) int64: ids of the open trajectories
    steps: Array  # (P,) int64: number of their frames
    returns: Array  # (P,) float64: sums of their rewards
    next_id: int
    num_ended: int = 0
    recent_returns: tuple[float, ...] = ()
    recent_lengths: tuple[int, ...] = ()

    @property
    def recent(self) -> list[Episode]:
        """The last ended trajectories, at most `NUM_RECENT`, in the order of their ends."""
        lengths = self.recent_lengths
        returns = (
            self.recent_returns if len(self.recent_returns) == len(lengths) else [math.nan] * len(lengths)
        )
        return [Episode(*one) for one in zip(returns, lengths, strict=True)]

    @property
    def local_ids(self) -> list[int]:
        """Local ids of the open trajectories that have frames."""
        found: list[int] = self.ids[self.steps > 0].tolist()
        return found

    @staticmethod
    def begin(num_envs: int, first_id: int = 0) -> TrajectoryIds:
        """Return new trajectories without frames, with the ids from `first_id` on."""
        ids = np.arange(first_id, first_id + num_envs, dtype=np.int64)
        return TrajectoryIds(ids, np.zeros_like(ids), np.zeros(num_envs), first_id + num_envs)

    def where(self, done: Array, env: int) -> tuple[int, int]:
        """Return the trajectory of environment `env` after some steps: ``(local id, steps within the trajectory)``.

        Only for environments whose every step is a frame.

        Args:
            done: ``(P, t)`` bool, the done flags of these steps.
            env: index of the environment.
        """
        ends = np.argwhere(done.T)  # (k, 2): step, environment
        own_ends = [k for k, (_, p) in enumerate(ends) if p == env]
        if not own_ends:
            return int(self.ids[env]), int(self.steps[env]) + done.shape[1]
        return self.next_id + own_ends[-1], done.shape[1] - 1 - int(ends[own_ends[-1]][0])

    def record(
        self,
        done: Array,
        reward: Array | None,
        ids: Array,
        counts: Array | None = None,
        mask: Array | None = None,
        numbering: Numbering | None = None,
    ) -> TrajectoryIds:
        """Fill in `ids` and `counts` of a batch in place, and return the open trajectories after it.

        Args:
            done: ``(P, T)`` bool, whether the trajectory ended with this step.
            reward: ``(P, T)`` float32 or float64; None if returns are not tracked.
            ids: ``(P, T)`` int64 with contiguous rows. Filled with ids, and with -1 on steps that are no frames.
            counts: ``(P, T)`` int64 or None. Filled with the number of earlier steps of the trajectory.
            mask: ``(P, T)`` bool, False on steps that are no frames; None if all steps are frames.
            numbering: maps the written ids to global ones; None writes local ids.
        """
        own_ids, own_steps, own_returns = self.ids.copy(), self.steps.copy(), self.returns.copy()
        factor, offset = (1, 0) if numbering is None else (numbering.num_workers, numbering.worker)
        done = np.ascontiguousarray(done)
        reward = None if reward is None else np.ascontiguousarray(reward)
        mask = None if mask is None else np.ascontiguousarray(mask)
        lengths, returns = record(
            done, reward, mask, ids, counts, own_ids, own_steps, own_returns, self.next_id, factor, offset
        )
        count = len(lengths)
        return TrajectoryIds(
            own_ids,
            own_steps,
            own_returns,
            self.next_id + count,
            self.num_ended + count,
            (*self.recent_returns, *returns)[-NUM_RECENT:] if count else self.recent_returns,
            (*self.recent_lengths, *lengths)[-NUM_RECENT:] if count else self.recent_lengths,
        )

    def abandon(self, mask: Array | None = None) -> TrajectoryIds:
        """Return the open trajectories after a reset. Reset environments get new ids if their trajectory has frames.

        Args:
            mask: ``(P,)`` bool, which environments were reset; None for all.
        """
        stale = self.steps > 0
        if mask is not None:
            stale &= mask
        return replace(
            self,
            ids=_renumbered(self.ids, stale, self.next_id),
            steps=np.where(stale, 0, self.steps),
            returns=np.where(stale, 0.0, self.returns),
            next_id=self.next_id + int(stale.sum()),
        )

    def apart_from(self, used: TrajectoryIds, go_on: bool = False) -> TrajectoryIds:
        """Return a copy without the ids that delivered frames of `used` have.

        A saved state and the running collector share a past. After a load, the same id could otherwise name two
        trajectories that differ since the save.

        Args:
            used: the trajectories of the running collector, whose frames were delivered.
            go_on: whether these trajectories continue. Otherwise a reset of all environments follows.
        """
        next_id = max(self.next_id, used.next_id)
        unused = np.isin(self.ids, used.ids[used.steps == 0]) | (self.ids >= used.next_id)
        if go_on:  # equal id and step count: no frames were delivered since the save
            same = (
                (self.ids == used.ids) & (self.steps == used.steps)
                if len(self.ids) == len(used.ids)
                else unused
            )
            clashing = ~(unused | same)
        else:  # trajectories with frames get new ids by that reset
            clashing = (self.steps == 0) & ~unused
        return replace(
            self,
            ids=_renumbered(self.ids, clashing, next_id),
            next_id=next_id + int(clashing.sum()),
        )

    @staticmethod
    def read(state: Any) -> TrajectoryIds:
        """Return the value of a saved state; raise `SchemaError` for anything else."""
        reader = StateReader(state, "trajectories")
        next_id = reader.integer("next_id")
        ids = reader.tensor("ids", torch.int64, (None,)).numpy()
        value = TrajectoryIds(
            ids,
            reader.tensor("steps", torch.int64, ids.shape).numpy(),
            reader.tensor("returns", torch.float64, ids.shape).numpy(),
            next_id,
            reader.integer("num_ended"),
            reader.numbers("recent_returns", float),
            reader.numbers("recent_lengths", int),
        )
        if bool((ids < 0).any()) or bool((ids >= next_id).any()) or len(np.unique(ids)) < len(ids):
            raise reader.wrong("ids", f"different numbers below {next_id}")
        if bool((value.steps < 0).any()):
            raise reader.wrong("steps", "numbers of 0 or more")
        return value

    def of_environments(self, num_envs: int) -> TrajectoryIds:
        """Return this value, or new trajectories with later ids if it is for another number of environments."""
        if len(self.ids) == num_envs:
            return self
        begun = TrajectoryIds.begin(num_envs, self.next_id)
        return replace(self, ids=begun.ids, steps=begun.steps, returns=begun.returns, next_id=begun.next_id)


def _renumbered(ids: Array, which: Array, next_id: int) -> Array:
    """Return a copy of `ids` in which the selected ones are the next free ids, in order."""
    renumbered: Array = np.where(which, next_id + which.cumsum() - 1, ids)
    return renumbered


@dataclass(frozen=True)
class WorkerStats:
    """Snapshot of a worker's counters, over all processes that the worker has had.

    Attributes:
        frames: frames that its environments were stepped for.
        episodes: episodes that ended.
        mean_return: mean undiscounted return of its last 100 episodes; NaN before the first.
        mean_length: mean length of these episodes in steps; NaN before the first.
        frames_per_s: frames per second of collection, without waiting.
        idle_share: share of its time that it waited for permission to collect, in ``[0, 1]``.
        versions_behind: number of weight versions published after the one that it uses.
        restarts: how often its process was replaced.
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
    """Snapshot of a collector's counters. They start at zero; loading a state restores the saved counts.

    Attributes:
        delivered: frames that were delivered and are good.
        flagged: frames that were delivered and are marked (not finite).
        discarded: frames that were never delivered.
        reasons: discarded frames by reason.
        batches: delivered batches.
        episodes: episodes that ended.
        mean_return: mean undiscounted return of the last 100 episodes of all workers, in the order of their ends; NaN
            before the first.
        mean_length: mean length of these episodes in steps; NaN before the first.
        frames_per_s: stepped frames per second of collection, without the learner's time; 0 before the first batch.
        workers: the counters of each worker process; empty without workers.
        cut: trajectories that were open in a loaded state and could not be continued.
        policy: for each module of the policy, its name and the code that computed it in the last batch, for example
            ``"Sequential: native"``, or ``"Dropout: torch (…)"`` with the reason. Of workers whose texts differ, all
            different texts. Empty with ``policy_backend="torch"``, and before the first batch.
    """

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
    policy: tuple[str, ...] = ()

    @property
    def stepped(self) -> int:
        """Frames that environments were stepped for: ``delivered + flagged + discarded``."""
        return self.delivered + self.flagged + self.discarded

    def __repr__(self) -> str:
        """Return the counters, one on a line."""
        return parts_text("CollectorStats", self._repr_parts())

    def _repr_html_(self) -> str:
        return html_parts("CollectorStats", self._repr_parts())

    def _repr_parts(self) -> dict[str, object]:
        return {**vars(self), "reasons": dict(self.reasons)}


@dataclass(frozen=True)
class FrameCounts:
    """The counters of a source; an immutable value. Python integers never overflow."""

    delivered: int = 0
    """Frames that were delivered and are good."""
    flagged: int = 0
    """Frames that were delivered and are marked."""
    discards: Mapping[str, int] = field(default_factory=dict)
    """Frames that were stepped and never delivered, by reason."""
    seconds: float = 0.0
    """Time of collection, without the learner's time."""
    spent: int = 0
    """Frames that count against the budget."""
    batches: int = 0
    """Batches that count against the budget."""
    cut: int = 0
    """Trajectories that were open in a loaded state and could not be continued."""

    @property
    def discarded(self) -> int:
        """Frames that were stepped and never delivered."""
        return sum(self.discards.values())

    @property
    def stepped(self) -> int:
        """Frames that environments were stepped for."""
        return self.delivered + self.flagged + self.discarded

    def lasting(self, seconds: float) -> FrameCounts:
        """Return the counts after `seconds` more of collection."""
        return replace(self, seconds=self.seconds + seconds)

    def delivering(
        self, frames: int, flagged: int = 0, counted: bool = True, seconds: float = 0.0
    ) -> FrameCounts:
        """Return the counts after another delivered batch.

        Args:
            frames: frames of the batch.
            flagged: number of marked frames among them.
            counted: whether the batch counts against the budget.
            seconds: time of its collection.
        """
        return FrameCounts(  # `replace` takes three times as long, and this runs for each batch
            self.delivered + frames - flagged,
            self.flagged + flagged,
            self.discards,
            self.seconds + seconds,
            self.spent + frames * counted,
            self.batches + counted,
            self.cut,
        )

    def cutting(self, trajectories: int) -> FrameCounts:
        """Return the counts after some trajectories could not be continued."""
        return replace(self, cut=self.cut + trajectories)

    def discarding(self, frames: int, reason: str) -> FrameCounts:
        """Return the counts after `frames` more were stepped and discarded."""
        if not frames:
            return self
        return replace(self, discards={**self.discards, reason: self.discards.get(reason, 0) + frames})

    def stats(
        self, trajectories: TrajectoryIds | None = None, policy: tuple[str, ...] = ()
    ) -> CollectorStats:
        """Return the counters for the user.

        Without `trajectories` the result has no episodes and NaN means, which the caller replaces.

        Args:
            trajectories: the trajectories of the source.
            policy: see `CollectorStats`.
        """
        mean_return, mean_length = means_of(() if trajectories is None else trajectories.recent)
        return CollectorStats(
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
            policy=policy,
        )

    @staticmethod
    def read(state: Any) -> FrameCounts:
        """Return the counts of a saved state; raise `SchemaError` for anything else."""
        reader = StateReader(state, "a frame ledger")
        discards = reader.part("discards")
        return FrameCounts(
            reader.integer("delivered"),
            reader.integer("flagged"),
            {reason: discards.integer(reason) for reason in discards},
            reader.number("seconds", 0),
            reader.integer("spent"),
            reader.integer("batches"),
            reader.integer("cut"),
        )


def means_of(episodes: Iterable[Episode]) -> tuple[float, float]:
    """Return the mean return and the mean length of the last `NUM_RECENT` episodes; NaN without any.

    Args:
        episodes: in the order of their ends.
    """
    recent = [*episodes][-NUM_RECENT:]
    if not recent:
        return math.nan, math.nan
    return fmean([one.episode_return for one in recent]), fmean([one.length for one in recent])


def texts_of_workers(sources: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the `CollectorStats.policy` of several workers: the texts of one if all agree, else all different texts.

    Args:
        sources: the texts of each worker; empty for a worker that has collected nothing.
    """
    said = list(dict.fromkeys(filter(None, sources)))
    return said[0] if len(said) == 1 else tuple(dict.fromkeys(text for texts in said for text in texts))
