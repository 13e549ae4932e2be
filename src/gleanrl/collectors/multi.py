"""The public collectors whose environments and policies are in worker processes.

One name for the collectors with workers, synchronous or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl._process.worker import Timeouts
from gleanrl._util import integer, optional_callable, positive
from gleanrl.collectors.base import Setting, SourceCollector, shown
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
from gleanrl.collectors.workers.controller import Team
from gleanrl.collectors.workers.progress import Restarts
from gleanrl.collectors.workers.source import CrewSource, initialised
from gleanrl.collectors.workers.synchronous import SynchronousSource
from gleanrl.collectors.workers.worker import CollectorMaker
from gleanrl.envs.exploration import ExplorationType
from gleanrl.envs.vector.base import ThreadCap
from gleanrl.errors import InvalidArgumentError, LengthError, MissingArgumentError, UnsupportedError


class WorkersCollector(SourceCollector):
    """Abstract: collects in worker processes, one for each entry of `create_env_fn`.

    The workers start with the collector: forked from a clean process that has imported torch once, they never import
    your program's main module, which needs no ``if __name__ == "__main__"``. Environments and policy reach them by
    cloudpickle. They end with `shutdown`, with the last reference, or with your program, however that ends. Linux only.

    Each worker writes its steps into memory that it shares with this process, where they are copied once into the batch
    that is handed out; with ``replay_buffer=`` and nothing in between, from there into the buffer.

    The policy's weights go to the workers through shared memory, whole or not at all, and every share is collected with
    one version of them. Without `policy_device` those of `policy` are sent at every hand-over of a batch; with it until
    the first call of `update_policy_weights_`. Once that was given weights, workers get what it is given.

    `reset` and `set_seed` discard what workers have collected ahead. `set_seed` also seeds what policies draw with:
    the global generators of torch, NumPy and Python in each worker.

    What an environment or the policy raises in a worker is raised here, as the same type where that is possible, with
    the worker's traceback as its cause; the next batch begins with a reset there. A worker that ends by itself (a
    signal, say) or stays at one step for longer than `timeouts` allow is a `WorkerCrashedError` or
    `WorkerTimeoutError`, and the collector ends; with ``on_worker_error="restart"`` another worker takes its place,
    with seeds and trajectories of its own. Steps that a lost worker had made since its last share are counted as
    discarded; of its trajectories under way no further frame comes.

    Args:
        create_env_fn: a list with, for each worker, a callable that makes an environment, or an environment that nobody
            has used; the same one several times gives each worker its own.
        policy: as in `SyncDataCollector`. Workers have copies of it.
        num_workers: how many workers there are, where `create_env_fn` is no list.
        policy_factory: a callable that makes the policy in each worker, instead of `policy`; or a list of them.
        frames_per_batch: frames of a batch; or a list of each worker's, all the same.
        total_frames: frames to deliver; -1 or None for endless. The last batches are short if need be.
        device: fills whichever of the following devices are unset; like them, one for all or a list with one for each
            worker.
        storing_device: where batches are delivered; the CPU where workers' differ.
        env_device: where environments are moved to.
        policy_device: where policies run.
        create_env_kwargs: keyword arguments for `create_env_fn`, for all or a list with one for each.
        collector_class: no effect: every worker collects as a `SyncDataCollector` does, and nothing else can be named.
        init_fn: called in each worker, without arguments, before its environment is made.
        max_frames_per_traj: see `SyncDataCollector`; so for `init_random_frames`, `reset_at_each_iter`, `postproc`,
            `split_trajs`, `exploration_type`, `exploration_mode`, `reset_when_done`, `set_truncated` (the last step of
            every worker's share), `use_buffers`, `replay_buffer`, `extend_buffer`, `trust_policy`, `compile_policy`,
            `cudagraph_policy`, `no_cuda_sync`, `trajs_per_batch`,
            `trajs_per_write`, `traj_format`, `track_policy_version`, `pre_collect_hook`,
            `post_collect_hook`, `nonfinite` and `progress`.
        update_at_each_batch: whether the weights of `policy` are sent at every hand-over, whatever was sent before.
        preemptive_threshold: the part of the workers, in ``[0, 1]``, that have to be ready to end the shares of the
            others after the step at hand; None to wait for all.
        num_threads: torch threads of this process while the collector lives; None for as many as it has, less one for
            each worker, at least one.
        num_sub_threads: torch threads of each worker.
        cat_results: how the workers' shares make a batch; see `MultiSyncDataCollector`.
        weight_updater: sends weights when `update_policy_weights_` is called, in place of the collector.
        on_worker_error: ``"raise"``, or ``"restart"``.
        max_restarts: workers that may be made anew in the collector's life.
        timeouts: how long workers may take; None for the defaults of `Timeouts`.

    Raises:
        InvalidArgumentError: for a bad value; it names the argument (also a ValueError).
        InvalidTypeError: for an argument of another type (also a TypeError).
        LengthError: if a list hasn't one entry for each worker (also a RuntimeError).
        SchemaError: if the workers' environments differ in their columns (also a RuntimeError).
        UnsupportedError: for arguments that can't work together, or not on this machine; it says which.
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
                f"collector_class: workers collect as SyncDataCollector does, not as {collector_class!r}; an entry of "
                "create_env_fn may be a ParallelEnv, with processes of its own"
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
            CollectorMaker(factory, given, own, Numbering(worker, count), self._num_slots, prepare=prepare)
            for worker, (factory, given, own) in enumerate(parts)
        ]
        team = Team(
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
            source = self._crew = self._made_source(team, dim)
            self._ready = True  # from here on the last reference's end ends the workers
            budget = Budget(source.num_envs, frames, total_frames, init_random_frames)
            source.lay_out(budget.steps_per_batch)
            storing = source.description.storing
            handover = settings.handover(source, budget, storing, _storing(source), progress=progress)
            super().__init__(settings, budget, handover, weight_updater, policy)
        except BaseException:
            ready, self._ready = self._ready, False  # at first: a second interrupt may come while it closes
            try:
                self._cap.lift()
            finally:
                if ready:
                    with suppress(Exception):  # the first error is the cause
                        self._crew.close()
            raise

    _ready = False
    _crew: CrewSource

    @abstractmethod
    def _made_source(self, team: Team, dim: int | None) -> CrewSource:
        """Return what starts the workers."""

    def _dim_of(self, settings: Settings) -> int | None:
        """Return how shares make a batch; see `Arrangement.dim`."""
        return arrangement_dim(settings.cat_results)

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._crew.num_workers

    @property
    def processes(self) -> list[int]:
        """The workers' process numbers."""
        return self._crew.dispatcher.processes

    def frames_per_batch_worker(self, worker_idx: int | None = None) -> int:
        """Return the frames of a worker's share of a full batch.

        Args:
            worker_idx: its number; None for the first one.
        """
        crew = self._crew
        return crew.width * crew.steps(self.frames_per_batch // crew.num_envs)[worker_idx or 0]

    def _close(self, close_env: bool) -> None:
        super()._close(close_env)
        self._cap.lift()

    def __repr__(self) -> str:
        """Show the workers and the budget."""
        return shown(self, f"num_workers={self.num_workers}")


class MultiSyncDataCollector(WorkersCollector):
    """Collects in several processes at once: every batch has a share of each worker, in worker order.

    Nothing is stepped between two batches. With B workers, each of a single environment or a batch of P, shapes are:

    ==============  ==================  ======================
    `cat_results`   single environment  batch of P
    ==============  ==================  ======================
    ``"stack"``     ``[B, T]``          ``[B, P, T]``
    ``0``           ``[B * T]``         ``[B * P, T]``
    ``-1``          ``[B * T]``         ``[P, B * T]``
    ==============  ==================  ======================

    ``"stack"``, the default, and ``0`` with batches of environments round `frames_per_batch` up to a multiple of all
    environments; otherwise shares may differ by a step. With `preemptive_threshold`, steps that weren't made are cut
    out, or, in stacks, False in ``("collector", "mask")``, zero, and of no trajectory (id -1).

    A `replay_buffer` whose storage has one dimension gets the shares one behind the other, as ``0`` says, unless
    `cat_results` is given, or a `postproc`: that gets stacks, where nothing of one worker follows another's.

    See `WorkersCollector` for the arguments.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = MultiSyncDataCollector([make_env] * 2, frames_per_batch=50, total_frames=100)
        >>> [batch["next", "reward"].shape for batch in collector]
        [torch.Size([2, 25, 1]), torch.Size([2, 25, 1])]
    """

    def _dim_of(self, settings: Settings) -> int | None:
        feed = settings.feed if settings.postproc is None else None
        in_a_row = settings.cat_results is None and feed is not None and feed.slot_dims == 1
        return 0 if in_a_row else super()._dim_of(settings)

    def _made_source(self, team: Team, dim: int | None) -> CrewSource:
        return SynchronousSource(team, dim)


class MultiaSyncDataCollector(WorkersCollector):
    """Collects in several processes, each at its own pace: every batch is one worker's, ``[*batch, T]``.

    Workers collect ahead: while one batch of a worker waits or is copied, the next one is collected. So batches are of
    weights up to two batches of the worker old; see ``track_policy_version``. With `preemptive_threshold` a worker's
    batch ends early once that part of the others have finished one since it began.

    See `WorkersCollector` for the arguments; `cat_results` has nothing to put together.

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
                f"cat_results: {settings.cat_results!r} isn't for batches of one worker each; leave it out"
            )
        return None

    def _made_source(self, team: Team, dim: int | None) -> CrewSource:
        return AsynchronousSource(team)


class aSyncDataCollector(MultiaSyncDataCollector):
    """A `MultiaSyncDataCollector` of one worker: it collects while the learner learns.

    Args:
        create_env_fn: a callable that makes the environment, or one that nobody has used.
        policy: see `WorkersCollector`.
        **kwargs: see there.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = aSyncDataCollector(make_env, frames_per_batch=50, total_frames=100)
        >>> sum(batch.numel() for batch in collector)
        100
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any) -> None:
        given = create_env_fn if isinstance(create_env_fn, (list, tuple)) else [create_env_fn]
        if len(given) != 1:
            raise LengthError(f"create_env_fn: expected one, got {len(given)}; use MultiaSyncDataCollector")
        super().__init__(given, policy, **kwargs)


def _storing(source: CrewSource) -> torch.device | None:
    """Return where batches have to be moved; None for where they are, on the CPU."""
    places = {str(found.storing) for found in source.dispatcher.descriptions}
    storing = source.description.storing
    return storing if len(places) == 1 and storing is not None and storing.type != "cpu" else None


def _cap_of(num_threads: Any, num_workers: int) -> ThreadCap:
    """Return what bounds the torch threads of this process."""
    if num_threads is None:
        return ThreadCap(max(1, torch.get_num_threads() - num_workers))
    return ThreadCap(positive("num_threads", num_threads))


class MultiCollector(ABC):  # noqa: B024 - it's abstract as nothing is made of it
    """Makes a `MultiSyncDataCollector` or a `MultiaSyncDataCollector`; both are instances of it.

    Args:
        create_env_fn: see `WorkersCollector`.
        policy: see there.
        sync: whether every batch has a share of each worker; else each batch is one worker's.
        **kwargs: see there.

    Raises:
        MissingArgumentError: `sync` wasn't given.

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
