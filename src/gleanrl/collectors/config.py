"""The settings that all public collectors share, and the delivery that they describe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from tensordict.nn import InteractionType

from gleanrl._arrays.tensordicts import NestedKey
from gleanrl._rollout.native_policies import Backend, check_backend
from gleanrl._rollout.plan import random_with_native
from gleanrl._util import flag, integer, optional_callable, positive
from gleanrl.collectors.delivery import (
    BatchDelivery,
    BufferSink,
    CollectorProgress,
    PostProcessing,
    move_postproc,
)
from gleanrl.collectors.source import Budget, CollectionOptions, Source, stop_of
from gleanrl.collectors.trajectory_batches import CompleteTrajectories
from gleanrl.envs.exploration import exploration_from_string
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, UnsupportedError


@dataclass(frozen=True)
class Settings:
    """Constructor arguments of collectors, under their public names.

    Arguments that a collector does not have keep their defaults.
    """

    max_frames_per_traj: int = 0
    """0 for no limit."""
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    exploration_type: InteractionType | None = InteractionType.RANDOM
    nonfinite: str = "raise"
    track_policy_version: bool = False
    return_same_td: bool = False
    interruptor: Any = None
    set_truncated: bool = False
    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool = False
    replay_buffer: Any = None
    extend_buffer: bool = True
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    traj_format: str | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    cat_results: Any = None
    preemptive_threshold: float | None = None
    update_at_each_batch: bool = False
    policy_backend: Backend = "auto"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Return the settings of a constructor, which calls this method first, with its ``locals()``.

        ``exploration_mode`` takes precedence over ``exploration_type``, with a `DeprecationWarning`.

        Raises:
            InvalidArgumentError, InvalidTypeError: an argument has a bad value. Values that only `options` uses are
                checked there.
            UnsupportedError, MissingArgumentError: arguments exclude each other, or one requires another.
        """
        values = {field.name: arguments[field.name] for field in fields(cls) if field.name in arguments}
        kind, mode = values["exploration_type"], arguments.get("exploration_mode")
        if mode is not None:
            message = "exploration_mode is deprecated; pass exploration_type"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            kind = mode
        values["exploration_type"] = exploration_from_string(kind) if isinstance(kind, str) else kind
        limit = values["max_frames_per_traj"]
        values["max_frames_per_traj"] = 0 if limit is None else max(0, integer("max_frames_per_traj", limit))
        flag("track_policy_version", values["track_policy_version"])
        for name in ("split_trajs", "set_truncated", "extend_buffer"):
            values[name] = bool(values.get(name, getattr(cls, name)))
        _check_backend(arguments)
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        """Raise an error for bad values and for arguments that exclude or require each other.

        All checks run before the environment or a worker is made, so that a mistake costs nothing.
        """
        if not self.reset_when_done:
            raise InvalidArgumentError(
                "reset_when_done: False isn't supported; write a loop over env.step for that"
            )
        fed, seen = self.sink is not None, self.postproc is not None or self.split_trajs
        if fed and not self.extend_buffer and seen:
            raise UnsupportedError(
                "extend_buffer=False: postproc and split_trajs need whole batches; leave these two out, "
                "or pass extend_buffer=True"
            )
        optional_callable("pre_collect_hook", self.pre_collect_hook)
        if self.traj_format not in (None, "padded", "cat"):
            raise InvalidArgumentError(f"traj_format: expected 'padded' or 'cat', got {self.traj_format!r}")
        for name in ("trajs_per_batch", "trajs_per_write"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        for name in ("traj_format", "trajs_per_write"):
            if self.trajs_per_batch is None and getattr(self, name) is not None:
                raise MissingArgumentError(
                    f"{name}: it applies to whole trajectories; pass trajs_per_batch, too"
                )

    def options(self) -> CollectionOptions:
        """Return the collection options.

        Raises:
            InvalidArgumentError: `exploration_type` or `nonfinite` has a bad value.
            InvalidTypeError: `interruptor` has no ``collection_stopped()``.
        """
        return CollectionOptions(
            max_steps=self.max_frames_per_traj or None,
            exploration_type=self.exploration_type,
            nonfinite=self.nonfinite,
            reuse_block=self.return_same_td,
            reset_each=self.reset_at_each_iter,
            stop=stop_of(self.interruptor),
            versioned=self.track_policy_version,
        )

    @cached_property
    def sink(self) -> BufferSink | None:
        """The sink that writes batches to the replay buffer; None without a buffer."""
        return None if self.replay_buffer is None else BufferSink(self.replay_buffer, self.extend_buffer)

    def delivery(
        self,
        source: Source,
        budget: Budget,
        storing: torch.device | None,
        moved_to: torch.device | None,
        truncated: Sequence[NestedKey] = (),
        progress: bool = False,
    ) -> BatchDelivery:
        """Return the delivery of a source's batches, or of its whole trajectories; move `postproc` to its device.

        Args:
            source: makes the batches.
            budget: the number of frames to deliver.
            storing: device of delivered batches, for a `postproc` that can be moved.
            moved_to: device that batches have to be moved to; None if they are already there.
            truncated: see `PostProcessing`.
            progress: whether the counters are shown.

        Raises:
            UnsupportedError: another argument excludes `trajs_per_batch`.
            InvalidTypeError: `postproc` or `post_collect_hook` is not callable.
        """
        source = self.trajectory_source(source)
        move_postproc(self.postproc, storing)
        steps = (self.split_trajs, self.postproc, self.return_same_td, self.post_collect_hook)
        post_processing = PostProcessing(moved_to, truncated, *steps)
        progress_bar = CollectorProgress(budget.total_frames) if progress else None
        return BatchDelivery(source, budget, post_processing, self.sink, self.pre_collect_hook, progress_bar)

    def trajectory_source(self, source: Source) -> Source:
        """Return a source of whole trajectories if `trajs_per_batch` is set, else `source` unchanged.

        With a replay buffer, a batch has all trajectories that ended since the last one, for any `trajs_per_batch`.

        Raises:
            UnsupportedError: another argument excludes `trajs_per_batch`.
        """
        if self.trajs_per_batch is None:
            return source
        clashes = {
            "set_truncated": self.set_truncated,
            "return_same_td": self.return_same_td,
            "extend_buffer": not self.extend_buffer,
            "nonfinite": self.nonfinite == "mark",
            "preemptive_threshold": self.preemptive_threshold is not None,
        }
        for name, clash in clashes.items():
            if clash:
                raise UnsupportedError(
                    f"trajs_per_batch: it can't be combined with {name}; leave one of the two out"
                )
        count = None if self.replay_buffer is not None else int(self.trajs_per_batch)
        return CompleteTrajectories(source, count, self.traj_format != "cat")


def _check_backend(arguments: Mapping[str, Any]) -> None:
    """Check the argument ``policy_backend`` of a constructor, and the arguments that ``"native"`` excludes.

    Raises:
        InvalidArgumentError: it isn't a name of a backend.
        UnsupportedError: it is ``"native"``, and the policy is compiled, captured, or draws random actions.
    """
    if check_backend(arguments.get("policy_backend", "auto")) != "native":
        return
    if arguments.get("policy") is None and arguments.get("policy_factory") is None:
        raise random_with_native()
    for name in ("compile_policy", "cudagraph_policy"):
        if arguments.get(name) not in (None, False):
            raise UnsupportedError(
                f"{name}: policy_backend='native' computes the policy without torch; leave {name} out, or pass "
                "policy_backend='auto'"
            )
