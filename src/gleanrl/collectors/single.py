"""The public single-process collector. It translates wide keywords into the narrow internal configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl._rollout.native_policies import Backend
from gleanrl.collectors.base import Setting, SourceCollector
from gleanrl.collectors.build import CollectorConfig, assemble, made_env, registered
from gleanrl.collectors.config import Settings
from gleanrl.collectors.policy_weights import made_policy
from gleanrl.collectors.source import Budget
from gleanrl.collectors.weight_updaters import WeightUpdaterBase
from gleanrl.envs.exploration import ExplorationType
from gleanrl.errors import InvalidArgumentError


class SyncDataCollector(SourceCollector):
    """Collect batches in the caller's process. The environment is not stepped between two batches.

    Iterate over the collector, or call `next`. Batches are ``[T]`` for one environment and ``[*batch, T]`` for a batch
    of environments. The last dimension is named ``"time"``. Each batch has fresh memory. Environments are not reset
    between batches. A trajectory may therefore continue in the next batch, under the same ``("collector",
    "traj_ids")``. When the budget is spent, the environment is closed.

    After an error the current batch is lost, and counted as discarded in `stats`. The collector can be used again, and
    its next batch begins with a reset. With `trajs_per_batch`, an error of `postproc`, `post_collect_hook` or the
    buffer causes no reset. Only the trajectories of that batch are lost then.

    Args:
        create_env_fn: an environment, or a callable that makes one. Any object with the protocol of `EnvBase` is
            accepted. A gymnasium environment is wrapped in `GymWrapper`. A string is the name of a gymnasium
            environment, which `GymEnv` makes.
        policy: maps observations to actions. None draws random actions. A TensorDict module is called directly. So is a
            callable of one TensorDict, whose parameter is called ``tensordict`` or ``td``, or annotated so. Any other
            callable gets the observations that its parameters are named after. If it has one required parameter, it
            gets the one observation. It returns tensors, NumPy arrays or numbers.
        policy_factory: a callable that makes the policy, instead of `policy`.
        frames_per_batch: frames of a batch over all environments; rounded up to a multiple of their number.
        total_frames: frames to deliver; -1 or None for endless. The last batch may be shorter.
        device: default of the following devices.
        storing_device: device that batches are delivered on.
        policy_device: device that the policy runs on. None, or the policy's current device, runs the policy itself.
            Otherwise a copy runs there. The copy gets the current weights and buffers before every batch, until the
            first `update_policy_weights_`. From then on it gets only the weights of that method.
        env_device: device that the environment is moved to.
        create_env_kwargs: keyword arguments for `create_env_fn`.
        max_frames_per_traj: number of steps after which trajectories are truncated. Steps are then also counted under
            ``"step_count"``. None, 0 or a negative number for no limit.
        init_random_frames: frames at the beginning with random actions; rounded up to full batches.
        reset_at_each_iter: whether every batch begins with a reset.
        postproc: called on every batch, after the split; its result is delivered. If it has a method ``to``, it is
            moved to the storing device.
        split_trajs: whether batches are split into padded trajectories (see `split_trajectories`).
        exploration_type: the exploration type during collection, or its name, for example ``"random"``.
        exploration_mode: older spelling of `exploration_type`, a string.
        return_same_td: whether all full batches share one TensorDict and its memory, so that each overwrites the one
            before. Entries that the user adds to it are kept.
        reset_when_done: must be True.
        interruptor: an object with ``collection_stopped()``, which is called after every step. If it returns True, the
            batch ends there and is delivered.
        set_truncated: whether the last step of every batch is marked as truncated.
        use_buffers: no effect; accepted for compatibility.
        replay_buffer: a buffer that batches are written to, in their delivered form. Iterating and `next` then give
            None, and `start` collects in the background.
        extend_buffer: whether a batch is written by one ``extend``. Otherwise it is written step by step with ``add``.
            Steps of a batch of environments are written with ``extend`` if the storage has ``ndim=1``. False can't be
            combined with `postproc`, `split_trajs` or `trajs_per_batch`.
        trust_policy: whether `policy` is called on TensorDicts, regardless of its signature. It brings no speedup here:
            the checks of policy outputs are free.
        compile_policy: whether `torch.compile` compiles the policy's calls, or keyword arguments for it. Compilation
            happens in the first batch.
        cudagraph_policy: whether the policy's calls are captured as CUDA graphs, or keyword arguments of
            `tensordict.nn.CudaGraphModule`; only with CUDA.
        policy_backend: the code that computes the policy. ``"auto"`` takes the library's core where it can, and torch
            for the other modules; see `CollectorStats.policy`. The core takes microseconds for small policies.
            ``"native"`` raises where the core can't compute a module. ``"torch"`` only takes torch. The core draws
            samples from the collector's generator, in another sequence than torch. It reads the weights once a batch.
        no_cuda_sync: no effect: every copy waits for itself, so there is no global synchronisation to skip.
        weight_updater: sends weights when `update_policy_weights_` is called, in place of the collector; or a callable
            that makes it.
        trajs_per_batch: deliver batches of that many whole trajectories, padded, ``[trajs_per_batch, T]`` with
            ``("collector", "mask")``. Steps are collected `frames_per_batch` at a time and held back until their
            trajectory ends. When the budget is spent, open trajectories and an incomplete batch are discarded. With
            `replay_buffer` the number has no effect. After every `frames_per_batch` frames, one ``extend`` writes all
            trajectories that have ended, concatenated and unpadded.
        trajs_per_write: no effect: ended trajectories are written to the buffer after each batch. It requires
            `trajs_per_batch`.
        traj_format: ``"padded"``, the default, or ``"cat"``, which concatenates the trajectories of `trajs_per_batch`
            to ``[frames]``. No effect with `replay_buffer`.
        track_policy_version: whether every frame carries the version of the policy that acted, int64 under
            ``"policy_version"``. The version counts calls of `update_policy_weights_`.
        pre_collect_hook: called before every batch, without arguments.
        post_collect_hook: called on every batch in its delivered form, before it is written to a buffer.
        nonfinite: treatment of NaN or infinity in observations and rewards: ``"raise"``; ``"mark"`` them in
            ``("collector", "nonfinite")``; or ``"pass"``.
        progress: whether a progress bar is shown; without rich (extra `progress`), lines of text.

    Raises:
        InvalidArgumentError: an argument has a bad value; the message names both (also a ValueError).
        InvalidTypeError: an argument has another type, or the policy's parameters can't be matched with observations
            (also a TypeError).
        PolicyError: the policy's output does not fit the environment's action (also a RuntimeError).
        EnvironmentFailure, EnvironmentContractError: the environment's first reset failed.
        UnsupportedError: arguments exclude each other, or are not available on this machine; the message says which.
            In the first batch: ``policy_backend="native"``, and torch has to compute a module of the policy.
        MissingArgumentError: an argument requires another one; the message says which.

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
        policy_backend: Backend = "auto",
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
            settings.policy_backend,
        )
        policy = made_policy(policy, policy_factory)
        with made_env(create_env_fn, create_env_kwargs) as env:
            num_envs = max(1, torch.Size(env.batch_size).numel())
            budget = Budget(num_envs, frames_per_batch, total_frames, init_random_frames)
            collection, self.devices, moved_to = assemble(env, policy, recipe, prepared=registered(self))
            self.env, self.plan = collection.env, collection.plan
            self.policy, storing = self.plan.policy, self.devices.storing
            truncated = self.env.done_keys if settings.set_truncated else ()
            delivery = settings.delivery(collection, budget, storing, moved_to, truncated, progress)
            self._collect_extra = partial(delivery.collect_outside_budget, budget.extra_grant())
            super().__init__(settings, budget, delivery, weight_updater, policy)
        self._ready = True  # from here on `__del__` shuts the collector down

    def _abandoned(self) -> None:
        """Shut down, but leave the environment open if the user has stepped or reset it since the last batch."""
        self.shutdown(close_env=not self.plan.stepper.disturbed)

    def rollout(self) -> Any:
        """Return one full batch of the policy's actions outside the budget, even with a replay buffer.

        It counts against neither total nor random frames. The batch is post-processed, and trajectories continue from
        the last batch and into the next one.

        Raises:
            UnsupportedError: the collector has ``trajs_per_batch``.
            ClosedError: the collector was shut down.
            Exception: an error of the environment, the policy or post-processing. The batch is lost.
        """
        with self.pause():
            return self._collect_extra()

    @property
    def n_env(self) -> int:
        """Number of environments that step at once."""
        return self.source.num_envs

    @property
    def env_device(self) -> torch.device | None:
        """Device of the environment; None if it has no single device."""
        return self.devices.env

    @property
    def policy_device(self) -> torch.device | None:
        """Device that the policy was sent to; None if it stays on its device."""
        return self.devices.policy

    @property
    def storing_device(self) -> torch.device | None:
        """Device that batches are delivered on; None if they stay where they are collected."""
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
        """Call a method of the collector once for each entry of the lists, and return the list of results.

        Without any list the method is not called. An error of a call is raised at once.

        Args:
            method_name: name of the method.
            list_of_args: positional arguments of each call; None for none.
            list_of_kwargs: keyword arguments of each call; None for none.

        Raises:
            InvalidArgumentError: the lists have different lengths.
        """
        count = len(list_of_args or list_of_kwargs or ())
        args, kwargs = list_of_args or [()] * count, list_of_kwargs or [{}] * count
        if len(args) != len(kwargs):
            raise InvalidArgumentError(
                f"map_fn: expected as many of list_of_args as of list_of_kwargs, got {len(args)} and {len(kwargs)}"
            )
        method = getattr(self, method_name)
        return [method(*positional, **named) for positional, named in zip(args, kwargs, strict=True)]

    def repr_parts(self) -> dict[str, object]:
        """Return the environment, the policy and the budget."""
        return {"env": self.env, "policy": type(self.policy).__name__, **super().repr_parts()}
