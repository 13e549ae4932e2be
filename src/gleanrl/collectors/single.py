"""The public collectors: wide keywords, translated into narrow plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors.base import Setting, SourceCollector, shown
from gleanrl.collectors.build import CollectorConfig, assemble, made_env, registered
from gleanrl.collectors.config import Settings
from gleanrl.collectors.policy_weights import made_policy
from gleanrl.collectors.source import Budget
from gleanrl.collectors.weight_updaters import WeightUpdaterBase
from gleanrl.envs.exploration import ExplorationType
from gleanrl.errors import InvalidArgumentError


class SyncDataCollector(SourceCollector):
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
        policy_factory: a callable that makes the policy, instead of `policy`.
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
        postproc: called on every batch, after the split; its result is delivered. One that has a method ``to`` is moved
            to the storing device.
        split_trajs: whether batches are split into padded trajectories (see `split_trajectories`).
        exploration_type: the exploration type during collection, or its name, ``"random"`` say.
        exploration_mode: its older spelling, a string.
        return_same_td: whether all batches share one TensorDict and its memory, each overwriting the last; entries
            that you add to it stay.
        reset_when_done: must be True.
        interruptor: an object with ``collection_stopped()``, asked after every step; when it says True the
            batch is cut there and delivered.
        set_truncated: whether the last step of every batch is marked as truncated.
        use_buffers: no effect; accepted for compatibility.
        replay_buffer: a buffer that batches go into, as they would be delivered; iterating and `next` give None then,
            and `start` collects in the background.
        extend_buffer: whether a batch goes into the buffer by one ``extend``; if not, step by step, by ``add`` (by
            ``extend`` for a batch of environments if the storage has ``ndim=1``), without `postproc` and `split_trajs`.
        trust_policy: whether `policy` is called on TensorDicts, whatever its signature says. Not needed for what it
            speeds up elsewhere: what a policy puts out is checked at no cost.
        compile_policy: whether `torch.compile` compiles what the policy calls, or keyword arguments for it. It compiles
            in the first batch.
        cudagraph_policy: whether the policy's calls are captured as CUDA graphs, or keyword arguments of
            `tensordict.nn.CudaGraphModule`; only with CUDA.
        no_cuda_sync: no effect: data are moved by copies that wait for themselves, never by global synchronisation.
        weight_updater: sends weights when `update_policy_weights_` is called, in place of the collector; or a callable
            that makes one.
        trajs_per_batch: hand out batches of so many whole trajectories, padded, ``[trajs_per_batch, T]`` with
            ``("collector", "mask")``; into a buffer they go one after the other, unpadded, as they end. Steps are held
            back until then, `frames_per_batch` at a time. What hasn't ended, or isn't enough for a batch, when the
            budget is spent is discarded.
        trajs_per_write: no effect: those that have ended go into the buffer at once; it needs `trajs_per_batch`.
        traj_format: ``"cat"`` for the trajectories of `trajs_per_batch` one after the other, ``[frames]``, instead of
            ``"padded"``, the default.
        track_policy_version: whether every frame carries the version of the policy that acted, int64 under
            ``"policy_version"``: how often it got weights by `update_policy_weights_`.
        pre_collect_hook: called before every batch, without arguments.
        post_collect_hook: called on every batch, as it is delivered, before it goes into a buffer.
        nonfinite: what to do about NaN or infinity in observations and rewards: ``"raise"``; ``"mark"`` them
            in ``("collector", "nonfinite")``; or ``"pass"``.
        progress: whether a progress bar is shown.

    Raises:
        InvalidArgumentError: for a bad number; it names the argument and the value (also a ValueError).
        InvalidTypeError: if the policy's parameters can't be matched with observations (also a TypeError).
        PolicyError: if the policy's output doesn't fit the environment's action (also a RuntimeError).
        UnsupportedError: for arguments that can't work together, or not on this machine; it says which.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=100)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([50, 1]), torch.Size([50, 1])]
    """

    return_same_td = Setting()

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
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
        exploration_type: InteractionType | str | None = ExplorationType.RANDOM,
        exploration_mode: str | None = None,
        return_same_td: bool = False,
        reset_when_done: bool = True,
        interruptor: Any = None,
        set_truncated: bool = False,
        use_buffers: bool | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None = None,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: str | None = None,
        track_policy_version: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        nonfinite: str = "raise",
        progress: bool = False,
    ) -> None:
        settings = Settings.of(locals())
        recipe = CollectorConfig(
            settings.options(),
            device,
            env_device,
            policy_device,
            storing_device,
            settings.set_truncated,
            bool(trust_policy),
            compile_policy,
            cudagraph_policy,
        )
        policy = made_policy(policy, policy_factory)
        with made_env(create_env_fn, create_env_kwargs) as env:
            num_envs = max(1, torch.Size(env.batch_size).numel())
            budget = Budget(num_envs, frames_per_batch, total_frames, init_random_frames)
            collection, self.devices, moved_to = assemble(env, policy, recipe, prepared=registered(self))
            self.env, self.plan = collection.env, collection.plan
            self.policy, storing = self.plan.policy, self.devices.storing
            truncated = self.env.done_keys if settings.set_truncated else ()
            handover = settings.handover(collection, budget, storing, moved_to, truncated, progress)
            self._aside = partial(handover.aside, budget.aside())
            super().__init__(settings, budget, handover, weight_updater, policy)
        self._ready = True  # from here on the last reference's end is its own

    def _abandoned(self) -> None:
        """Shut down; an environment that somebody else used since stays open."""
        self.shutdown(close_env=not self.plan.stepper.disturbed)

    def rollout(self) -> Any:
        """Return one full batch outside the budget: it counts against neither total nor random frames."""
        with self.pause():
            return self._aside()

    @property
    def n_env(self) -> int:
        """Environments that step at once."""
        return self.source.num_envs

    @property
    def env_device(self) -> torch.device | None:
        """Where the environment lives; None for no place in particular."""
        return self.devices.env

    @property
    def policy_device(self) -> torch.device | None:
        """Where the policy was sent; None for where it was."""
        return self.devices.policy

    @property
    def storing_device(self) -> torch.device | None:
        """Where batches are delivered; None for where they are made."""
        return self.devices.storing

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment."""
        return getattr(self.env, attr)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy."""
        return getattr(self.policy, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of the collector once for each of several arguments; return what it returned.

        Args:
            method_name: the method.
            list_of_args: positional arguments for each call; None for none.
            list_of_kwargs: keywords for each call; None for none.

        Raises:
            InvalidArgumentError: lists of unlike lengths.
        """
        count = len(list_of_args or list_of_kwargs or ())
        args, kwargs = list_of_args or [()] * count, list_of_kwargs or [{}] * count
        if len(args) != len(kwargs):
            raise InvalidArgumentError(
                f"map_fn: expected as many of list_of_args as of list_of_kwargs, got {len(args)} and {len(kwargs)}"
            )
        method = getattr(self, method_name)
        return [method(*given, **named) for given, named in zip(args, kwargs, strict=True)]

    def __repr__(self) -> str:
        """Show the environment, the policy and the budget."""
        return shown(self, f"env={self.env!r}, policy={type(self.policy).__name__}")
