"""Collectors whose nodes are Ray actors, on one machine or many."""

from gleanrl.collectors.distributed.named import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    RPCDataCollector,
)
from gleanrl.collectors.distributed.ray_collector import RayCollector
from gleanrl.compat import bind

__all__ = [
    "DistributedDataCollector",
    "DistributedSyncDataCollector",
    "RPCDataCollector",
    "RayCollector",
]

bind(__name__, globals())
