"""Helpers of all drills: the size of a drill, and collectors over the oracle's environments.

`GLEANRL_CHAOS` is the share of the full numbers: 1 in `make chaos`, a twentieth otherwise. Time limits hold for an idle
machine, so only full drills check them. Other drills run on shared machines: their limits are wide enough for any load,
so that only a hang exceeds them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gleanrl._process.worker import Timeouts
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, aSyncDataCollector
from tests.contract.helpers import check_ledger

SHARE = float(os.environ.get("GLEANRL_CHAOS", 0.05))
SLACK = 1.0 if SHARE >= 1 else 60.0
KINDS = ("sync", "async")
HANG_S = 20.0


def scaled(number: int) -> int:
    """Return the share of a full number that this run does, at least one."""
    return max(1, round(number * SHARE))


def collector_of(
    kind: str,
    makers: Sequence[Callable[[], Any]],
    policy: Any = None,
    *,
    steps: int,
    frames: int = -1,
    **options: Any,
) -> Any:
    """Create a collector.

    Args:
        kind: "sync", "cat", "async" or "one".
        makers: functions that make the environments.
        policy: None draws random actions.
        steps: steps of each worker per batch.
        frames: total frames; -1 for endless.
        options: further arguments.
    """
    if kind in ("sync", "cat"):
        options |= {"frames_per_batch": steps * len(makers), "cat_results": "stack" if kind == "sync" else 0}
        return MultiSyncDataCollector(makers, policy, total_frames=frames, **options)
    if kind == "async":
        return MultiaSyncDataCollector(makers, policy, frames_per_batch=steps, total_frames=frames, **options)
    return aSyncDataCollector(makers[0], policy, frames_per_batch=steps, total_frames=frames, **options)


@contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield a collector; at the end, check its ledger and shut it down."""
    collector = collector_of(*args, **kwargs)
    try:
        yield collector
        check_ledger(collector)
    finally:
        collector.shutdown()


def patience(work_s: float = 60.0, start_s: float = 60.0) -> Timeouts:
    """Return time limits for workers."""
    return Timeouts(start_s=start_s, work_s=work_s, close_s=2.0)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = HANG_S) -> float:
    """Wait until a condition holds; return the seconds that this took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"{what}: not within {seconds:g} s"
        time.sleep(0.0005)
    return time.monotonic() - begin


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return float(np.quantile(seconds, 0.99))
