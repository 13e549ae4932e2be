"""The collectors, under the path that existing programs import them from."""

from gleanrl.collectors.base import DataCollectorBase
from gleanrl.collectors.facade import SyncDataCollector

__all__ = ["DataCollectorBase", "SyncDataCollector"]
