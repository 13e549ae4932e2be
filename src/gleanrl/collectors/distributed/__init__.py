"""Collectors whose nodes are Ray actors, on one machine or many."""

from gleanrl.collectors.distributed.ray import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    RayCollector,
    RPCDataCollector,
)
from gleanrl.compat import bind

__all__ = [
    "DistributedDataCollector",
    "DistributedSyncDataCollector",
    "RPCDataCollector",
    "RayCollector",
]

bind(__name__, globals())
