"""Collectors: iterate over batches of experience."""

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.facade import SyncDataCollector
from gleanrl.collectors.ledger import CollectorStats, WorkerStats
from gleanrl.collectors.multi import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    WorkersCollector,
    aSyncDataCollector,
)
from gleanrl.collectors.multi_collector import MultiCollector
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.collectors.weight_updaters import (
    MultiProcessedWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from gleanrl.compat import bind
from gleanrl.rollouts.policies import RandomPolicy

__all__ = [
    "CollectorStats",
    "DataCollectorBase",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RandomPolicy",
    "SyncDataCollector",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "WorkerStats",
    "WorkersCollector",
    "aSyncDataCollector",
    "split_trajectories",
]

bind(__name__, globals())
