"""Translation of the keyword arguments of collectors with Ray nodes, mostly to one value for each node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gleanrl._util import overridden, positive
from gleanrl.collectors.base import SourceCollector
from gleanrl.collectors.build import is_placed
from gleanrl.collectors.distributed.actor import NodeMaker, NodeRecipe
from gleanrl.collectors.frame_accounting import Numbering
from gleanrl.collectors.multi import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    WorkersCollector,
    aSyncDataCollector,
)
from gleanrl.collectors.single import SyncDataCollector
from gleanrl.collectors.workers.arguments import each, policies_of
from gleanrl.envs.vector.factories import factories, is_several, with_own_copies
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, UnsupportedError

CLASSES: dict[str, type[SourceCollector]] = {
    "single": SyncDataCollector,
    "sync": MultiSyncDataCollector,
    "async": MultiaSyncDataCollector,
}
"""Collector classes of nodes, by the names that users pass."""
_BYPASSED = ("iterator", "__iter__", "next", "take", "rollout", "reset", "set_seed")
_OPTIONS = {"num_cpus": 1}
"""Default Ray options of a node's actor."""
_OWN_OPTIONS = ("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups")
_OURS = (
    *("create_env_fn", "policy", "policy_factory", "frames_per_batch", "total_frames", "init_random_frames"),
    *("storing_device", "postproc", "split_trajs", "replay_buffer", "extend_buffer", "weight_updater"),
    *("update_at_each_batch", "trajs_per_batch", "trajs_per_write", "traj_format", "pre_collect_hook"),
    *("post_collect_hook", "progress", "interruptor", "return_same_td", "num_workers"),
)
"""Collector keywords that a collector with nodes handles itself, or has no use for."""
_fleets = itertools.count()


def class_of(collector_class: Any, num_workers: int, sync: bool = False) -> type[SourceCollector]:
    """Return the collector class of the nodes.

    Args:
        collector_class: a name of `CLASSES`, or a collector class.
        num_workers: number of workers of each node.
        sync: whether each batch has a share of every node.

    Raises:
        InvalidArgumentError: `collector_class` is no known name.
        UnsupportedError: nodes can't use this class, or not with this number of workers or with `sync`.
    """
    found = CLASSES.get(collector_class) if isinstance(collector_class, str) else collector_class
    if found is None:
        raise InvalidArgumentError(
            f"collector_class: expected one of {sorted(CLASSES)} or a collector's class, got {collector_class!r}"
        )
    bases = (SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector)
    base = next((base for base in bases if isinstance(found, type) and issubclass(found, base)), None)
    if base is None:
        raise UnsupportedError(
            f"collector_class: nodes collect with {', '.join(base.__name__ for base in bases)} or subclasses of these, "
            f"not with {found!r}"
        )
    replaced = overridden(found, *_BYPASSED, of=base)
    if replaced:
        raise UnsupportedError(
            f"collector_class: {found.__name__} replaces {replaced}, which nodes don't call; remove these methods"
        )
    if num_workers != 1 and (
        not issubclass(found, WorkersCollector) or issubclass(found, aSyncDataCollector)
    ):
        raise UnsupportedError(
            f"num_workers_per_collector={num_workers}: {found.__name__} has one worker; pass "
            "collector_class='sync' or 'async'"
        )
    if sync and num_workers > 1 and issubclass(found, MultiaSyncDataCollector):
        raise UnsupportedError(
            "sync: environments aren't stepped between batches, so only one worker of each node would collect; "
            "pass collector_class='sync'"
        )
    return found


def count_of(create_env_fn: Any, num_collectors: Any) -> int:
    """Return the number of nodes: `num_collectors`, or else the length of the list `create_env_fn`.

    Raises:
        MissingArgumentError: neither argument determines the number.
        InvalidArgumentError: the list is empty, or `num_collectors` is not a positive integer.
    """
    if num_collectors is not None:
        return positive("num_collectors", num_collectors)
    if not is_several(create_env_fn):
        raise MissingArgumentError(
            "num_collectors: the number of nodes is unknown; pass it, or a list as create_env_fn"
        )
    if not create_env_fn:
        raise InvalidArgumentError("create_env_fn: expected an entry for each node, got none")
    return len(create_env_fn)


