"""The public collectors whose nodes are Ray actors, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl._arrays.devices import as_device, require_device
from gleanrl._process.ray import RayRuntime
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.native_policies import Backend
from gleanrl._util import flag, integer, positive
from gleanrl.collectors.base import SourceCollector
from gleanrl.collectors.build import is_placed
from gleanrl.collectors.config import Settings
from gleanrl.collectors.distributed.actor import NodeMaker
from gleanrl.collectors.distributed.arguments import (
    class_of,
    count_of,
    environments_of,
    keywords_of,
    makers_of_nodes,
    options_of_actors,
)
from gleanrl.collectors.distributed.asynchronous import AsynchronousNodes
from gleanrl.collectors.distributed.source import NodesConfig, NodeSource
from gleanrl.collectors.distributed.synchronous import SynchronousNodes
from gleanrl.collectors.multi import MultiaSyncDataCollector, WorkersCollector
from gleanrl.collectors.source import Budget
from gleanrl.collectors.weight_updaters import WeightUpdaterBase
from gleanrl.collectors.workers.arguments import each, following_of, timeouts_of
from gleanrl.collectors.workers.progress import Restarts
from gleanrl.collectors.workers.source import initialised
from gleanrl.data.replay_buffers.ray import RayReplayBuffer
from gleanrl.envs.exploration import ExplorationType
from gleanrl.errors import BatchSizeError, IndexRangeError, UnsupportedError


class RayCollector(SourceCollector):
    """Collect in Ray actors, each with its own collector, on this machine or on a cluster.

    A single machine needs no preparation. On a cluster, start the program on any machine with
    ``ray_init_config={"address": "auto"}``. All machines need the same Python environment. Environments and the policy
    are sent to the nodes with cloudpickle.

    A node on this machine lends the memory in which it collects, and each batch is copied once. Other nodes write each
    batch to Ray's object store once, and it is read from there once. Batches for a `RayReplayBuffer` bypass the
    learner, unless the collector post-processes them.

    The policy's weights are put into the object store once per version. They are compared with the last version at
    every handover. Every batch is collected with one version. The rules for sending them are the ones of
    `WorkersCollector`.

    An exception of the environment or the policy in a node is raised here. A node may be lost with its process or
    machine, or because it can't recover from the loss of workers. This raises `WorkerCrashedError`, and the
    collector ends. With ``on_worker_error="restart"`` a new node replaces it, on any machine with room, with its own
    seeds and trajectories. All other nodes continue meanwhile. The granted frames that a lost node had not delivered
    are counted as discarded (``"worker"``). It is unknown how many of them were collected.

    Args:
        create_env_fn: a callable that makes an environment, or an unused environment; or a list with an entry for each
            node. Entries may be lists with one value for each of the node's workers.
        policy: as in `SyncDataCollector`. Nodes have copies of it.
        policy_factory: a callable that makes the policy in each node, instead of `policy`; or a list of callables.
        frames_per_batch: frames of a batch.
        total_frames: frames to deliver; -1 or None for endless. The last batches may be shorter.
        device: default of `env_device` and `policy_device`; one for all nodes, or a list with one for each.
        storing_device: device that batches are delivered on, in this process; None for the CPU.
        env_device: device that environments are moved to, in the nodes.
        policy_device: device that policies run on, in the nodes.
        max_frames_per_traj: see `SyncDataCollector`. The same holds for `init_random_frames`, `reset_at_each_iter`,
            `postproc`, `split_trajs`, `exploration_type`, `replay_buffer`, `extend_buffer`, `trust_policy`,
            `policy_backend`, `no_cuda_sync`, `trajs_per_batch`, `trajs_per_write`, `traj_format`,
            `track_policy_version`, `pre_collect_hook`, `post_collect_hook`, `nonfinite` and `progress`.
        collector_class: the nodes' collector: ``"single"`` for `SyncDataCollector`, ``"sync"`` for
            `MultiSyncDataCollector`, ``"async"`` for `MultiaSyncDataCollector`; or one of these classes or a subclass.
        collector_kwargs: further keywords of the nodes' collectors, such as ``cat_results`` or ``create_env_kwargs``;
            or a list with a dictionary for each node.
        num_workers_per_collector: number of workers of each node, with ``"sync"`` and ``"async"``.
        sync: whether every batch has a share of each node, ``[nodes, *batch, T]``, and environments are not stepped
            between batches. Otherwise each batch comes from one node, ``[*batch, T]``, and nodes collect ahead.
        ray_init_config: arguments of `ray.init`, if Ray is not running yet. Without an address Ray starts on this
            machine, and ends with the last collector and buffer that use it.
        remote_configs: Ray options of the actors, such as ``num_cpus``, ``num_gpus``, ``memory`` or ``resources``; or a
            list with a dictionary for each node. The default is one CPU.
        num_collectors: number of nodes; None for the number of entries of `create_env_fn`.
        update_after_each_batch: whether the weights of `policy` are sent at every handover, regardless of earlier
            updates.
        max_weight_update_interval: maximum number of batches of a node between updates of its weights; -1 for no
            maximum.
        weight_updater: sends weights when `update_policy_weights_` is called, in place of the collector.
        on_worker_error: ``"raise"``, or ``"restart"``; for nodes, and for their workers.
        max_restarts: maximum number of replaced nodes during the collector's life, and of replaced workers in each
            node.
        timeouts: time limits for the start of nodes and for the steps of their workers; None for the defaults of
            `Timeouts`.

    Raises:
        MissingLibraryError: Ray is not installed. It is part of the extra ``ray``.
        InvalidArgumentError: an argument has a bad value; the message names it (also a ValueError).
        InvalidTypeError: an argument has another type (also a TypeError).
        LengthError: a list does not have one entry for each node (also a ValueError).
        SchemaError: the nodes' batches differ in their dimensions or done flags (also a RuntimeError).
        UnsupportedError: arguments exclude each other; the message says which.
        MissingArgumentError: an argument requires another one, or the number of nodes is unknown.
        WorkerError: the policy can't be pickled, or a node is lost at its start (also a RuntimeError).
        WorkerTimeoutError: a node did not start in time. The cluster may lack the resources of `remote_configs`.
        Exception: an error of a node's collector at its construction. All nodes have ended.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> collector = RayCollector(  # doctest: +SKIP
        ...     make_env, num_collectors=2, frames_per_batch=50, total_frames=100
        ... )
    """

    _ready = False
    _nodes: NodeSource
    _joined: int | None = None
    """How shares of a synchronous batch are joined; see `ShareLayout.dim`."""

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Any = None,
        storing_device: Any = None,
        env_device: Any = None,
        policy_device: Any = None,
        max_frames_per_traj: int | None = -1,
        init_random_frames: int | None = -1,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = False,
        exploration_type: InteractionType | str | None = ExplorationType.RANDOM,
        collector_class: Any = "single",
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        policy_backend: Backend = "auto",
        no_cuda_sync: bool | None = None,
        weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None = None,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: str | None = None,
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
        workers = positive("num_workers_per_collector", num_workers_per_collector)
        collector = class_of(collector_class, workers, sync)
        has_workers = issubclass(collector, WorkersCollector)
        frames = positive("frames_per_batch", frames_per_batch)
        interval = _interval_of(max_weight_update_interval, update_after_each_batch)
        restarts, patience = Restarts(on_worker_error, max_restarts), timeouts_of(timeouts)
        storing = require_device("storing_device", as_device(storing_device))
        count = count_of(create_env_fn, num_collectors)
        extra, options = keywords_of(collector_kwargs, count), options_of_actors(remote_configs, count)
        self._num_workers, self._collector = workers if has_workers else 0, collector
        environments = self._environments(create_env_fn, extra)
        keywords: dict[str, Any] = {
            "frames_per_batch": -(-frames // count) if sync else frames,
            "max_frames_per_traj": max_frames_per_traj,
            "reset_at_each_iter": reset_at_each_iter,
            "exploration_type": exploration_type,
            "trust_policy": trust_policy,
            "policy_backend": policy_backend,
            "no_cuda_sync": bool(no_cuda_sync),
            "track_policy_version": track_policy_version,
            "nonfinite": nonfinite,
        }
        if has_workers:
            keywords.update(on_worker_error=on_worker_error, max_restarts=max_restarts, timeouts=patience)
        devices = {
            "device": each("device", device, count),
            "env_device": each("env_device", env_device, count),
            "policy_device": each("policy_device", policy_device, count),
        }
        self._keywords = [
            {**keywords, **{name: values[number] for name, values in devices.items()}}
            for number in range(count)
        ]
        # Batches may stay in the object store only if this process neither changes nor reads them.
        seen = (storing, postproc, post_collect_hook, trajs_per_batch, split_trajs or None)
        by_reference = (
            isinstance(replay_buffer, RayReplayBuffer)
            and extend_buffer
            and not sync
            and all(one is None for one in seen)
        )
        # The workers of an asynchronous node collect ahead as well, up to two batches each.
        ahead = 2 * workers + 1 if issubclass(collector, MultiaSyncDataCollector) else 2
        moved = any(map(is_placed, devices["device"], devices["policy_device"]))
        self.policy = initialised(policy, _first(environments[0]))
        self._policies = self.policy, policy_factory
        self._sync = sync
        self._num_shared_blocks = 0 if by_reference else 1 if sync else ahead
        self._runtime = RayRuntime(ray_init_config)
        try:
            nodes_config = NodesConfig(
                self._makers(environments, extra, options),
                restarts,
                None if policy_factory is not None else self.policy,
                following_of(update_after_each_batch, moved),
                interval,
                patience.start_s,
                ahead,
                by_reference,
            )
            source = self._nodes = self._source(nodes_config)
            self._ready = True  # from here on `__del__` ends the nodes
            budget = Budget(source.num_envs, frames, total_frames, init_random_frames)
            source.lay_out(budget.steps_per_batch)
            delivery = settings.delivery(source, budget, storing, storing, progress=progress)
            super().__init__(settings, budget, delivery, weight_updater, policy)
        except BaseException:
            # Cleared first: if a second interrupt comes during the close, `__del__` finds nothing to shut down.
            ready, self._ready = self._ready, False
            if ready:
                with suppress(Exception):
                    # An error of closing would hide the first error, which is the cause.
                    self._nodes.close()
            self._runtime.release()
            raise

    def _source(self, nodes_config: NodesConfig) -> NodeSource:
        if self._sync:
            return SynchronousNodes(self._runtime, nodes_config, self._joined)
        return AsynchronousNodes(self._runtime, nodes_config)

    def _environments(self, create_env_fn: Any, extra: Sequence[dict[str, Any]]) -> list[Any]:
        kwargs = [one.pop("create_env_kwargs", None) for one in extra]
        return environments_of(create_env_fn, len(extra), self._num_workers, kwargs)

    def _makers(
        self,
        environments: Sequence[Any],
        extra: Sequence[Mapping[str, Any]],
        options: Sequence[Mapping[str, Any]],
    ) -> list[NodeMaker]:
        """Return the configs of nodes. Added nodes use the devices of the first nodes, in turn."""
        keywords = [
            {**self._keywords[number % len(self._keywords)], **more} for number, more in enumerate(extra)
        ]
        return makers_of_nodes(
            self._runtime.ray,
            self._collector,
            environments,
            keywords,
            self._policies,
            options,
            self._num_shared_blocks,
        )

    @property
    def num_workers(self) -> int:
        """Number of nodes."""
        return self._nodes.num_nodes

    def local_policy(self) -> Any:
        """Return the policy whose weights are sent to the nodes."""
        return self.policy

    def remote_collectors(self) -> list[Any]:
        """Return the nodes' Ray actors; None for a node that has ended or waits for its restart."""
        return list(self._nodes.controller.actors)

    def stop_remote_collectors(self) -> None:
        """End the nodes, and the collector with them. Ray keeps running until `shutdown`.

        Background collection is stopped first. If that raises its exception, the nodes don't end.
        """
        self.closed = True
        self.stop()
        self._nodes.end()

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Any = None,
        remote_configs: Any = None,
    ) -> None:
        """Start further nodes.

        Args:
            create_env_fn: for one node, or a list with one entry for each of several nodes.
            num_envs: number of workers of each node. It must equal the present nodes' number.
            policy: the present nodes' policy, or None.
            collector_kwargs: see the constructor.
            remote_configs: see the constructor.

        Raises:
            UnsupportedError: the collector is synchronous or delivers whole trajectories, or the policy or the number
                of workers differs.
            ClosedError: the nodes have ended.
            Exception: the errors of the constructor. No node was added.
        """
        if self._sync or self.settings.trajs_per_batch is not None:
            raise UnsupportedError(
                "add_collectors: batches with a share of each node, and whole trajectories, need a fixed number of "
                "nodes; make a new collector"
            )
        if policy not in (None, self.policy) or num_envs not in (None, max(self._num_workers, 1)):
            raise UnsupportedError(
                "add_collectors: all nodes share one policy and have equally many workers; leave policy and num_envs "
                "out, or make a new collector"
            )
        with self.pause():
            several = isinstance(create_env_fn, (list, tuple))
            count = len(create_env_fn) if several else 1
            extra, options = keywords_of(collector_kwargs, count), options_of_actors(remote_configs, count)
            self._nodes.add(self._makers(self._environments(create_env_fn, extra), extra, options))

    def repr_parts(self) -> dict[str, object]:
        """Return the nodes and the budget."""
        return {"num_collectors": self.num_workers, **super().repr_parts()}


