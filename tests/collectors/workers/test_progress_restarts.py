"""Restarts are limited in number and delayed."""

from __future__ import annotations

import pytest

from gleanrl._os import clock
from gleanrl._os.clock import Deadline, FakeClock
from gleanrl.collectors.workers.progress import Losses, Restarts
from gleanrl.errors import InvalidArgumentError


class Workers:
    """Three workers and their losses."""

    def __init__(self, restarts: Restarts) -> None:
        self.restarts, self.losses = restarts, [Losses()] * 3

    def lose(self, worker: int, served: int) -> Deadline | str:
        self.losses[worker] = self.restarts.after_loss(self.losses, worker, served, 2)
        return self.losses[worker].verdict


def pause(verdict: Deadline | str) -> float:
    assert isinstance(verdict, Deadline)
    return verdict.remaining() or 0.0


def test_raise_mode_names_the_restart_option() -> None:
    verdict = Workers(Restarts("raise", 10)).lose(0, 0)
    assert isinstance(verdict, str) and "on_worker_error='restart'" in verdict


def test_restart_without_replacements_names_the_limit() -> None:
    assert Workers(Restarts("restart", 0)).lose(0, 0) == "all max_restarts=0 replacements are used up"


def test_pauses_double_until_a_share_is_finished() -> None:
    with clock.use(FakeClock()):
        workers = Workers(Restarts("restart", 100))
        assert [pause(workers.lose(0, 3)) for _ in range(4)] == pytest.approx([0.0, 0.1, 0.2, 0.4])
        assert pause(workers.lose(1, 0)) == 0.0
        assert pause(workers.lose(0, 4)) == 0.0
        assert [losses[:4] for losses in workers.losses] == [(5, 1, 4, 10), (1, 1, 0, 2), (0, 0, 0, 0)]


def test_the_fifth_loss_in_a_row_is_final() -> None:
    workers = Workers(Restarts("restart", 100))
    for _ in range(4):
        workers.lose(2, 7)
    assert "5 times without finishing a share" in str(workers.lose(2, 7))
    assert pause(workers.lose(1, 7)) == 0.0


def test_all_workers_share_max_restarts() -> None:
    workers = Workers(Restarts("restart", 2))
    assert pause(workers.lose(0, 0)) == pause(workers.lose(1, 0)) == 0.0
    assert workers.lose(2, 5) == "all max_restarts=2 replacements are used up"


def test_bad_values_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="on_worker_error: .* got 'ignore'"):
        Restarts("ignore", 1)
    with pytest.raises(InvalidArgumentError, match="max_restarts: .* got -1"):
        Restarts("restart", -1)
