"""Time shares of programs are computed within each round, so that a drift between rounds doesn't count."""

from __future__ import annotations

import pytest

from benchmarks import programs


@pytest.fixture
def drifting(monkeypatch):
    """Imitate runs of one program on a machine that slows down; the networks take 4 of gleanrl's 5 seconds."""
    speeds = iter([1.0, 1.0, 2.0, 2.0, 8.0, 8.0, 9.0, 9.0, 10.0, 10.0] * 2)
    now: list[float] = []

    def run(program, way, what):
        if what == "data":
            now[:] = [next(speeds)]
        ours = {"torchrl": 12.0, "takeover": 5.0, "by-hand": 4.5}[way]
        own = {"networks": 4.0 * now[0], "environments": 0.0}
        return {"data": ours * now[0], "whole": 2 * ours * now[0]} if what == "data" else own

    monkeypatch.setattr(programs, "_run", run)
    programs.rounds.cache_clear()
    yield
    programs.rounds.cache_clear()


def test_share_is_the_median_over_the_rounds(drifting):
    shares = {gauge.name: gauge.measure() for gauge in programs.GAUGES if "ppo_continuous" in gauge.name}
    assert shares["programs/ppo_continuous-driving"] == pytest.approx(1 / 8)
    assert shares["programs/ppo_continuous-data"] == pytest.approx(5 / 12)
    assert shares["programs/ppo_continuous-by-hand"] == pytest.approx(2.0)
