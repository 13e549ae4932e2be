"""Base class and presets of weight updaters, by which users send policy weights in their own way."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.collectors.policy_weights import copy_weights, weights_of
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


class WeightUpdaterBase(ABC):
    """Base class of objects that send weights to the policies that collect.

    `collector.update_policy_weights_` calls the updater that was passed to the collector as ``weight_updater=``. The
    updater calls `_sync_weights_with_worker` for each worker, unless `_skip_update` returns True for it, and then the
    hooks. If `all_worker_ids` returns None, it makes one call, with ``worker_id=None``.

    Examples:
        >>> class Shouting(WeightUpdaterBase):
        ...     def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        ...         print("new weights")
        >>> Shouting().push_weights({})
        new weights
    """

    _collector: weakref.ref[Any] | None = None

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an updater for a policy; None if the policy determines none."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - subclasses may leave it out
        """Accept arguments that are known only later; called by `collector.init_updater`."""

    @property
    def collector(self) -> Any:
        """The collector that owns this updater; None before registration, or after the collector was deleted."""
        return None if self._collector is None else self._collector()

    def register_collector(self, collector: Any) -> None:
        """Register the collector whose weights are updated, by a weak reference; called by the collector.

        Raises:
            InvalidArgumentError: the updater belongs to another collector already.
        """
        if self.collector not in (None, collector):
            raise InvalidArgumentError(
                "weight_updater: it already belongs to another collector; make one updater for each collector"
            )
        self._collector = weakref.ref(collector)

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """Callbacks after every update, in order."""
        # Set here, because subclasses need not call this class's constructor.
        return self.__dict__.setdefault("_post_hooks", [])

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Call `hook` after every update from now on."""
        self.post_hooks.append(hook)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Send weights to workers, then call the hooks.

        If sending to a worker raises, the remaining workers get nothing, and the hooks are not called.

        Args:
            policy_or_weights: a module, TensorDict or dictionary, or any value that `_maybe_map_weights` accepts. None
                sends the weights of `_get_server_weights`.
            worker_ids: which workers, one or several; None for all.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        for hook in self.post_hooks:
            hook()

    __call__ = push_weights

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        source = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(source)
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        for worker_id in ids if isinstance(ids, Collection) and not isinstance(ids, str) else [ids]:
            if not self._skip_update(worker_id):
                self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)

    def _get_server_weights(self) -> Any:
        """Return the weights to send if the caller passed none."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return the weights to send in place of the passed ones."""
        return policy_or_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        """Return the ids of all workers; None if there is only one."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Return whether to leave a worker out of this update."""
        return False

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Send weights to one worker."""


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copy weights into the weights of one policy, in place.

    Args:
        weight_getter: returns the weights if none are pushed. Without it, or if it returns None, nothing is copied.
        policy_weights: the weights to write, ``TensorDict.from_module(policy)``.
    """

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: TensorDictBase
    ) -> None:
        self.weight_getter, self.policy_weights = weight_getter, policy_weights

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an updater of a module's weights; None if `policy` is not a module."""
        return cls(policy_weights=weights_of(policy)) if isinstance(policy, torch.nn.Module) else None

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return None if policy_or_weights is None else weights_of(policy_or_weights)

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if server_weights is not None:
            copy_weights(server_weights, self.policy_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Send weights to a collector's workers, as the collector does without an updater. A base class for users.

    Weights are sent to all workers, or to the workers that `push_weights` names.

    Args:
        get_server_weights: returns the weights if none are pushed; None for the weights of the collector's policy.
        policy_weights: further weights to update, by device. Each is updated if all workers get weights, or if its
            device is among `worker_ids`, but not with the collector's own weights (None). The workers' weights are not
            among them: they have their own shared memory.

    Examples:
        >>> class Halving(MultiProcessedWeightUpdater):
        ...     def _maybe_map_weights(self, policy_or_weights):
        ...         return policy_or_weights.data / 2
        >>> updater = Halving(get_server_weights=lambda: None)
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Any] | None = None,
        policy_weights: Mapping[Any, TensorDictBase] | None = None,
    ) -> None:
        self.get_server_weights, self.policy_weights = get_server_weights, dict(policy_weights or {})

    def _get_server_weights(self) -> Any:
        return None if self.get_server_weights is None else self.get_server_weights()

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if self.collector is None:
            raise InvalidArgumentError(
                "push_weights: the updater has no collector; pass it to one first, with weight_updater="
            )
        self.collector.send_weights(server_weights, worker_id)
        for device, target in self.policy_weights.items():
            if server_weights is not None and worker_id in (None, device):
                copy_weights(weights_of(server_weights), target)


def made_updater(updater: Any, policy: Any = None) -> WeightUpdaterBase | None:
    """Return the updater that the user passed or that the user's callable makes; None for None.

    A class is first asked for `from_policy`, then called.

    Raises:
        InvalidTypeError: the value is no updater and makes none.
    """
    made = updater
    if isinstance(updater, type) and issubclass(updater, WeightUpdaterBase):
        made = updater.from_policy(policy) or updater()
    elif callable(updater) and not isinstance(updater, WeightUpdaterBase):
        made = updater()
    if made is not None and not isinstance(made, WeightUpdaterBase):
        raise InvalidTypeError(
            f"weight_updater: expected a WeightUpdaterBase or a callable that makes one, got {type(made).__name__}"
        )
    return made
