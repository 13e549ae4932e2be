"""A delivery takes batches from their source to the user or into a buffer."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict import TensorDict

from gleanrl.collectors.delivery import BatchDelivery, BufferSink, PostProcessing
from gleanrl.collectors.source import Budget, BudgetSpent
from gleanrl.data import LazyTensorStorage, TensorDictReplayBuffer
from gleanrl.errors import ClosedError
from tests.collectors.helpers import collection
from tests.fakes_base import CountingEnv


def made(total: int = 8, **parts: Any) -> BatchDelivery:
    """Return a delivery of batches of four frames."""
    source = collection(CountingEnv())
    delivery = parts.pop("delivery", PostProcessing())
    return BatchDelivery(source, Budget(1, 4, total), delivery, **parts)


def buffer() -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)


def test_batches_until_the_budget_is_spent() -> None:
    handover, finished = made(), []
    batches = [handover.next(finished.append) for _ in range(2)]
    assert [len(batch) for batch in batches if batch is not None] == [4, 4]
    assert all(batch is one for batch, one in zip(batches, finished, strict=True))
    with pytest.raises(BudgetSpent):
        handover.next()


def test_batches_outside_the_budget_go_to_the_user() -> None:
    into = buffer()
    handover = made(sink=BufferSink(into))
    assert handover.next() is None and len(into) == 4
    batch = handover.collect_outside_budget(Budget(1, 4).extra_grant())
    assert batch is not None and len(batch) == 4 and len(into) == 4
    assert handover.source.spent == 4


def test_serve_uses_the_given_budget() -> None:
    handover = made()
    assert handover.serve(Budget(1, 2, 2), lambda batch, part: (len(batch), part)) == (2, (0, 1))
    assert handover.serve(Budget(1, 2, 2), lambda batch, part: batch) is None


def test_closed_delivery_refuses_every_call() -> None:
    handover = made()
    handover.require_open()
    handover.closed = True
    for call in (
        handover.require_open,
        handover.next,
        lambda: handover.collect_outside_budget(Budget(1, 4).extra_grant()),
    ):
        with pytest.raises(ClosedError, match="shut down"):
            call()


def test_before_hook_runs_and_failing_postproc_discards_the_batch() -> None:
    def fail(batch: TensorDict) -> TensorDict:
        raise LookupError("postproc")

    called: list[int] = []
    handover = made(before=lambda: called.append(1), delivery=PostProcessing(postproc=fail))
    with pytest.raises(LookupError):
        handover.next()
    assert called == [1]
    assert handover.source.stats().reasons == {"postproc": 4}
    assert handover.source.spent == 0
