"""Collectors: iterate over batches of experience."""

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.facade import SyncDataCollector
from gleanrl.collectors.ledger import CollectorStats
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.rollouts.policies import RandomPolicy

BaseCollector = DataCollectorBase
Collector = SyncDataCollector

__all__ = [
    "BaseCollector",
    "Collector",
    "CollectorStats",
    "DataCollectorBase",
    "RandomPolicy",
    "SyncDataCollector",
    "split_trajectories",
]
