"""Worker pools of `Clerk` services, and calls that the tests make on them."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from gleanrl._arrays.schema import Field, Schema
from gleanrl._process.shared_columns import SharedRows
from gleanrl._process.worker import Timeouts, WorkerPlan
from gleanrl._process.worker_pool import WorkerPool
from tests._process.servants import Clerk

ROWS = SharedRows(Schema({("x",): Field(torch.Size(()), torch.int64)}), torch.Size(()), 1000)


def started(*servants, **timeouts):
    """Return a worker pool whose services are being made."""
    plan = WorkerPlan(Timeouts(**timeouts), where=lambda worker, place, step: f"at item {place}, step {step}")
    return WorkerPool(servants or (Clerk, Clerk), plan)


def ask(crew, name, *arguments, workers=None):
    """Return the answer of each worker."""
    for index in range(len(crew.workers)) if workers is None else workers:
        crew.post(index, name, *arguments)
    return [answer.value for answer in crew.wait_all()]


@contextmanager
def told(place):
    """Add the place of the interrupt to an assertion that fails in the block."""
    try:
        yield
    except AssertionError as error:
        error.add_note(str(place))
        raise


def lost(crew):
    """Return the answer that reports the one lost worker."""
    (answer,) = [answer for answer in crew.wait_all() if answer.lost]
    return answer
