"""What makes batches: the protocol between a collector and its source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.collectors.budget import Grant, Grants
from gleanrl.collectors.ledger import CollectorStats
from gleanrl.collectors.tracking import Episode
from gleanrl.tree import Path


class Collected(NamedTuple):
    """A batch on its way to the user."""

    batch: TensorDict  # [*batch, T]; or a reference to one, if it goes to a buffer that takes that
    after: Any
    """What its source lives by once the batch has arrived."""
    part: tuple[int, int] = (0, 1)
    """Which of the trajectories under way are in the batch: worker w of W has those whose ids are w modulo W."""


class Loading(NamedTuple):
    """A saved state that was checked."""

    change: Callable[[], None]
    """Goes on from it."""
    cut: tuple[int, ...] = ()
    """Ids of the trajectories that were under way in what had been handed out, and can't go on."""
    kept: tuple[int, ...] = ()
    """Ids of those that go on."""
    renamed: Mapping[int, int] = {}
    """Their new ids, by those that they had, of those that get one."""


class BudgetSpent(Exception):
    """There is no further batch."""


class Source(ABC):
    """Makes one batch after the other: one process, workers on this machine or on others. One caller at a time.

    A batch that `next` or `collect` returned is open until `deliver`. A source that is asked for anything else
    meanwhile takes it for lost: whoever should have handed it out was interrupted. Lost frames are counted as
    discarded, and what follows them belongs to new trajectories, so that none has a hole.
    """

    num_envs: int
    """Environments that step at once: frames of a step."""
    batch_size: torch.Size
    """Dimensions of a batch, without time."""
    done_paths: tuple[Path, ...]
    """The flags under ``next`` that end a trajectory."""
    steady = True
    """Whether a batch holds as many frames as it was granted."""
    pushes_anytime = False
    """Whether `push_weights`, without `worker_ids`, may be called while another thread waits for a batch."""
    goes_on = False
    """Whether the trajectories under way go on with the next batch: no reset comes before."""
    pushes_between = False
    """Whether it may be called while another thread hands a batch over, but has none made."""
    policy_version: int = 0
    """How often the policy that collects got other weights; whoever gives it some counts it up."""

    def more(self, budget: Grants) -> bool:
        """Return whether another batch can be had."""
        return budget.grant(self.spent) is not None

    @abstractmethod
    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the next batch that `budget`, which isn't spent, grants, collected with the current weights.

        A source that collects ahead takes several grants, and counts the frames of them that are on their way.

        Args:
            budget: how much there is to collect.
            lend: whether the batch may stand in memory that is written again once it was delivered, or lost.
        """

    @abstractmethod
    def collect(self, grant: Grant) -> Collected:
        """Return a batch as it was granted."""

    @abstractmethod
    def deliver(self, collected: Collected, batch: TensorDictBase) -> TensorDictBase:
        """Count the open batch as handed out and return `batch`, what became of it.

        The counting is one assignment, and the last thing: an interrupt comes before it, and the batch is lost, or
        after the batch was returned.
        """

    @abstractmethod
    def lose(self, reason: str) -> None:
        """Count an open batch, if there is one, as discarded for a reason."""

    @property
    @abstractmethod
    def spent(self) -> int:
        """Frames that were delivered and count against the budget."""

    @abstractmethod
    def stats(self) -> CollectorStats:
        """Return the counters at this moment."""

    @abstractmethod
    def recent_episodes(self) -> Sequence[Episode]:
        """Return the last `NUM_RECENT` episodes that have ended, by the time of their ends."""

    @property
    def oldest_version(self) -> int:
        """The lowest version of the policy that the next batches are collected with; workers may have unlike ones."""
        return self.policy_version

    @abstractmethod
    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments; their next frames belong to new trajectories.

        Args:
            index: which of them; None for all.
            **kwargs: passed to the environments' `reset`.
        """

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed environments and random actions, and reset; return the last seed that was used."""

    @abstractmethod
    def push_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Give the policy that collects other weights, and count its version up; see `update_policy_weights_`."""

    @abstractmethod
    def stop_following(self) -> None:
        """Have the policy that collects get other weights by `push_weights`, or by the user's hands, only."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Return the state, ``"frames"`` and ``"iter"`` among it."""

    @abstractmethod
    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Return what goes on from a saved state; it can't fail, where the source can check states beforehand.

        Args:
            state: from `save`.
            strict: whether a missing or unexpected entry is an error.
            keep_ids: whether trajectories go on by their ids, whatever frames were handed out since: what holds those
                goes back, too. Without it, those of which there are other frames get new ids.
            **kwargs: passed to the policy's `load_state_dict`.
        """

    @abstractmethod
    def close(self, close_env: bool = True) -> None:
        """End what the source runs; a second call ends what an interrupted one left.

        Args:
            close_env: whether environments of this process are closed, too.
        """
