"""Checks and conversions for the keywords of collectors with workers, mostly to one value for each worker."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl._process.worker import Timeouts
from gleanrl._util import optional_callable, positive
from gleanrl.collectors.build import CollectorConfig
from gleanrl.collectors.source import warn
from gleanrl.collectors.workers.weights import FollowedWeights
from gleanrl.collectors.workers.worker import PickledPolicy
from gleanrl.envs.vector.factories import Factory, factories, is_several, with_own_copies
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, LengthError, UnsupportedError


def makers_of(create_env_fn: Any, create_env_kwargs: Any, num_workers: Any) -> tuple[Factory, ...]:
    """Return the factory of each worker's environment.

    Args:
        create_env_fn: a callable, an environment or the name of one for all workers, or a list with one for each.
        create_env_kwargs: keyword arguments of the callables, for all or a list with one for each.
        num_workers: number of workers; None for the length of the list.

    Raises:
        InvalidTypeError: if neither a list nor a number of workers was passed, or an entry is neither callable nor an
            environment.
        LengthError: if a list is empty or has another length.
        InvalidArgumentError: if `num_workers` is not a positive integer, or an environment was used before.
        UnsupportedError: if an environment without `update_kwargs` has keyword arguments.
    """
    several = is_several(create_env_fn)
    if not several and num_workers is None:
        raise InvalidTypeError(
            f"create_env_fn: expected a list with an entry for each worker, got {type(create_env_fn).__name__}; "
            "write [create_env_fn] * num_workers, or give num_workers="
        )
    if several and not create_env_fn:
        raise LengthError("create_env_fn: expected a list with an entry for each worker, got an empty one")
    count = len(create_env_fn) if num_workers is None else positive("num_workers", num_workers)
    entries = list(create_env_fn) if several else [create_env_fn] * count
    return with_own_copies(factories(count, entries, create_env_kwargs))


def frames_of(frames_per_batch: Any, num_workers: int, shared: bool) -> int:
    """Return the number of frames of a batch.

    Args:
        frames_per_batch: a number, or a list with the frames of each worker.
        num_workers: number of workers.
        shared: whether each batch has a share of every worker. The result is then the sum of a list, else its entry.

    Raises:
        UnsupportedError: the workers' frames differ.
        InvalidArgumentError: a number is not a positive integer.
        LengthError: the list has another length than `num_workers`.
    """
    if not isinstance(frames_per_batch, (list, tuple)):
        return positive("frames_per_batch", frames_per_batch)
    frames = [
        positive("frames_per_batch", one) for one in each("frames_per_batch", frames_per_batch, num_workers)
    ]
    if len(set(frames)) > 1:
        raise UnsupportedError(
            f"frames_per_batch: expected the same number for each worker, got {frames}; pass one number, the frames "
            "of a batch"
        )
    return sum(frames) if shared else frames[0]


def each(name: str, value: Any, count: int) -> list[Any]:
    """Return one value for each worker, from a list of them or from one value for all.

    Raises:
        LengthError: if the list has another length.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise LengthError(f"{name}: expected {count} entries, one for each worker, got {len(value)}")
    return list(value)


def recipes_of(recipe: CollectorConfig, count: int, **fields: Any) -> list[CollectorConfig]:
    """Return the config of each worker's collection.

    Args:
        recipe: the common config.
        count: number of workers.
        fields: fields that may differ between workers, each one value for all or a list with one for each.

    Raises:
        LengthError: if a list has another length.
    """
    values = {name: each(name, value, count) for name, value in fields.items()}
    return [
        replace(recipe, **{name: of_workers[worker] for name, of_workers in values.items()})
        for worker in range(count)
    ]


def policies_of(policy: Any, policy_factory: Any, placed: Sequence[bool]) -> list[PickledPolicy]:
    """Return each worker's pickled policy or policy factory; the same object is pickled once for each `placed`.

    Args:
        policy: the policy, or None.
        policy_factory: a callable that makes the policy, or a list with one for each worker, or None.
        placed: for each worker, whether the caller chose the device of its policy.

    Raises:
        InvalidTypeError: if both were passed, or if a factory isn't callable.
        LengthError: if a list of factories has another length.
        WorkerError: if the policy or a factory can't be pickled.
    """
    if policy is not None and policy_factory is not None:
        raise InvalidTypeError("policy_factory: the policy was given already; give one of the two")
    _warn_of_methods(policy)
    made: dict[tuple[int, bool], PickledPolicy] = {}
    factories = each("policy_factory", policy_factory, len(placed))
    for factory, is_placed in zip(factories, placed, strict=True):
        if (id(optional_callable("policy_factory", factory)), is_placed) not in made:
            made[id(factory), is_placed] = PickledPolicy.of(policy, factory, is_placed)
    return [made[id(factory), is_placed] for factory, is_placed in zip(factories, placed, strict=True)]


def _warn_of_methods(policy: Any) -> None:
    """Warn of a policy, or a member, that is a method of a module that learns: its weights can't be sent to workers."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    for called in (policy, *(module.module for module in modules if isinstance(module, TensorDictModule))):
        owner = called.__self__ if inspect.ismethod(called) else None
        if isinstance(owner, nn.Module) and not any(module is owner for module in modules):
            if any(weight.requires_grad for weight in owner.parameters()):
                name = type(owner).__name__
                warn(
                    f"policy: workers keep the present weights of {name}, because the method {called.__name__} hides "
                    f"them; rename the method to forward and pass the {name} itself"
                )


def enough_of(threshold: Any, count: int) -> int | None:
    """Return the number of finished shares that ends the remaining ones; None if there is no threshold.

    The threshold is a fraction of the workers, clipped to ``[0, 1]``. Their number is rounded down, but at least 1.

    Raises:
        InvalidArgumentError: if the threshold isn't a number.
    """
    if threshold is None:
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or threshold != threshold:
        raise InvalidArgumentError(f"preemptive_threshold: expected a number in [0, 1], got {threshold!r}")
    return max(1, int(count * min(max(threshold, 0.0), 1.0)))


def following_of(update_at_each_batch: Any, placed: bool) -> FollowedWeights:
    """Return until when workers get the current weights of the user's policy.

    Args:
        update_at_each_batch: the user's keyword; True for always.
        placed: whether the user chose the device of the policy.
    """
    if update_at_each_batch:
        return FollowedWeights.ALWAYS
    return FollowedWeights.UNTIL_UPDATED if placed else FollowedWeights.UNTIL_REPLACED


def timeouts_of(timeouts: Any) -> Timeouts:
    """Return `timeouts`, or the defaults if it is None; raise `InvalidTypeError` for another type."""
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise InvalidTypeError(f"timeouts: expected Timeouts, got {type(timeouts).__name__}")
    return timeouts or Timeouts()
