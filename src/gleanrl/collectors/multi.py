"""The public collectors that run environments and policies in worker processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl._process.worker import Timeouts
from gleanrl._rollout.native_policies import Backend
from gleanrl._util import integer, optional_callable, positive
from gleanrl.collectors.base import Setting, SourceCollector
from gleanrl.collectors.build import CollectorConfig
from gleanrl.collectors.config import Settings
from gleanrl.collectors.frame_accounting import Numbering
from gleanrl.collectors.single import SyncDataCollector
from gleanrl.collectors.source import Budget
from gleanrl.collectors.weight_updaters import WeightUpdaterBase
from gleanrl.collectors.workers.arguments import (
    enough_of,
    following_of,
    frames_of,
    makers_of,
    policies_of,
    recipes_of,
    timeouts_of,
)
from gleanrl.collectors.workers.asynchronous import AsynchronousSource
from gleanrl.collectors.workers.batching import arrangement_dim
from gleanrl.collectors.workers.controller import PoolConfig
from gleanrl.collectors.workers.progress import Restarts
from gleanrl.collectors.workers.source import WorkerSource, initialised
from gleanrl.collectors.workers.synchronous import SynchronousSource
from gleanrl.collectors.workers.worker import CollectorMaker
from gleanrl.envs.exploration import ExplorationType
from gleanrl.envs.vector.base import ThreadCap
from gleanrl.errors import InvalidArgumentError, LengthError, MissingArgumentError, UnsupportedError


class WorkersCollector(SourceCollector):
    """Abstract collector with worker processes, one for each entry of `create_env_fn`.

    The workers start with the collector. They are forked from a clean process that has imported torch once and never
    imports your program's main module. Programs therefore need no ``if __name__ == "__main__"``. Environments and
    policy are sent to the workers with cloudpickle. The workers end with `shutdown`, with the last reference to the
    collector, or with your program, even if it is killed. Linux only.

    Each worker writes its steps into memory shared with this process. They are copied once, into the delivered batch.
    With ``replay_buffer=`` and no post-processing they are copied from shared memory directly into the buffer.

    The policy's weights are sent to the workers through shared memory, all or none. Every share of a batch is collected
    with one version of the weights. Without `policy_device`, the current weights of `policy` are sent at every handover
    of a batch. With `policy_device`, that ends at the first call of `update_policy_weights_`. In both cases it ends
    once that method was given weights: from then on workers get only such weights.

    `reset` and `set_seed` discard frames that workers have collected ahead. `set_seed` also seeds the generators that
    policies draw from: the global ones of torch, NumPy and Python in each worker.

    An exception of the environment or the policy in a worker is raised here, with the same type if possible. The
    worker's traceback is its cause. That worker's next share begins with a reset.

    A worker may die, for example from a signal, or exceed `timeouts` in one step. This raises `WorkerCrashedError` or
    `WorkerTimeoutError`, and the collector ends. With ``on_worker_error="restart"`` a new worker replaces it, with its
    own seeds and trajectories. Steps of the lost worker since its last share are counted as discarded, and its open
    trajectories get no further frames.

    Args:
        create_env_fn: a list with one entry for each worker: a callable that makes an environment, an unused
            environment, or the name of a gymnasium environment. A repeated entry gives each worker its own environment.
        policy: as in `SyncDataCollector`. Workers have copies of it.
        num_workers: number of workers, if `create_env_fn` is not a list.
        policy_factory: a callable that makes the policy in each worker, instead of `policy`; or a list of callables.
        frames_per_batch: frames of a batch; or a list of each worker's frames, which must be equal.
        total_frames: frames to deliver; -1 or None for endless. The last batches may be shorter.
        device: default of the following devices. Each device is one for all workers, or a list with one for each
            worker.
        storing_device: device that batches are delivered on; the CPU if the workers' devices differ.
        env_device: device that environments are moved to.
        policy_device: device that policies run on.
        create_env_kwargs: keyword arguments for `create_env_fn`, for all workers or a list with one entry for each.
        collector_class: must be None or `SyncDataCollector`: every worker collects as that class does.
        init_fn: called in each worker, without arguments, before its environment is made.
        max_frames_per_traj: see `SyncDataCollector`. The same holds for `init_random_frames`, `reset_at_each_iter`,
            `postproc`, `split_trajs`, `exploration_type`, `exploration_mode`, `reset_when_done`, `use_buffers`,
            `replay_buffer`, `extend_buffer`, `trust_policy`, `compile_policy`, `cudagraph_policy`, `policy_backend`,
            `no_cuda_sync`, `trajs_per_batch`, `trajs_per_write`, `traj_format`, `track_policy_version`,
            `pre_collect_hook`, `post_collect_hook`, `nonfinite` and `progress`.
        set_truncated: whether the last step of every worker's share is marked as truncated.
        update_at_each_batch: whether the weights of `policy` are sent at every handover, regardless of earlier updates.
        preemptive_threshold: fraction of the workers, in ``[0, 1]``. Once that many are ready, all other shares end
            after their current step. None waits for all workers.
        num_threads: torch threads of this process while the collector is open. None takes the current number less one
            for each worker, but at least one.
        num_sub_threads: torch threads of each worker.
        cat_results: how the workers' shares are joined into a batch; see `MultiSyncDataCollector`.
        weight_updater: sends weights when `update_policy_weights_` is called, in place of the collector.
        on_worker_error: ``"raise"``, or ``"restart"``.
        max_restarts: maximum number of replaced workers during the collector's life.
        timeouts: time limits of the workers; None for the defaults of `Timeouts`.

    Raises:
        InvalidArgumentError: an argument has a bad value; the message names it (also a ValueError).
        InvalidTypeError: an argument has another type (also a TypeError).
        LengthError: a list does not have one entry for each worker (also a RuntimeError).
        SchemaError: the workers' environments differ in their columns (also a RuntimeError).
        UnsupportedError: arguments exclude each other, or are not available on this machine; the message says which.
        MissingArgumentError: an argument requires another one; the message says which.
        WorkerError: the policy can't be pickled, or a worker is lost or too slow at its start (also a RuntimeError).
        CapacityError: this process can't have so many workers or so much shared memory (also a RuntimeError).
        OSError: no process can be started.
        Exception: an error of the environment's or the policy's construction in a worker. All workers have ended.
    """

    cat_results = Setting()
    preemptive_threshold = Setting()
    update_at_each_batch = Setting()
    _num_slots = 1

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        num_workers: int | None = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | Sequence[int],
        total_frames: int | None = -1,
        device: Any = None,
        storing_device: Any = None,
        env_device: Any = None,
        policy_device: Any = None,
        create_env_kwargs: Any = None,
        collector_class: Any = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | str | None = ExplorationType.RANDOM,
        exploration_mode: str | None = None,
        reset_when_done: bool = True,
        update_at_each_batch: bool = False,
        preemptive_threshold: float | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        cat_results: str | int | None = None,
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
        init_fn: Callable[[], Any] | None = None,
        track_policy_version: bool = False,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDictBase], Any] | None = None,
        nonfinite: str = "raise",
        on_worker_error: str = "raise",
        max_restarts: int = 10,
        timeouts: Timeouts | None = None,
        progress: bool = False,
    ) -> None:
        settings = Settings.of(locals())
        if collector_class not in (None, SyncDataCollector):
            raise UnsupportedError(
                f"collector_class: expected SyncDataCollector or None, got {collector_class!r}; for more processes "
                "in a worker, pass a ParallelEnv in create_env_fn"
            )
        factories = makers_of(create_env_fn, create_env_kwargs, num_workers)
        count = len(factories)
        frames = frames_of(frames_per_batch, count, shared=self._num_slots == 1)
        if total_frames is not None and integer("total_frames", total_frames) == 0:
            raise InvalidArgumentError("total_frames: expected a positive integer, or -1 for endless, got 0")
        recipe = CollectorConfig(
            settings.options(),
            set_truncated=settings.set_truncated,
            trust_policy=bool(trust_policy),
            compile_policy=compile_policy,
            cudagraph_policy=cudagraph_policy,
            policy_backend=settings.policy_backend,
        )
        recipes = recipes_of(
            recipe,
            count,
            device=device,
            env_device=env_device,
            policy_device=policy_device,
            storing_device=storing_device,
        )
        dim, prepare = self._dim_of(settings), optional_callable("init_fn", init_fn)
        policy = initialised(policy, factories[0])
        placed = [own.places_policy for own in recipes]
        parts = zip(factories, policies_of(policy, policy_factory, placed), recipes, strict=True)
        makers = [
            CollectorMaker(factory, pickled, own, Numbering(worker, count), self._num_slots, prepare=prepare)
            for worker, (factory, pickled, own) in enumerate(parts)
        ]
        pool_config = PoolConfig(
            makers,
            timeouts_of(timeouts),
            positive("num_sub_threads", num_sub_threads),
            Restarts(on_worker_error, max_restarts),
            None if policy_factory is not None else policy,
            following_of(update_at_each_batch, any(placed)),
            enough_of(preemptive_threshold, count),
            settings.set_truncated,
        )
        self._cap = _cap_of(num_threads, count)
        self._cap.apply()
        try:
            source = self._worker_source = self._made_source(pool_config, dim)
            self._ready = True  # from here on `__del__` ends the workers
            budget = Budget(source.num_envs, frames, total_frames, init_random_frames)
            source.lay_out(budget.steps_per_batch)
            storing = source.description.storing
            delivery = settings.delivery(source, budget, storing, _storing(source), progress=progress)
            super().__init__(settings, budget, delivery, weight_updater, policy)
        except BaseException:
            # Cleared first: if a second interrupt comes during the close, `__del__` finds nothing to shut down.
            ready, self._ready = self._ready, False
            try:
                self._cap.lift()
            finally:
                if ready:
                    with suppress(Exception):
                        # An error of closing would hide the first error, which is the cause.
                        self._worker_source.close()
            raise

    _ready = False
    _worker_source: WorkerSource

    @abstractmethod
    def _made_source(self, pool_config: PoolConfig, dim: int | None) -> WorkerSource:
        """Return the source, which starts the workers."""

    def _dim_of(self, settings: Settings) -> int | None:
        """Return the dimension that joins shares into a batch; see `ShareLayout.dim`."""
        return arrangement_dim(settings.cat_results)

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self._worker_source.num_workers

    @property
    def processes(self) -> list[int]:
        """The workers' process ids, in worker order. A replaced worker has a new one."""
        return self._worker_source.controller.processes

    def frames_per_batch_worker(self, worker_idx: int | None = None) -> int:
        """Return the number of frames of a worker's share of a full batch.

        Args:
            worker_idx: index of the worker; None for the first one.
        """
        source = self._worker_source
        return source.width * source.steps(self.frames_per_batch // source.num_envs)[worker_idx or 0]

    def _close(self, close_env: bool) -> None:
        super()._close(close_env)
        self._cap.lift()

    def repr_parts(self) -> dict[str, object]:
        """Return the workers and the budget."""
        return {"num_workers": self.num_workers, **super().repr_parts()}


class MultiSyncDataCollector(WorkersCollector):
    """Collect in several processes at once. Every batch has a share of each worker, in worker order.

    The environments are not stepped between two batches. With B workers, each with a single environment or a batch of
    P, batches have these shapes:

    ==============  ==================  ======================
    `cat_results`   single environment  batch of P
    ==============  ==================  ======================
    ``"stack"``     ``[B, T]``          ``[B, P, T]``
    ``0``           ``[B * T]``         ``[B * P, T]``
    ``-1``          ``[B * T]``         ``[P, B * T]``
    ==============  ==================  ======================

    ``"stack"`` is the default. It rounds `frames_per_batch` up to a multiple of all environments, and so does ``0``
    with batches of environments. Otherwise shares may differ by a step. With `preemptive_threshold`, missing steps are
    cut out. In stacks they are kept instead: zero, with False in ``("collector", "mask")``, and of no trajectory (id
    -1).

    The default is ``0`` with a `replay_buffer` whose storage has one dimension and without a `postproc`. A `postproc`
    gets stacks, where no step of one worker follows a step of another.

    See `WorkersCollector` for the arguments.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = MultiSyncDataCollector([make_env] * 2, frames_per_batch=50, total_frames=100)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([2, 25, 1]), torch.Size([2, 25, 1])]
    """

    def _dim_of(self, settings: Settings) -> int | None:
        sink = settings.sink if settings.postproc is None else None
        in_a_row = settings.cat_results is None and sink is not None and sink.slot_dims == 1
        return 0 if in_a_row else super()._dim_of(settings)

    def _made_source(self, pool_config: PoolConfig, dim: int | None) -> WorkerSource:
        return SynchronousSource(pool_config, dim)


class MultiaSyncDataCollector(WorkersCollector):
    """Collect in several processes, each at its own pace. Every batch comes from one worker, ``[*batch, T]``.

    Workers collect ahead: while one batch of a worker waits or is copied, the worker collects the next one. The weights
    of a batch may therefore be up to two of the worker's batches old; see ``track_policy_version``.

    With `preemptive_threshold`, a worker's batch ends early. This happens once that fraction of the other workers have
    finished a batch since it began.

    See `WorkersCollector` for the arguments. Leave `cat_results` out: there are no shares to join.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = MultiaSyncDataCollector([make_env] * 2, frames_per_batch=50, total_frames=100)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([50, 1]), torch.Size([50, 1])]
    """

    _num_slots = 2

    def _dim_of(self, settings: Settings) -> int | None:
        if settings.cat_results not in (None, "stack"):
            raise InvalidArgumentError(
                f"cat_results: expected None, got {settings.cat_results!r}; each batch comes from one worker: "
                "leave it out"
            )
        return None

    def _made_source(self, pool_config: PoolConfig, dim: int | None) -> WorkerSource:
        return AsynchronousSource(pool_config)


class aSyncDataCollector(MultiaSyncDataCollector):
    """A `MultiaSyncDataCollector` with one worker, which collects while the learner trains.

    Args:
        create_env_fn: a callable that makes the environment, or an unused environment; or a list with one entry.
        policy: see `WorkersCollector`.
        **kwargs: see `WorkersCollector`.

    Raises:
        LengthError: `create_env_fn` is a list with another length.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = aSyncDataCollector(make_env, frames_per_batch=50, total_frames=100)
        >>> sum(batch.numel() for batch in collector)
        100
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any) -> None:
        factories = create_env_fn if isinstance(create_env_fn, (list, tuple)) else [create_env_fn]
        if len(factories) != 1:
            raise LengthError(
                f"create_env_fn: expected one, got {len(factories)}; use MultiaSyncDataCollector for several workers"
            )
        super().__init__(factories, policy, **kwargs)


def _storing(source: WorkerSource) -> torch.device | None:
    """Return the device that batches have to be moved to; None for the CPU, or if the workers' devices differ."""
    places = {str(found.storing) for found in source.controller.descriptions}
    storing = source.description.storing
    return storing if len(places) == 1 and storing is not None and storing.type != "cpu" else None


def _cap_of(num_threads: Any, num_workers: int) -> ThreadCap:
    """Return the limit of torch threads in this process."""
    if num_threads is None:
        return ThreadCap(max(1, torch.get_num_threads() - num_workers))
    return ThreadCap(positive("num_threads", num_threads))


class MultiCollector(ABC):  # noqa: B024 - abstract, because it is never instantiated itself
    """Make a `MultiSyncDataCollector` or a `MultiaSyncDataCollector`; both are instances of this class.

    Args:
        create_env_fn: see `WorkersCollector`.
        policy: see `WorkersCollector`.
        sync: whether every batch has a share of each worker. Otherwise each batch comes from one worker.
        **kwargs: see `WorkersCollector`.

    Raises:
        MissingArgumentError: `sync` was not passed.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = MultiCollector([make_env] * 2, sync=True, frames_per_batch=50, total_frames=100)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([2, 25, 1]), torch.Size([2, 25, 1])]
    """

    def __new__(
        cls, create_env_fn: Any, policy: Any = None, *, sync: bool | None = None, **kwargs: Any
    ) -> Any:
        """Make the collector."""
        if sync is None:
            raise MissingArgumentError(
                "sync: expected True for batches of all workers (MultiSyncDataCollector), or False for batches of one "
                "worker each (MultiaSyncDataCollector)"
            )
        if sync:
            return MultiSyncDataCollector(create_env_fn, policy, **kwargs)
        return MultiaSyncDataCollector(create_env_fn, policy, **kwargs)


MultiCollector.register(WorkersCollector)  # type: ignore[type-abstract]