def environments_of(create_env_fn: Any, count: int, num_workers: int, kwargs: Sequence[Any]) -> list[Any]:
    """Return each node's ``create_env_fn``: a list if the node has workers.

    Args:
        create_env_fn: one value for all nodes, or a list with an entry for each. Entries may be lists with one value
            for each worker.
        count: number of nodes.
        num_workers: number of workers of each node; 0 for collectors without workers.
        kwargs: keyword arguments of each node's callables.

    Raises:
        LengthError: a list has another length.
        InvalidTypeError, InvalidArgumentError, UnsupportedError: see `factories`.
    """
    found = []
    for entry, entry_kwargs in zip(each("create_env_fn", create_env_fn, count), kwargs, strict=True):
        if num_workers and isinstance(entry, (list, tuple)):
            entry = each("create_env_fn", entry, num_workers)
        found.append(factories(max(num_workers, 1), entry, entry_kwargs))
    flat = iter(with_own_copies([factory for made in found for factory in made]))
    own: list[Any] = [[next(flat) for _ in made] for made in found]
    return own if num_workers else [made[0] for made in own]


def keywords_of(collector_kwargs: Any, count: int) -> list[dict[str, Any]]:
    """Return the further keywords of each node's collector.

    Raises:
        InvalidTypeError: an entry is neither a dictionary nor None.
        LengthError: a list has another length than `count`.
        UnsupportedError: a keyword belongs to the collector with nodes.
    """
    found = []
    for entry in each("collector_kwargs", collector_kwargs, count):
        if not isinstance(entry, (Mapping, type(None))):
            raise InvalidTypeError(f"collector_kwargs: expected a dictionary, got {type(entry).__name__}")
        unfit = [name for name in _OURS if name in (entry or {})]
        if unfit:
            raise UnsupportedError(
                f"collector_kwargs: {unfit} can't be passed to nodes; pass it to the collector itself"
            )
        found.append(dict(entry or {}))
    return found


def options_of_actors(remote_configs: Any, count: int) -> list[dict[str, Any]]:
    """Return the Ray options of each node's actor, with one CPU as default.

    Raises:
        InvalidTypeError: an entry is neither a dictionary nor None.
        LengthError: a list has another length than `count`.
        UnsupportedError: an option would hand a task of the collector to Ray, such as restarts.
    """
    found = []
    for entry in each("remote_configs", remote_configs, count):
        if not isinstance(entry, (Mapping, type(None))):
            raise InvalidTypeError(f"remote_configs: expected a dictionary, got {type(entry).__name__}")
        unfit = [name for name in _OWN_OPTIONS if name in (entry or {})]
        if unfit:
            raise UnsupportedError(
                f"remote_configs: {unfit} can't be set, because the collector itself restarts lost nodes and orders "
                "their calls; pass on_worker_error and max_restarts to it instead"
            )
        found.append({**_OPTIONS, **(entry or {})})
    return found


def makers_of_nodes(
    ray: Any,
    collector: type[SourceCollector],
    environments: Sequence[Any],
    keywords: Sequence[Mapping[str, Any]],
    policies: tuple[Any, Any],
    options: Sequence[Mapping[str, Any]],
    num_shared_blocks: int,
) -> list[NodeMaker]:
    """Return the configs of the nodes. Each distinct policy or factory is put into the object store once.

    Args:
        ray: the module `ray`.
        collector: class of the nodes' collectors.
        environments: ``create_env_fn`` of each node.
        keywords: further keywords of each node.
        policies: the policy and the policy factory, one of them None. The factory may be a list with one for each node.
        options: Ray options of each actor.
        num_shared_blocks: see `NodeMaker`.

    Raises:
        InvalidTypeError, LengthError, WorkerError: see `policies_of`.
    """
    count, fleet_number = len(environments), next(_fleets)
    placed = [is_placed(own.get("device"), own.get("policy_device")) for own in keywords]
    pickled = policies_of(*policies, placed)
    put: Callable[[Any], Any] = ray.put
    refs = {id(one): put(one) for one in pickled}
    return [
        NodeMaker(
            NodeRecipe(
                collector,
                environments[number],
                keywords[number],
                Numbering(number, count),
                (torch.initial_seed(), fleet_number, number),
            ),
            refs[id(pickled[number])],
            options[number],
            num_shared_blocks,
        )
        for number in range(count)
    ]
