"""One name for the collectors with workers, synchronous or not."""

from __future__ import annotations

from abc import ABC
from typing import Any

from gleanrl.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector, WorkersCollector
from gleanrl.errors import MissingArgumentError


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
