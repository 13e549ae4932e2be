"""Every fault at every moment, in every collector with workers, has its documented outcome in time."""

from __future__ import annotations

import os
import random
import time
from itertools import product

import pytest

from gleanrl._process.worker import Timeouts
from gleanrl.envs import ParallelEnv
from gleanrl.errors import EnvironmentContractError, WorkerCrashedError, WorkerTimeoutError
from tests.chaos.drills import SLACK, patience, running, scaled
from tests.chaos.faults import EXIT_CODE, FAULTS, MOMENTS, Fault
from tests.chaos.oracle import Record, makers
from tests.fakes import FakeFailure

pytestmark = pytest.mark.timeout(120)

KINDS = ("sync", "async", "one", "nested")
POLICIES = ("raise", "restart")
STEPS, BATCHES, LIMIT_S, WORK_S, START_S = 20, 5, 2.0, 0.4, 1.0
RAISED = {
    "kill": (WorkerCrashedError, "SIGKILL"),
    "segv": (WorkerCrashedError, "SIGSEGV"),
    "exit": (WorkerCrashedError, f"exited with code {EXIT_CODE}"),
    "stop": (WorkerTimeoutError, "stopped"),
    "hang": (WorkerTimeoutError, "in _happen"),
    "raise": (FakeFailure, "the fake broke on purpose"),
    "memory": (MemoryError, "allocate"),
    "data": (EnvironmentContractError, "observation"),
}


def cells() -> list[tuple[str, ...]]:
    """Return the same share of each fault's cells, identical in every run."""
    rest = list(product(MOMENTS, KINDS, POLICIES))
    return [
        (fault, *cell)
        for number, fault in enumerate(FAULTS)
        for cell in random.Random(number).sample(rest, min(len(rest), scaled(len(rest))))
    ]


def allowed(kind: str, fault: Fault) -> tuple[Timeouts, Timeouts]:
    """Return the timeouts of a collector's workers and of an environment's workers.

    They are short only if the fault is a hang. A hang among an environment's own workers is noticed by the environment
    first, so the collector waits longer.
    """
    if fault.kind not in ("hang", "stop"):
        return patience(), patience()
    inner = patience(WORK_S, START_S)
    return (patience(10 * WORK_S, 4 * START_S) if kind == "nested" else inner), inner


def made(kind: str, fault: Fault, timeouts: Timeouts):
    """Return makers of which the last makes an environment with the fault."""
    if kind == "one":
        return makers(1, fault=fault)
    first, second = makers(2)[0], makers(2, fault=fault)[1]
    if kind == "nested":
        third, fourth = makers(4)[2:]
        return [ParallelEnv(2, pair, timeouts=timeouts) for pair in ([third, fourth], [first, second])]
    return [first, second]


STARTING = ("construction", "first reset")


def is_replaced(fault: str, moment: str, kind: str) -> bool:
    """Return whether a fault loses a worker of the collector, so that another one can replace it.

    A worker that fails to start is replaced. Later errors of an environment are passed to the program. So are losses
    among an environment's own workers, because the collector's worker survives them.
    """
    return moment in STARTING or (fault not in ("raise", "memory", "data") and kind != "nested")


@pytest.mark.parametrize(("fault_kind", "moment", "kind", "policy"), cells())
def test_each_fault_has_its_outcome_in_time(fault_kind, moment, kind, policy, tmp_path):
    fault = Fault(fault_kind, moment, tmp_path / "token", os.getpid(), STEPS)
    each = 2 * STEPS if kind == "nested" else STEPS
    workers = 1 if kind == "one" else 2
    timeouts, inner = allowed(kind, fault)
    options = {"frames": BATCHES * workers * each, "on_worker_error": policy, "timeouts": timeouts}
    if policy == "restart":
        options["max_restarts"] = 2
    record = Record()

    def collect() -> None:
        with running(
            "sync" if kind == "nested" else kind, made(kind, fault, inner), steps=each, **options
        ) as collector:
            for batch in collector:
                record.add(batch)
            assert collector.stats().delivered == record.frames

    if policy == "restart" and is_replaced(fault_kind, moment, kind):
        collect()
        assert record.frames == options["frames"]
    else:
        error, words = RAISED[fault_kind]
        with pytest.raises(error, match=words):
            collect()
    elapsed = time.time() - fault.token.stat().st_mtime  # from the fault to its outcome
    if record.parts:
        record.check()
    limit = LIMIT_S * SLACK
    if fault_kind in ("hang", "stop"):  # the timeout restarts whenever the worker makes progress
        limit += 2 * (timeouts.start_s if moment in STARTING else inner.work_s)
    assert elapsed < limit, f"{elapsed:.1f} s"
