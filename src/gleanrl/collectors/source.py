"""The protocol between a collector and the source of its batches; frame budgets and collection options."""

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
        max_steps: number of steps after which trajectories are truncated. They are then also counted, under
            ``step_count``. None turns both off.
        exploration_type: the interaction type during a rollout.
        nonfinite: treatment of NaN or infinity in observations and rewards: ``"raise"``, ``"mark"`` or ``"pass"``.
        reuse_block: whether all full batches share their memory.
        reset_each: whether every batch begins with a reset.
        stop: called after every step with the step's number, from 0. If it returns True, the batch ends there.
        versioned: whether every frame carries the version of the policy that acted.

    Raises:
        InvalidArgumentError: `exploration_type` or `nonfinite` has a bad value.
    """

    max_steps: int | None = None
    exploration_type: InteractionType | None = InteractionType.RANDOM
    nonfinite: str = "raise"
    reuse_block: bool = False
    reset_each: bool = False
    stop: Callable[[int], bool] | None = None
    versioned: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.exploration_type is not None and not isinstance(self.exploration_type, InteractionType):
            raise InvalidArgumentError(
                f"exploration_type: expected an ExplorationType or None, got {self.exploration_type!r}"
            )
        if self.nonfinite not in ("raise", "mark", "pass"):
            raise InvalidArgumentError(
                f"nonfinite: expected 'raise', 'mark' or 'pass', got {self.nonfinite!r}"
            )


def stop_of(interruptor: Any) -> Callable[[int], bool] | None:
    """Return a function of the step number that asks `interruptor` whether to stop; None without an interruptor.

    Raises:
        InvalidTypeError: `interruptor` has no `collection_stopped()`.
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
    """Warn the user at the line of the user's call, unless the environment variable ``RL_WARNINGS`` is 0 or false."""
    if os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false"):
        modules = [str(frame.frame.f_globals.get("__name__")) for frame in inspect.stack(0)]
        ours = (level for level, module in enumerate(modules) if module.split(".")[0] != "gleanrl")
        warnings.warn(message, stacklevel=next(ours, len(modules)) + 1)


class Grant(NamedTuple):
    """Permission for a source to collect one batch."""

    num_steps: int
    """Steps of every environment, at least 1."""
    random: bool = False
    """Whether actions are drawn from the action spec instead of the policy."""
    most: int | None = None
    """Limit of the delivered frames, greater than the frames of ``num_steps - 1`` steps; None for no limit. After steps
    that were no frames, the frames left may not fill a whole step. Frames beyond the limit are masked and discarded.
    They belong to the last step. In a batch of several workers they are the last ones in row-major order."""
    counted: bool = True
    """Whether the frames count against the budget."""


class Grants(Protocol):
    """Grants batches to a source."""

    def grant(self, frames: int) -> Grant | None:
        """Return the grant of the next batch, after `frames` counted frames; None if there is no further batch."""


