"""The public collectors: wide keywords, translated into narrow plans."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.collection import Collection, CollectionOptions
from gleanrl.collectors.ledger import CollectorStats
from gleanrl.collectors.plan import DevicePlan, FramePlan, has_truncated, integer, make_env, stop_of
from gleanrl.collectors.progress import CollectorProgress
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.collectors.weights import PolicyWeights, unchanged_on_error
from gleanrl.envs.exploration import ExplorationType, exploration_from_string
from gleanrl.envs.rollout import mark_truncated
from gleanrl.errors import (
    ClosedError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)
from gleanrl.rollouts.extras import seed_env
from gleanrl.rollouts.plan import RolloutPlan, plan_rollout
from gleanrl.rollouts.protocol import EpisodeRules


class SyncDataCollector(DataCollectorBase):
    """Collects batches in the caller's own process: nothing is stepped between two batches.

    Iterate over it, or call `next`. Batches are ``[T]`` for one environment and ``[*batch, T]`` for a batch
    of them, the last dimension called ``"time"``; each is fresh memory of its own. Environments aren't reset
    between batches, so a trajectory may go on from one batch to the next, under the same
    ``("collector", "traj_ids")``. When the budget is spent the environment is closed.

    After an error the batch at hand is lost (and counted as discarded in `stats`); the collector can be used
    again, and its next batch begins with a reset.

    Args:
        create_env_fn: an environment, or a callable that makes one. Anything that keeps EnvBase's protocol
            will do.
        policy: maps observations to actions. None draws random actions. TensorDict modules and callables of
            one TensorDict (parameter called ``tensordict`` or ``td``, or annotated so) are used as they are;
            any other callable gets the observations that its parameters are named after, or, with one
            required parameter, the one observation.
        frames_per_batch: frames of a batch over all environments; rounded up to a multiple of their number.
        total_frames: frames to deliver; -1 or None for endless. The last batch is short if need be.
        device: fills whichever of the following devices are unset.
        storing_device: where batches are delivered.
        policy_device: where the policy runs. A policy that is there already, or any without this argument, is run
            itself. Of one that isn't a copy runs there, which gets the current weights and buffers before every
            batch, until `update_policy_weights_` is called: then it gets what that is given.
        env_device: where the environment is moved to.
        create_env_kwargs: keyword arguments for `create_env_fn`.
        max_frames_per_traj: truncate trajectories at so many steps, and count their steps under
            ``"step_count"``; None, 0 or negative for no limit.
        init_random_frames: frames at the beginning with random actions; rounded up to whole batches.
        reset_at_each_iter: whether every batch begins with a reset.
        postproc: called on every batch, after the split; its result is delivered.
        split_trajs: whether batches are split into padded trajectories (see `split_trajectories`).
        exploration_type: the exploration type during collection.
        exploration_mode: its older spelling, a string.
        return_same_td: whether all batches share one TensorDict and its memory, each overwriting the last; entries
            that you add to it stay.
        reset_when_done: must be True.
        interruptor: an object with ``collection_stopped()``, asked after every step; when it says True the
            batch is cut there and delivered.
        set_truncated: whether the last step of every batch is marked as truncated.
        use_buffers: no effect; accepted for compatibility.
        nonfinite: what to do about NaN or infinity in observations and rewards: ``"raise"``; ``"mark"`` them
            in ``("collector", "nonfinite")``; or ``"pass"``.
        progress: whether a progress bar is shown.

    Raises:
        InvalidArgumentError: for a bad number; it names the argument and the value (also a ValueError).
        InvalidTypeError: if the policy's parameters can't be matched with observations (also a TypeError).
        PolicyError: if the policy's output doesn't fit the environment's action (also a RuntimeError).

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=100)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([50, 1]), torch.Size([50, 1])]
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Any = None,
        storing_device: Any = None,
        policy_device: Any = None,
        env_device: Any = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | None = ExplorationType.RANDOM,
        exploration_mode: str | None = None,
        return_same_td: bool = False,
        reset_when_done: bool = True,
        interruptor: Any = None,
        set_truncated: bool = False,
        use_buffers: bool | None = None,
        nonfinite: str = "raise",
        progress: bool = False,
    ) -> None:
        self.closed = False
        self._frames = self._iter = 0
        self._progress: CollectorProgress | None = None
        if not reset_when_done:
            raise InvalidArgumentError(
                "reset_when_done: False isn't supported; write a loop over env.step for that"
            )
        if exploration_mode is not None:
            warnings.warn(
                "exploration_mode is deprecated; pass exploration_type", DeprecationWarning, stacklevel=2
            )
            exploration_type = exploration_from_string(exploration_mode)
        if postproc is not None and not callable(postproc):
            raise InvalidTypeError(f"postproc: expected a callable, got {type(postproc).__name__}")
        limit = 0 if max_frames_per_traj is None else integer("max_frames_per_traj", max_frames_per_traj)
        options = CollectionOptions(
            max_steps=limit if limit > 0 else None,
            exploration_type=exploration_type,
            nonfinite=nonfinite,
            reuse_block=return_same_td,
            stop=stop_of(interruptor),
        )
        self.env = make_env(create_env_fn, create_env_kwargs)
        self._ready = self.env is not create_env_fn  # should this constructor fail: close what was made here
        num_envs = max(1, torch.Size(self.env.batch_size).numel())
        self._budget = FramePlan.of(num_envs, frames_per_batch, total_frames, init_random_frames)
        self.devices = DevicePlan.of(device, env_device, policy_device, storing_device, self.env.device)
        if self.devices.env is not None and self.env.device != self.devices.env:
            self.env = self.env.to(self.devices.env)
        if set_truncated and not has_truncated(self.env):
            raise UnsupportedError(
                "set_truncated: the environment has no 'truncated' flag; call env.add_truncated_keys() first"
            )
        if options.max_steps is not None and not has_truncated(self.env):
            self.env.add_truncated_keys()  # the limit needs a flag to set
        self._weights = PolicyWeights(policy, self.devices.policy)
        self.plan: RolloutPlan = plan_rollout(
            self.env,
            self._weights.policy,
            self.devices.policy,
            rules=EpisodeRules(max_steps=options.max_steps),
        )
        self.policy = self.plan.policy
        self._collection = Collection(self.env, self.plan, options)
        self.reset_at_each_iter = reset_at_each_iter
        self.set_truncated = set_truncated
        self.split_trajs = bool(split_trajs)
        self.return_same_td = return_same_td
        self._same: TensorDictBase | None = None
        self.postproc = postproc
        if postproc is not None and hasattr(postproc, "to") and self.devices.storing is not None:
            postproc.to(self.devices.storing)
        if progress:
            self._progress = CollectorProgress(self._budget.total_frames)
        self._ready = True  # from here on the last reference's end closes the environment

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch, after rounding."""
        return self._budget.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames of a batch as they were asked for."""
        return self._budget.requested_frames_per_batch

    @property
    def total_frames(self) -> int | float:
        """Frames of the collector's life, after rounding; infinity for endless."""
        return math.inf if self._budget.total_frames is None else self._budget.total_frames

    @property
    def init_random_frames(self) -> int:
        """Random frames at the beginning, after rounding."""
        return self._budget.random_frames

    def stats(self) -> CollectorStats:
        """Return the counters at this moment."""
        collection = self._collection
        ledger, episodes = collection.ledger, collection.episodes
        recent, lengths = episodes.recent_returns, episodes.recent_lengths
        return CollectorStats(
            stepped=ledger.stepped,
            delivered=ledger.delivered,
            flagged=ledger.flagged,
            discarded=ledger.discarded,
            reasons=ledger.reasons,
            batches=self._iter,
            episodes=episodes.num_ended,
            mean_return=fmean(recent) if recent else math.nan,
            mean_length=fmean(lengths) if lengths else math.nan,
            frames_per_s=ledger.stepped / ledger.seconds if ledger.seconds else 0.0,
        )

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is spent, then close the environment.

        Raises:
            ClosedError: if the collector was shut down before.
        """
        while (num_steps := self._budget.steps_after(self._frames)) > 0:
            self._check_open()
            random = self._frames < self._budget.random_frames
            batch = self._next_batch(num_steps, random)
            if self._progress is not None:
                self._progress.update(self._frames, self.stats())
            yield batch
        self.shutdown()

    def rollout(self) -> TensorDictBase:
        """Return one full batch outside the budget: it counts against neither total nor random frames."""
        self._check_open()
        return self._next_batch(self._budget.steps_per_batch, random=False, counted=False)

    def _next_batch(self, num_steps: int, random: bool, counted: bool = True) -> TensorDictBase:
        """Return the next batch as it is handed out; `counted` against the budget."""
        self._weights.hand_over()
        if self.reset_at_each_iter:
            self._collection.reset()
        most = self._budget.left_after(self._frames) if counted else None
        collected = self._collection.collect(num_steps, random, self._batch_device(), most)
        with self._collection.handing_out():
            batch = self._moved(collected)
            if self.split_trajs:
                batch = split_trajectories(batch, prefix="collector")
            if self.postproc is not None:
                batch = self.postproc(batch)
            if batch is None:
                raise InvalidTypeError(
                    f"postproc: expected the batch that is delivered, got None from {self.postproc!r}"
                )
            if counted:
                self._frames += self._collection.frames
                self._iter += 1
        return batch

    def _moved(self, batch: TensorDictBase) -> TensorDictBase:
        """Return `batch` where it is to be delivered, its last step marked if that is wanted."""
        storing = self.devices.storing
        if self.set_truncated:
            mark_truncated(batch, self.env.done_keys)
        if storing is None or storing == (self.plan.stepper.device or torch.device("cpu")):
            return batch
        moved = batch.to(storing)
        if not self.return_same_td:
            return moved
        if self._same is None or self._same.batch_size != moved.batch_size:
            self._same = moved
            return moved
        return self._same.copy_(moved)

    def _batch_device(self) -> torch.device | None:
        on_columns = self.plan.stepper.device or torch.device("cpu")
        return on_columns if self.devices.storing == on_columns else self.env.device

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments; their next frames belong to new trajectories.

        Args:
            index: which environments of a batch, anything that indexes the batch dimensions; None for all.
            **kwargs: passed to the environment's `reset`; only without `index`.
        """
        self._check_open()
        if index is None:
            self._collection.reset(**kwargs)
            return
        if kwargs:
            raise UnsupportedError("reset: keyword arguments go to all environments; leave index out")
        if not self.env.batch_size:
            raise InvalidArgumentError("reset: index is for a batch of environments; this is a single one")
        mask = torch.zeros(self.env.batch_size, dtype=torch.bool, device="cpu")
        mask[index] = True
        self._collection.reset(mask)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and reset them.

        Args:
            seed: of the first environment; number i gets ``seed + i``.
            static_seed: whether all get `seed` itself.

        Returns:
            The last seed that was used: `seed` itself for one environment.
        """
        self._check_open()
        last = seed_env(self.env, seed, static_seed)
        self._collection.reset()
        return last

    def update_policy_weights_(self, policy_weights: TensorDictBase | None = None) -> None:
        """Copy weights into the collector's own policy, in place.

        Args:
            policy_weights: what ``TensorDict.from_module`` gives of the policy that the collector was made with,
                or of `collector.policy`, which may be a wrapper around it; None for its current weights. Unless
                the policy had to move to its device, that is the very policy that runs, and nothing needs to be
                copied. Of one that had to, weights are copied by this method only from its first call on.

        Raises:
            SchemaError: if the weights don't fit; nothing is copied then.
        """
        wrapped = self.policy is not self._weights.policy
        if (
            wrapped
            and isinstance(policy_weights, TensorDictBase)
            and set(policy_weights.keys()) == {"module"}
        ):
            policy_weights = policy_weights.get("module")
        self._weights.push(policy_weights)

    def shutdown(self) -> None:
        """Close the environment; calling it again does nothing. `state_dict` and `stats` still work."""
        if self.closed:
            return
        self.closed = True
        if self._progress is not None:
            self._progress.close()
        if not getattr(self.env, "is_closed", False):
            self.env.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the collector was shut down, or its budget is spent; make a new one")

    def state_dict(self) -> dict[str, Any]:
        """Return policy and environment state, the counters, and what keeps trajectory ids unique.

        Simulators aren't part of it: a restored collector begins new trajectories.
        """
        state: dict[str, Any] = {
            "env_state_dict": dict(self.env.state_dict()),
            "frames": self._frames,
            "iter": self._iter,
        }
        if isinstance(self.policy, torch.nn.Module):
            self._weights.hand_over()
            state["policy_state_dict"] = self.policy.state_dict()
        state["episodes"] = self._collection.episodes.state_dict()
        state["ledger"] = self._collection.ledger.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **kwargs: Any) -> None:
        """Take over a saved state; the environments are reset before the next batch.

        Args:
            state_dict: from `state_dict`.
            strict: whether a missing or unexpected entry is an error.
            **kwargs: passed to the policy's `load_state_dict`.

        Raises:
            MissingKeyError: if an entry is missing; nothing has changed then.
            SchemaError: if an entry is unexpected (a policy's weights without such a policy) or a weight
                doesn't fit; likewise.
        """
        if not isinstance(state_dict, Mapping):
            raise InvalidTypeError(f"load_state_dict: expected a mapping, got {type(state_dict).__name__}")
        has_policy = isinstance(self.policy, torch.nn.Module)
        needed = {"env_state_dict", "frames", "iter"} | ({"policy_state_dict"} if has_policy else set())
        missing = sorted(needed - set(state_dict))
        if strict and missing:
            raise MissingKeyError(f"load_state_dict: missing {missing}; got {sorted(state_dict)}")
        unexpected = sorted(set(state_dict) - needed - {"episodes", "ledger"})
        if strict and unexpected:
            raise SchemaError(f"load_state_dict: unexpected {unexpected}; expected {sorted(needed)}")
        with unchanged_on_error(self.policy, self.env):
            if has_policy and "policy_state_dict" in state_dict:
                self.policy.load_state_dict(state_dict["policy_state_dict"], strict=strict, **kwargs)
                self._weights.taken_back()
            if state_dict.get("env_state_dict"):
                self.env.load_state_dict(state_dict["env_state_dict"], strict=strict)
        self._frames = int(state_dict.get("frames", self._frames))
        self._iter = int(state_dict.get("iter", self._iter))
        if "episodes" in state_dict:
            self._collection.episodes.load_state_dict(state_dict["episodes"])
        if "ledger" in state_dict:
            self._collection.ledger.load_state_dict(state_dict["ledger"])
        self._collection.reset_later()

    def __repr__(self) -> str:
        """Show the environment, the policy and the budget."""
        total = "endless" if self._budget.total_frames is None else self._budget.total_frames
        return (
            f"{type(self).__name__}(env={self.env!r}, policy={type(self.policy).__name__}, "
            f"frames_per_batch={self.frames_per_batch}, total_frames={total})"
        )
