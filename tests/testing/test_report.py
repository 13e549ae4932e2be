"""The report of a suite is readable."""

from __future__ import annotations

from gleanrl.testing import EnvReport


def test_report_has_one_line_for_each_rule() -> None:
    report = EnvReport("Walk", 100, 7, ("specs", "flags"), {"seed": "left out"})
    assert str(report).splitlines() == [
        "Walk: 100 steps, 7 episodes",
        "  passed   specs",
        "  passed   flags",
        "  skipped  seed: left out",
    ]