def _interval_of(max_weight_update_interval: Any, update_after_each_batch: bool) -> int | None:
    """Return the maximum number of batches between weight updates; None for no maximum."""
    interval = integer("max_weight_update_interval", max_weight_update_interval, -1)
    if interval == -1:
        return None
    if update_after_each_batch:
        raise UnsupportedError(
            "update_after_each_batch: it sends weights at every handover; leave out max_weight_update_interval"
        )
    return interval


def _first(environment: Any) -> Any:
    return environment[0] if isinstance(environment, list) else environment


class DistributedDataCollector(RayCollector):
    """A `RayCollector` with a node for each entry of `create_env_fn`.

    Ray places the nodes: on this machine, or with ``ray_init_config={"address": "auto"}`` on its cluster.

    Args:
        create_env_fn: a list with an entry for each node.
        policy: see `RayCollector`.
        frames_per_batch: frames of a batch; with `sync` a multiple of the number of nodes.
        sync: see `RayCollector`.
        **keywords: see `RayCollector`.

    Raises:
        BatchSizeError: the frames can't be divided among the nodes (also a RuntimeError).
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        frames_per_batch: int,
        sync: bool = False,
        **keywords: Any,
    ) -> None:
        if flag("sync", sync):
            _require_even(create_env_fn, keywords, frames_per_batch=frames_per_batch)
        super().__init__(create_env_fn, policy, frames_per_batch=frames_per_batch, sync=sync, **keywords)

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: Any = None,
        worker_rank: int | None = None,
        **named: Any,
    ) -> None:
        """Send weights to the nodes; see `SyncDataCollector`.

        Args:
            policy_or_weights: see `SyncDataCollector`.
            worker_ids: indices of nodes, from 0; None for all.
            worker_rank: one node, counted from 1 as ranks of torch.distributed; it replaces `worker_ids`.
            **named: see `SyncDataCollector`.

        Raises:
            IndexRangeError: there is no such node.
        """
        if worker_rank is not None:
            if worker_rank < 1:
                raise IndexRangeError(f"worker_rank: expected 1 or more, got {worker_rank}")
            worker_ids = worker_rank - 1
        super().update_policy_weights_(policy_or_weights, worker_ids=worker_ids, **named)


class DistributedSyncDataCollector(RayCollector):
    """A `RayCollector` whose batches have a share of each node. The environments are not stepped between two batches.

    Args:
        create_env_fn: a list with an entry for each node.
        policy: see `RayCollector`.
        frames_per_batch: frames of a batch; a multiple of the number of nodes.
        total_frames: frames to deliver, also a multiple of the number of nodes; -1 or None for endless.
        update_interval: number of batches between two updates with the policy's current weights.
        **keywords: see `RayCollector`.

    Raises:
        BatchSizeError: the frames can't be divided among the nodes (also a RuntimeError).
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int | None = -1,
        update_interval: int = 1,
        **keywords: Any,
    ) -> None:
        frames = {"frames_per_batch": frames_per_batch}
        if total_frames is not None and total_frames > 0:
            frames["total_frames"] = total_frames
        _require_even(create_env_fn, keywords, **frames)
        interval = positive("update_interval", update_interval)
        if interval > 1:
            keywords["max_weight_update_interval"] = interval
        super().__init__(
            create_env_fn,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            sync=True,
            **keywords,
        )
        if interval > 1:
            self.source.stop_following()


