"""Which trajectory a frame belongs to: ids, step counts and returns, from the done column, once a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gleanrl.native import record
from gleanrl.state import StateReader

Array = np.ndarray[Any, Any]

NUM_RECENT = 100
"""Ended trajectories whose returns and lengths are remembered, those of all workers together."""


class Episode(NamedTuple):
    """A trajectory that has ended."""

    episode_return: float
    """NaN where returns aren't followed."""
    length: int


class Numbering(NamedTuple):
    """Ids that are unique over workers: worker w of W multiplies, ``local id * W + w``."""

    worker: int
    num_workers: int

    def __call__(self, ids: Any) -> Any:
        """Return what local ids are called outside."""
        return ids * self.num_workers + self.worker


@dataclass(frozen=True)
class Trajectories:
    """Where the trajectories of P environments stand between two batches, an immutable value.

    Ids never name two trajectories. The environments begin with 0 … P-1; each trajectory that ends gives its
    environment the next free id. Ends at the same step are taken in the environments' order. An id that has no frame
    yet is used again after a reset.
    """

    ids: Array  # (P,) int64: of the trajectories under way
    steps: Array  # (P,) int64: frames that these have
    returns: Array  # (P,) float64: their rewards so far
    next_id: int
    num_ended: int = 0
    recent_returns: tuple[float, ...] = ()
    recent_lengths: tuple[int, ...] = ()

    @property
    def recent(self) -> list[Episode]:
        """The last ones that have ended, in order."""
        lengths = self.recent_lengths
        returns = (
            self.recent_returns if len(self.recent_returns) == len(lengths) else [math.nan] * len(lengths)
        )
        return [Episode(*one) for one in zip(returns, lengths, strict=True)]

    @property
    def local_ids(self) -> list[int]:
        """The local ids of those that have frames."""
        found: list[int] = self.ids[self.steps > 0].tolist()
        return found

    @staticmethod
    def begin(num_envs: int, first_id: int = 0) -> Trajectories:
        """Return those of environments that have no frame yet."""
        ids = np.arange(first_id, first_id + num_envs, dtype=np.int64)
        return Trajectories(ids, np.zeros_like(ids), np.zeros(num_envs), first_id + num_envs)

    def where(self, done: Array, env: int) -> tuple[int, int]:
        """Return where environment `env` stands after some steps: ``(local id, steps within the trajectory)``.

        For environments whose every step is a frame.

        Args:
            done: ``(P, t)`` bool, the steps since.
            env: its index.
        """
        ends = np.argwhere(done.T)  # (k, 2): step, environment
        mine = [k for k, (_, p) in enumerate(ends) if p == env]
        if not mine:
            return int(self.ids[env]), int(self.steps[env]) + done.shape[1]
        return self.next_id + mine[-1], done.shape[1] - 1 - int(ends[mine[-1]][0])

    def record(
        self,
        done: Array,
        reward: Array | None,
        ids: Array,
        counts: Array | None = None,
        mask: Array | None = None,
        numbering: Numbering | None = None,
    ) -> Trajectories:
        """Fill in the columns of a batch and return where the trajectories stand after it.

        Args:
            done: ``(P, T)`` bool, whether the trajectory ended with this step.
            reward: ``(P, T)`` float32 or float64, or None if returns aren't followed.
            ids: ``(P, T)`` int64 with contiguous rows, written: -1 on steps that are no frames.
            counts: likewise, written: steps of the trajectory before this one; None if not wanted.
            mask: ``(P, T)`` bool, False on steps that are no frames; None if all are.
            numbering: of the ids that are written; None for the local ones.
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
        return Trajectories(
            own_ids,
            own_steps,
            own_returns,
            self.next_id + count,
            self.num_ended + count,
            (*self.recent_returns, *returns)[-NUM_RECENT:] if count else self.recent_returns,
            (*self.recent_lengths, *lengths)[-NUM_RECENT:] if count else self.recent_lengths,
        )

    def abandon(self, mask: Array | None = None) -> Trajectories:
        """Return where they stand after a reset: environments whose trajectory has frames get new ids.

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

    def apart_from(self, used: Trajectories, go_on: bool = False) -> Trajectories:
        """Return them with no id that frames of `used` have.

        Args:
            used: where the trajectories stand whose frames were handed out; these here are of another past of theirs.
            go_on: whether these go on; if not, a reset of all environments follows.
        """
        next_id = max(self.next_id, used.next_id)
        unused = np.isin(self.ids, used.ids[used.steps == 0]) | (self.ids >= used.next_id)
        if go_on:  # those that stand where they stood have no other frames
            same = (
                (self.ids == used.ids) & (self.steps == used.steps)
                if len(self.ids) == len(used.ids)
                else unused
            )
            taken = ~(unused | same)
        else:  # the others get new ids by that reset
            taken = (self.steps == 0) & ~unused
        return replace(
            self,
            ids=_renumbered(self.ids, taken, next_id),
            next_id=next_id + int(taken.sum()),
        )

    @staticmethod
    def read(state: Any) -> Trajectories:
        """Return the value of a saved state; `SchemaError` for anything else."""
        reader = StateReader(state, "trajectories")
        next_id = reader.integer("next_id")
        ids = reader.tensor("ids", torch.int64, (None,)).numpy()
        value = Trajectories(
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

    def of_environments(self, num_envs: int) -> Trajectories:
        """Return these, or new ones, numbered after these, if they are of another number of environments."""
        if len(self.ids) == num_envs:
            return self
        begun = Trajectories.begin(num_envs, self.next_id)
        return replace(self, ids=begun.ids, steps=begun.steps, returns=begun.returns, next_id=begun.next_id)


def _renumbered(ids: Array, which: Array, next_id: int) -> Array:
    """Return ids of which some are the next free ones, in order."""
    renumbered: Array = np.where(which, next_id + which.cumsum() - 1, ids)
    return renumbered
