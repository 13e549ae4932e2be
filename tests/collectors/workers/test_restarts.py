"""Restarts: how often, and how soon."""

from __future__ import annotations

import pytest

from gleanrl.collectors.workers.restarts import Restarts
from gleanrl.errors import InvalidArgumentError
from gleanrl.system import clock
from gleanrl.system.clock import Deadline, FakeClock


def pause(verdict: Deadline | str) -> float:
    assert isinstance(verdict, Deadline)
    return verdict.remaining() or 0.0


def test_raise_says_what_to_pass() -> None:
    verdict = Restarts("raise", 10).after_loss(0, 0)
    assert isinstance(verdict, str) and "on_worker_error='restart'" in verdict


def test_pauses_double_until_a_share_is_finished() -> None:
    with clock.use(FakeClock()):
        restarts = Restarts("restart", 100)
        assert [pause(restarts.after_loss(0, 3)) for _ in range(4)] == pytest.approx([0.0, 0.1, 0.2, 0.4])
        assert pause(restarts.after_loss(1, 0)) == 0.0
        assert pause(restarts.after_loss(0, 4)) == 0.0 and restarts.count == 6


def test_the_fifth_loss_in_a_row_is_final() -> None:
    restarts = Restarts("restart", 100)
    for _ in range(4):
        restarts.after_loss(2, 7)
    assert "5 times without finishing a share" in str(restarts.after_loss(2, 7))
    assert pause(restarts.after_loss(1, 7)) == 0.0


def test_all_workers_share_max_restarts() -> None:
    restarts = Restarts("restart", 2)
    assert pause(restarts.after_loss(0, 0)) == pause(restarts.after_loss(1, 0)) == 0.0
    assert restarts.after_loss(2, 5) == "max_restarts=2 are spent"


def test_bad_values_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="on_worker_error: .* got 'ignore'"):
        Restarts("ignore", 1)
    with pytest.raises(InvalidArgumentError, match="max_restarts: .* got -1"):
        Restarts("restart", -1)
