"""Crews of clerks, and what tests ask them."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from gleanrl._arrays.schema import Field, Schema
from gleanrl._process.shared_columns import Rows
from gleanrl._process.worker import Plan, Timeouts
from gleanrl._process.worker_pool import Crew
from tests._process.servants import Clerk

ROWS = Rows(Schema({("x",): Field(torch.Size(()), torch.int64)}), torch.Size(()), 1000)


def started(*servants, **timeouts):
    """A crew whose servants are made."""
    plan = Plan(Timeouts(**timeouts), where=lambda worker, place, step: f"at item {place}, step {step}")
    return Crew(servants or (Clerk, Clerk), plan)


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
