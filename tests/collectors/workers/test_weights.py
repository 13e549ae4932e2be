"""Weights on their way: whole, current, by worker."""

from __future__ import annotations

import pytest
import torch

from gleanrl.errors import IndexRangeError, SchemaError
from tests.collectors.helpers import Net
from tests.collectors.workers.crews import collecting


def values(batch) -> list[float]:  # type: ignore[no-untyped-def]
    found: list[float] = batch["action"].unique().tolist()
    return found


def test_the_next_batch_shows_changed_weights() -> None:
    policy = Net(0.5)
    with collecting("sync", 2, policy) as collector:
        assert values(collector.next()) == [0.5]
        with torch.no_grad():
            policy.value.fill_(0.25)
        assert values(collector.next()) == [0.25]


def test_frames_carry_the_version_that_acted() -> None:
    policy = Net(0.0)
    with collecting("async", 2, policy, track_policy_version=True) as collector:
        for version in range(1, 20):
            with torch.no_grad():
                policy.value.fill_(version / 64)
            collector.update_policy_weights_(
                {"value": torch.full((2,), version / 64), "calls": torch.tensor(0)}
            )
            batch = collector.next()
            assert values(batch) == (batch["collector", "policy_version"].unique() / 64).tolist()
            assert version - batch["policy_version"].min() <= 5


def test_workers_have_weights_of_their_own_until_all_get_some() -> None:
    policy = Net(0.5)
    with collecting("sync", 2, policy) as collector:
        collector.update_policy_weights_(Net(-0.5), worker_ids=[1])
        assert [values(part) for part in collector.next()] == [[0.5], [-0.5]]
        collector.update_policy_weights_(Net(0.25))
        assert values(collector.next()) == [0.25]
        with pytest.raises(IndexRangeError, match="worker_ids: .* got 2"):
            collector.update_policy_weights_(Net(), worker_ids=2)
        with pytest.raises(SchemaError):
            collector.update_policy_weights_({"value": torch.zeros(3), "calls": torch.tensor(0)})
        assert values(collector.next()) == [0.25]
