"""How batches are collected: the choices of a source of one process, and how a user is warned."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict.nn import InteractionType

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