class Budget:
    """Check and round the user's frame counts, and grant batches until the frames are spent. Immutable.

    The constructor gives one warning for all counts that it rounds and for a shorter last batch.

    Args:
        num_envs: number of environments that step at once. Every step makes this many frames.
        frames_per_batch: frames of a batch; rounded up to a multiple of `num_envs`.
        total_frames: frames to deliver, rounded up likewise; None or a negative number for endless.
        random_frames: frames with random actions at the beginning, rounded up to full batches; None or a negative
            number for none.

    Raises:
        InvalidArgumentError: `frames_per_batch` is zero, negative or fractional, `total_frames` is zero or fractional,
            or `random_frames` is fractional.
    """

    def __init__(
        self, num_envs: int, frames_per_batch: Any, total_frames: Any = None, random_frames: Any = None
    ) -> None:
        self.num_envs = num_envs
        self.requested_frames_per_batch = positive("frames_per_batch", frames_per_batch)
        self.steps_per_batch = -(-self.requested_frames_per_batch // num_envs)
        frames = self.frames_per_batch = self.steps_per_batch * num_envs
        rounded = []
        if frames != self.requested_frames_per_batch:
            rounded.append(
                f"frames_per_batch={self.requested_frames_per_batch} isn't a multiple of the {num_envs} "
                f"environments: batches have {frames}"
            )
        total = -1 if total_frames is None else integer("total_frames", total_frames)
        if total == 0:
            raise InvalidArgumentError("total_frames: expected a positive integer, or -1 for endless, got 0")
        if total > 0 and total % frames:
            full = -(-total // num_envs) * num_envs
            last = full % frames
            tail = f", and the last batch has {last} of {frames} frames" if last else ""
            rounded.append(
                f"total_frames={total} isn't a multiple of the {frames} frames of a batch: "
                f"{full} are collected{tail}"
            )
            total = full
        self.total_frames = total if total > 0 else None
        random = 0 if random_frames is None else max(0, integer("init_random_frames", random_frames))
        # A grant is random as a whole, so random frames are rounded up to full batches.
        self.random_frames = -(-random // frames) * frames
        if random != self.random_frames:
            rounded.append(
                f"init_random_frames={random} isn't a multiple of the {frames} frames of a batch: "
                f"{self.random_frames} are random"
            )
        if rounded:
            warn("; ".join(rounded))

    def grant(self, frames: int) -> Grant | None:
        """Return the grant of the next batch; None if all frames are spent.

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

    def extra_grant(self) -> Grant:
        """Return a grant of one full batch with the policy's actions, outside the budget."""
        return Grant(self.steps_per_batch, counted=False)


class Collected(NamedTuple):
    """A batch on its way to the user."""

    batch: TensorDict  # [*batch, T]; or a Ray reference to one, for a buffer that accepts references
    after: Any
    """State of the source after the batch has been delivered."""
    part: tuple[int, int] = (0, 1)
    """The trajectories that the batch may continue: with ``(w, W)``, the open ones whose id is w modulo W."""


class Loading(NamedTuple):
    """A checked saved state, ready to be loaded."""

    change: Callable[[], None]
    """Load the state."""
    cut: tuple[int, ...] = ()
    """Ids of the trajectories that were open in the delivered frames and can't be continued."""
    continued: tuple[int, ...] = ()
    """Ids of the open trajectories that continue."""
    renamed: Mapping[int, int] = {}
    """Maps saved ids of continued trajectories to their new ids, where they changed."""


class BudgetSpent(Exception):
    """There is no further batch."""


class Source(ABC):
    """Make one batch after another, in this process, in worker processes or on other machines.

    One caller thread at a time. A batch that `next` or `collect` returned is open until `deliver`. If the caller makes
    any other call meanwhile, the handover was interrupted, and the open batch is lost. Lost frames are counted as
    discarded. The frames after them belong to new trajectories, because a trajectory must not have a gap.
    """

    num_envs: int
    """Number of environments that step at once, which is the number of frames of a step."""
    batch_size: torch.Size
    """Batch dimensions of a batch, without time."""
    done_paths: tuple[Path, ...]
    """Paths of the flags under ``next`` that end a trajectory."""
    steady = True
    """Whether a batch holds as many frames as were granted."""
    pushes_anytime = False
    """Whether `push_weights`, without `worker_ids`, may be called while another thread waits for a batch."""
    goes_on = False
    """Whether the next batch continues the open trajectories, with no reset before it."""
    pushes_between = False
    """Whether `push_weights` may be called while another thread hands over a batch, as long as it collects none."""
    policy_version: int = 0
    """How often the policy that collects got new weights. The code that sets weights increments it."""

    def more(self, budget: Grants) -> bool:
        """Return whether another batch is available."""
        return budget.grant(self.spent) is not None

    @abstractmethod
    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the next batch that `budget` grants, collected with the current weights. The budget must not be spent.

        A source that collects ahead takes several grants. It counts their frames on their way against the budget.

        Args:
            budget: grants batches.
            lend: whether the batch may use memory that is overwritten after the batch was delivered or lost.
        """

    @abstractmethod
    def collect(self, grant: Grant) -> Collected:
        """Return a batch for the given grant.

        Raises:
            UnsupportedError: the source collects ahead, or delivers whole trajectories.
        """

    @abstractmethod
    def deliver(self, collected: Collected, batch: TensorDictBase) -> TensorDictBase:
        """Count the open batch as delivered and return `batch`, its post-processed form.

        The counting is one assignment, and the last action of this method. An interrupt comes either before it, and the
        batch is lost, or after the caller has the batch.
        """

    @abstractmethod
    def lose(self, reason: str) -> None:
        """Count an open batch, if there is one, as discarded for a reason."""

    @property
    @abstractmethod
    def spent(self) -> int:
        """Delivered frames that count against the budget."""

    @abstractmethod
    def stats(self) -> CollectorStats:
        """Return a snapshot of the counters."""

    @abstractmethod
    def recent_episodes(self) -> Sequence[Episode]:
        """Return the last `NUM_RECENT` ended episodes, in the order of their ends."""

    @property
    def oldest_version(self) -> int:
        """The lowest policy version that the next batches are collected with; workers may have different ones."""
        return self.policy_version

    @abstractmethod
    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments. Their next frames belong to new trajectories.

        Args:
            index: which environments; None for all.
            **kwargs: passed to the environments' `reset`.
        """

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environments and the random actions, and reset. Return the last seed that was used."""

    @abstractmethod
    def push_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Set the weights of the policy that collects, and increment its version; see `update_policy_weights_`."""

    @abstractmethod
    def stop_following(self) -> None:
        """Stop sending the user's current weights. From now on only `push_weights` sends weights."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Return the state, including the entries ``"frames"`` and ``"iter"``."""

    @abstractmethod
    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Check a saved state and return the change that loads it.

        The change can't fail if the source is able to check states in advance.

        Args:
            state: a result of `save`.
            strict: whether a missing or unexpected entry is an error. Otherwise missing parts stay unchanged.
            keep_ids: whether trajectories continue under their saved ids, although later frames of them were delivered.
                Set it only if every buffer with these frames is restored, too. Otherwise such trajectories get new ids.
            **kwargs: passed to the policy's `load_state_dict`.
        """

    @abstractmethod
    def close(self, close_env: bool = True) -> None:
        """Release the environments, workers or nodes. A second call finishes a first one that was interrupted.

        Args:
            close_env: whether environments of this process are closed, too.
        """
