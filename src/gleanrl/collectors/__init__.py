"""Collectors: iterate over batches of experience."""

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.facade import SyncDataCollector
from gleanrl.collectors.ledger import CollectorStats
from gleanrl.collectors.trajectories import split_trajectories
from gleanrl.compat import bind
from gleanrl.rollouts.policies import RandomPolicy

__all__ = [
    "CollectorStats",
    "DataCollectorBase",
    "RandomPolicy",
    "SyncDataCollector",
    "split_trajectories",
]

bind(__name__, globals())
