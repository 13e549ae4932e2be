"""Interrupts are raised after a protected change has ended."""

from __future__ import annotations

import pytest

from gleanrl._os.interrupts import to_the_end


def test_interrupt_is_raised_after_the_whole_change():
    done: dict[str, int] = {}
    interrupts = [KeyboardInterrupt("Ctrl-C")]

    def change() -> None:
        done["first"] = 1
        if interrupts:
            raise interrupts.pop()
        done["second"] = 2

    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        to_the_end(change)
    assert done == {"first": 1, "second": 2}


def test_change_without_an_interrupt_runs_once():
    calls: list[int] = []
    to_the_end(lambda: calls.append(1))
    assert calls == [1]
