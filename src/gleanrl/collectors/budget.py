"""How many frames a collector delivers, in what portions, and how many are still to come."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from gleanrl.arguments import integer, positive
from gleanrl.collectors.options import warn
from gleanrl.errors import InvalidArgumentError


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
