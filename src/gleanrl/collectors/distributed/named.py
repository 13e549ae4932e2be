"""Other names of the collector on Ray, whose programs were written for torch.distributed and torch RPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gleanrl.arguments import flag, positive
from gleanrl.collectors.distributed.ray_collector import RayCollector
from gleanrl.errors import BatchSizeError, IndexRangeError


class DistributedDataCollector(RayCollector):
    """A `RayCollector` with a node for each entry of `create_env_fn`.

    Nodes are placed by Ray: on this machine, or, with ``ray_init_config={"address": "auto"}``, on those of its cluster.

    Args:
        create_env_fn: a list with an entry for each node.
        policy: see `RayCollector`.
        frames_per_batch: frames of a batch; with `sync` a multiple of the number of nodes.
        sync: see `RayCollector`.
        **keywords: see there.

    Raises:
        BatchSizeError: frames that can't be divided among the nodes (also a RuntimeError).
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
            policy_or_weights: see there.
            worker_ids: numbers of nodes, from 0; None for all.
            worker_rank: one node, counted from 1, as it was in torch.distributed.
            **named: see there.

        Raises:
            IndexRangeError: there is no such node.
        """
        if worker_rank is not None:
            if worker_rank < 1:
                raise IndexRangeError(f"worker_rank: expected 1 or more, got {worker_rank}")
            worker_ids = worker_rank - 1
        super().update_policy_weights_(policy_or_weights, worker_ids=worker_ids, **named)


class DistributedSyncDataCollector(RayCollector):
    """A `RayCollector` whose batches have a share of each node: nothing is stepped between two of them.

    Args:
        create_env_fn: a list with an entry for each node.
        policy: see `RayCollector`.
        frames_per_batch: frames of a batch; a multiple of the number of nodes.
        total_frames: likewise; -1 or None for endless.
        update_interval: every how many batches the policy's current weights are sent.
        **keywords: see `RayCollector`.

    Raises:
        BatchSizeError: frames that can't be divided among the nodes (also a RuntimeError).
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
    """A `RayCollector` with a node for each entry of `create_env_fn`; shares of nodes follow each other in dimension 0.

    Args:
        create_env_fn: a list with an entry for each node.
        policy: see `RayCollector`.
        **keywords: see there.
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
            policy_or_weights: see there.
            worker_ids: numbers of nodes; None for all.
            workers: the same.
            wait: no effect: every batch that a node begins from now on is collected with these weights.
            **named: see there.
        """
        super().update_policy_weights_(
            policy_or_weights, worker_ids=workers if worker_ids is None else worker_ids, **named
        )


def _require_even(create_env_fn: Any, keywords: dict[str, Any], **frames: int) -> None:
    """Raise unless frames can be divided among the nodes."""
    count = keywords.get("num_collectors") or (
        len(create_env_fn) if isinstance(create_env_fn, Sequence) else 1
    )
    for name, value in frames.items():
        if positive(name, value) % count:
            raise BatchSizeError(
                f"{name}={value} can't be divided among {count} nodes; use a multiple of {count}"
            )