class RPCDataCollector(RayCollector):
    """A `RayCollector` with a node for each entry of `create_env_fn`.

    With `sync`, the shares of the nodes are concatenated in dimension 0.

    Args:
        create_env_fn: a list with an entry for each node.
        policy: see `RayCollector`.
        **keywords: see `RayCollector`.
    """

    _joined = 0

    def __init__(self, create_env_fn: Sequence[Any], policy: Any = None, **keywords: Any) -> None:
        super().__init__(create_env_fn, policy, **keywords)

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        worker_ids: Any = None,
        workers: Any = None,
        wait: bool = True,
        **named: Any,
    ) -> None:
        """Send weights to the nodes; see `SyncDataCollector`.

        Args:
            policy_or_weights: see `SyncDataCollector`.
            worker_ids: indices of nodes; None for all.
            workers: another name of `worker_ids`, which has precedence.
            wait: no effect: every batch that a node begins from now on is collected with these weights.
            **named: see `SyncDataCollector`.
        """
        super().update_policy_weights_(
            policy_or_weights, worker_ids=workers if worker_ids is None else worker_ids, **named
        )


def _require_even(create_env_fn: Any, keywords: dict[str, Any], **frames: int) -> None:
    """Raise an error unless the frames can be divided among the nodes."""
    count = keywords.get("num_collectors") or (
        len(create_env_fn) if isinstance(create_env_fn, Sequence) else 1
    )
    for name, value in frames.items():
        if positive(name, value) % count:
            raise BatchSizeError(
                f"{name}={value} can't be divided among {count} nodes; use a multiple of {count}"
            )
