"""A hook by which users send weights to policies in their own way."""

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
    """Sends weights to the policies that collect: what `collector.update_policy_weights_` calls.

    For each worker (or once, with ``worker_id=None``, where `all_worker_ids` returns None) `_sync_weights_with_worker`
    is called, unless `_skip_update` says otherwise; then the hooks. A collector takes one as ``weight_updater=``.

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
        """Return an updater for a policy; None if there's nothing that a policy could say about it."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - subclasses may leave it out
        """Take arguments that are known late; `collector.init_updater` calls it."""

    @property
    def collector(self) -> Any:
        """The collector that this was given to; None if it wasn't, or that is gone."""
        return None if self._collector is None else self._collector()

    def register_collector(self, collector: Any) -> None:
        """Note whose weights are updated, weakly; the collector calls it.

        Raises:
            InvalidArgumentError: it belongs to another one already.
        """
        if self.collector not in (None, collector):
            raise InvalidArgumentError("weight_updater: it belongs to another collector; make one for each")
        self._collector = weakref.ref(collector)

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called after every update, in this order."""
        return self.__dict__.setdefault("_post_hooks", [])  # subclasses needn't call our constructor

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Have `hook` called after every update."""
        self.post_hooks.append(hook)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Send weights to workers, then call the hooks.

        Args:
            policy_or_weights: a module, TensorDict, dictionary, or whatever `_maybe_map_weights` takes; None for what
                `_get_server_weights` gives.
            worker_ids: which workers, one or several; None for all.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        for hook in self.post_hooks:
            hook()

    __call__ = push_weights

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        ids = self.all_worker_ids() if worker_ids is None else worker_ids
        for worker_id in ids if isinstance(ids, Collection) and not isinstance(ids, str) else [ids]:
            if not self._skip_update(worker_id):
                self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)

    def _get_server_weights(self) -> Any:
        """Return the weights to send where none were given."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Return what is sent in place of what was given."""
        return policy_or_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        """Return the names of all workers; None where there is only one."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Return whether a worker gets no weights this time."""
        return False

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Send weights to one worker."""


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into those of one policy, in place.

    Args:
        weight_getter: gives the weights where none are pushed.
        policy_weights: the weights to write, ``TensorDict.from_module(policy)``.
    """

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: TensorDictBase
    ) -> None:
        self.weight_getter, self.policy_weights = weight_getter, policy_weights

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an updater of a module's weights; None for what isn't a module."""
        return cls(policy_weights=weights_of(policy)) if isinstance(policy, torch.nn.Module) else None

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        return None if policy_or_weights is None else weights_of(policy_or_weights)

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if server_weights is not None:
            copy_weights(server_weights, self.policy_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Sends weights to a collector's workers, as the collector does without an updater: a base for users' own.

    Weights go to all workers at once, or to those that `push_weights` names.

    Args:
        get_server_weights: gives the weights where none are pushed; None for those of the collector's policy.
        policy_weights: weights by device, which are to follow; the workers' stand in shared memory of their own.

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
            raise InvalidArgumentError("push_weights: give the updater to a collector first, weight_updater=")
        self.collector.send_weights(server_weights, worker_id)
        for place, target in self.policy_weights.items():
            if server_weights is not None and worker_id in (None, place):
                copy_weights(weights_of(server_weights), target)


def made_updater(updater: Any, policy: Any = None) -> WeightUpdaterBase | None:
    """Return the updater that a user gave, or that the user's callable makes; a class's `from_policy` comes first.

    Raises:
        InvalidTypeError: it's neither.
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
