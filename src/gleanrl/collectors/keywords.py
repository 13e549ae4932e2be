"""What the keywords of the public collectors mean, for all of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from tensordict.nn import InteractionType

from gleanrl.arguments import flag, integer, positive
from gleanrl.collectors.feed import Feed
from gleanrl.collectors.options import CollectionOptions
from gleanrl.collectors.source import Source
from gleanrl.collectors.whole import WholeTrajectories
from gleanrl.envs.exploration import exploration_from_string
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, UnsupportedError


def require_resets(reset_when_done: bool) -> None:
    """Raise `InvalidArgumentError` unless ended episodes are followed by others."""
    if not reset_when_done:
        raise InvalidArgumentError(
            "reset_when_done: False isn't supported; write a loop over env.step for that"
        )


def exploration_of(
    exploration_type: InteractionType | str | None, exploration_mode: str | None
) -> InteractionType | None:
    """Return the interaction type that the newer or the older keyword names."""
    if exploration_mode is not None:
        warnings.warn(
            "exploration_mode is deprecated; pass exploration_type", DeprecationWarning, stacklevel=3
        )
        exploration_type = exploration_mode
    return (
        exploration_from_string(exploration_type) if isinstance(exploration_type, str) else exploration_type
    )


def options_of(
    max_frames_per_traj: Any,
    exploration_type: InteractionType | None,
    nonfinite: str,
    reset_at_each_iter: bool,
    track_policy_version: Any,
) -> CollectionOptions:
    """Return how batches are collected, by what all collectors take."""
    limit = 0 if max_frames_per_traj is None else integer("max_frames_per_traj", max_frames_per_traj)
    return CollectionOptions(
        max_steps=limit if limit > 0 else None,
        exploration_type=exploration_type,
        nonfinite=nonfinite,
        reset_each=reset_at_each_iter,
        versioned=flag("track_policy_version", track_policy_version),
    )


def feed_of(replay_buffer: Any, extend_buffer: Any, postproc: Any, split_trajs: Any) -> Feed | None:
    """Return what puts batches into a buffer, if there is one."""
    if replay_buffer is None:
        return None
    if not extend_buffer and (postproc is not None or split_trajs):
        raise UnsupportedError("extend_buffer=False: postproc and split_trajs need whole batches")
    return Feed(replay_buffer, bool(extend_buffer))


@dataclass(frozen=True)
class WholeOptions:
    """Whether, and how, whole trajectories are handed out.

    Attributes:
        count: trajectories of a batch; None for batches as they come.
        form: ``"padded"``, side by side, the default; or ``"cat"``, one after the other.
        per_write: no effect; trajectories of one write into a buffer.
    """

    count: Any = None
    form: str | None = None
    per_write: Any = None

    def __post_init__(self) -> None:
        """Check the choices."""
        if self.form not in (None, "padded", "cat"):
            raise InvalidArgumentError(f"traj_format: expected 'padded' or 'cat', got {self.form!r}")
        if self.per_write is not None:
            positive("trajs_per_write", self.per_write)
        if self.count is None:
            for name, given in (("traj_format", self.form), ("trajs_per_write", self.per_write)):
                if given is not None:
                    raise MissingArgumentError(
                        f"{name}: it's for whole trajectories: give trajs_per_batch, too"
                    )
        else:
            positive("trajs_per_batch", self.count)


def whole_or_not(source: Source, options: WholeOptions, fed: bool, **clashes: Any) -> Source:
    """Return what hands out whole trajectories, if that is asked for; else the source itself.

    Args:
        source: makes batches.
        options: what is asked for.
        fed: whether batches go into a buffer.
        **clashes: arguments that can't be given with it, and whether they are.
    """
    if options.count is None:
        return source
    for name, clash in clashes.items():
        if clash:
            raise UnsupportedError(f"trajs_per_batch: not together with {name}")
    return WholeTrajectories(source, None if fed else int(options.count), options.form != "cat")
