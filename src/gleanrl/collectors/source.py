"""What makes batches: the protocol between a collector and its source.

How batches are collected: the choices of a source of one process, and how a user is warned.

How many frames a collector delivers, in what portions, and how many are still to come.
"""

from __future__ import annotations

import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType

from gleanrl._arrays.tensordicts import Path
from gleanrl._util import integer, positive
from gleanrl.collectors.frame_accounting import CollectorStats, Episode
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


@dataclass(frozen=True)
class CollectionOptions:
    """How batches are collected.

    Attributes:
        max_steps: truncate trajectories at so many steps and count them under ``step_count``; None for neither.
        exploration_type: the interaction type during a rollout.
        nonfinite: what to do about NaN or infinity in observations and rewards: ``"raise"``, ``"mark"`` or
            ``"pass"``.
        reuse_block: whether all batches share their memory.
        reset_each: whether every batch begins with a reset.
        stop: asked after every step, with its number; True cuts the batch there.
        versioned: whether every frame carries the version of the policy that acted.
    """

    max_steps: int | None = None
    exploration_type: InteractionType | None = InteractionType.RANDOM
    nonfinite: str = "raise"
    reuse_block: bool = False
    reset_each: bool = False
    stop: Callable[[int], bool] | None = None
    versioned: bool = False

    def __post_init__(self) -> None:
        """Check the choices."""
        if self.exploration_type is not None and not isinstance(self.exploration_type, InteractionType):
            raise InvalidArgumentError(
                f"exploration_type: expected an ExplorationType or None, got {self.exploration_type!r}"
            )
        if self.nonfinite not in ("raise", "mark", "pass"):
            raise InvalidArgumentError(
                f"nonfinite: expected 'raise', 'mark' or 'pass', got {self.nonfinite!r}"
            )


def stop_of(interruptor: Any) -> Callable[[int], bool] | None:
    """Return what an interruptor is asked after every step.

    Raises:
        InvalidTypeError: if it has no `collection_stopped()`.
    """
    if interruptor is None:
        return None
    stop = getattr(interruptor, "collection_stopped", None)
    if not callable(stop):
        raise InvalidTypeError(
            f"interruptor: expected an object with collection_stopped(), got {type(interruptor).__name__}"
        )
    return lambda _: bool(stop())


def warn(message: str) -> None:
    """Warn the user, at the place of the user's call, unless the environment variable ``RL_WARNINGS`` is 0."""
    if os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false"):
        modules = [str(frame.frame.f_globals.get("__name__")) for frame in inspect.stack(0)]
        ours = (level for level, module in enumerate(modules) if module.split(".")[0] != "gleanrl")
        warnings.warn(message, stacklevel=next(ours, len(modules)) + 1)


class Grant(NamedTuple):
    """What a source may collect for one batch."""

    num_steps: int
    """Steps of every environment, at least 1."""
    random: bool = False
    """Whether actions are drawn from the action spec instead of asked of the policy."""
    most: int | None = None
    """Frames that may be delivered, more than those of ``num_steps - 1`` steps; None for any number. What is beyond
    it, where steps turn out to be none, is masked and discarded."""
    counted: bool = True
    """Whether the frames count against the budget."""


class Grants(Protocol):
    """Grants batches."""

    def grant(self, frames: int) -> Grant | None:
        """Return what the next batch may hold, after so many frames that count; None if there is none."""


class Budget:
    """Checks the user's numbers, rounds them, and grants batches until the frames are spent. Never changes.

    Args:
        num_envs: environments that step at once: every step makes this many frames.
        frames_per_batch: frames of a batch; rounded up to a multiple of `num_envs`.
        total_frames: frames to deliver, rounded up likewise; None or a negative number for endless.
        random_frames: frames at the beginning that are drawn at random, rounded up to whole batches; None or a
            negative number for none.

    Raises:
        InvalidArgumentError: for a zero, negative or fractional `frames_per_batch`, a zero or fractional
            `total_frames`, or fractional `random_frames`.
    """

    def __init__(
        self, num_envs: int, frames_per_batch: Any, total_frames: Any = None, random_frames: Any = None
    ) -> None:
        self.num_envs = num_envs
        self.requested_frames_per_batch = positive("frames_per_batch", frames_per_batch)
        self.steps_per_batch = -(-self.requested_frames_per_batch // num_envs)
        frames = self.frames_per_batch = self.steps_per_batch * num_envs
        if frames != self.requested_frames_per_batch:
            warn(
                f"frames_per_batch={self.requested_frames_per_batch} isn't a multiple of the {num_envs} "
                f"environments; batches have {frames}"
            )
        total = -1 if total_frames is None else integer("total_frames", total_frames)
        if total == 0:
            raise InvalidArgumentError("total_frames: expected a positive integer, or -1 for endless, got 0")
        if total > 0 and total % frames:
            rounded = -(-total // num_envs) * num_envs
            last = rounded % frames
            tail = f"; the last batch has {last} of {frames} frames" if last else ""
            warn(
                f"total_frames={total} isn't a multiple of the {frames} frames of a batch: "
                f"{rounded} are collected{tail}"
            )
            total = rounded
        self.total_frames = total if total > 0 else None
        random = 0 if random_frames is None else max(0, integer("init_random_frames", random_frames))
        self.random_frames = -(-random // frames) * frames
        if random != self.random_frames:
            warn(
                f"init_random_frames={random} isn't a multiple of the {frames} frames of a batch: "
                f"{self.random_frames} are random"
            )

    def grant(self, frames: int) -> Grant | None:
        """Return what the next batch may hold; None if all frames are spent.

        Steps that turn out to be no frames don't count: another batch makes up for them.

        Args:
            frames: frames that were delivered or are on their way.
        """
        random = frames < self.random_frames
        if self.total_frames is None:
            return Grant(self.steps_per_batch, random)
        left = self.total_frames - frames
        if left <= 0:
            return None
        return Grant(min(self.steps_per_batch, -(-left // self.num_envs)), random, left)

    def aside(self) -> Grant:
        """Return what a batch may hold that doesn't count: a full one of the policy's."""
        return Grant(self.steps_per_batch, counted=False)


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
