"""Crews of clerks, and what tests ask them."""

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
    """A crew whose servants are made."""
    plan = WorkerPlan(Timeouts(**timeouts), where=lambda worker, place, step: f"at item {place}, step {step}")
    return WorkerPool(servants or (Clerk, Clerk), plan)


def ask(crew, name, *arguments, workers=None):
    """What each of the workers answers."""
    for index in range(len(crew.workers)) if workers is None else workers:
        crew.post(index, name, *arguments)
    return [answer.value for answer in crew.wait_all()]


@contextmanager
def told(place):
    """What fails within it says where the interrupt was."""
    try:
        yield
    except AssertionError as error:
        error.add_note(str(place))
        raise


def lost(crew):
    """The one answer of a worker that was lost."""
    (answer,) = [answer for answer in crew.wait_all() if answer.lost]
    return answer
