"""Collectors: iterate over batches of experience."""

from gleanrl._rollout.policies import RandomPolicy
from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.frame_accounting import CollectorStats, WorkerStats
from gleanrl.collectors.multi import (
    MultiaSyncDataCollector,
    MultiCollector,
    MultiSyncDataCollector,
    WorkersCollector,
    aSyncDataCollector,
)
from gleanrl.collectors.single import SyncDataCollector
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.collectors.weight_updaters import (
    MultiProcessedWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from gleanrl.compat import bind

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
