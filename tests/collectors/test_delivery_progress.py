"""The progress bar is drawn; the tests draw it on a string."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from gleanrl._os import clock
from gleanrl.collectors.delivery import CollectorProgress
from gleanrl.collectors.frame_accounting import CollectorStats


def terminal() -> Console:
    """Return a wide terminal that writes into a string."""
    return Console(file=io.StringIO(), force_terminal=True, width=160, legacy_windows=False, _environ={})


def drawn(console: Console) -> list[str]:
    """Return the lines drawn so far, without control sequences."""
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def stats(**changes: Any) -> CollectorStats:
    values: dict[str, Any] = dict.fromkeys(("delivered", "flagged", "discarded", "batches"), 0)
    return CollectorStats(
        **values,
        **{
            "reasons": {},
            "episodes": 0,
            "mean_return": math.nan,
            "mean_length": 0.0,
            "frames_per_s": 0.0,
            **changes,
        },
    )


@pytest.fixture
def fake_clock() -> Iterator[clock.FakeClock]:
    fake = clock.FakeClock(100.0)
    with clock.use(fake):
        yield fake


def test_frames_speed_episodes_and_mean_return_are_shown(fake_clock: clock.FakeClock) -> None:
    console = terminal()
    progress = CollectorProgress(20_000, console)
    progress.update(5_000, stats(episodes=1_234, mean_return=-56.78, frames_per_s=98_765.4))
    (line,) = drawn(console)
    for text in ("5,000 frames", "25%", "98,765 frames/s", "1,234 episodes", "mean return -56.8"):
        assert text in line
    progress.close()


def test_bar_is_drawn_a_few_times_a_second_and_at_the_end(
    fake_clock: clock.FakeClock,
) -> None:
    console = terminal()
    progress = CollectorProgress(None, console)
    for n in range(1, 101):
        progress.update(n, stats())
        fake_clock.advance(0.01)
    shown = drawn(console)
    assert 4 <= len(shown) <= 5 and shown[0].startswith("1 frames")
    progress.close()
    assert drawn(console)[-1].startswith("100 frames")
    assert "mean return nan" in drawn(console)[-1]


def test_no_thread_is_started() -> None:
    before = threading.active_count()
    progress = CollectorProgress(10, terminal())
    progress.update(5, stats())
    assert threading.active_count() == before
    progress.close()


def test_closing_twice_or_before_the_first_frame_draws_nothing_more() -> None:
    console = terminal()
    CollectorProgress(10, console).close()
    assert drawn(console) == []
    progress = CollectorProgress(10, console)
    progress.update(10, stats())
    progress.close()
    once = console.file.getvalue()  # type: ignore[attr-defined]
    progress.close()
    assert console.file.getvalue() == once  # type: ignore[attr-defined]
    assert "100%" in drawn(console)[-1]


def test_two_bars_share_a_console() -> None:
    console = terminal()
    first, second = CollectorProgress(10, console), CollectorProgress(20, console)
    first.update(1, stats())
    second.update(2, stats())
    second.close()
    first.close()
    assert any("2 frames" in line for line in drawn(console))


def test_file_gets_only_the_last_state() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=False, _environ={})
    progress = CollectorProgress(10, console)
    progress.update(5, stats())
    progress.update(10, stats())
    assert drawn(console) == []
    progress.close()
    assert len(drawn(console)) == 1 and "10 frames" in drawn(console)[0]


def test_nothing_is_drawn_after_the_last_state(fake_clock: clock.FakeClock) -> None:
    console = terminal()
    progress = CollectorProgress(30, console)
    progress.update(10, stats())
    progress.close()
    before = drawn(console)
    progress.update(30, stats())
    progress.close()
    assert drawn(console) == before


PROGRAM = """
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv
collector = SyncDataCollector(GymEnv("CartPole-v1"), None, frames_per_batch=10, total_frames=-1, progress=True)
collector.next(), collector.next()
"""


def test_the_bar_of_a_collector_that_lives_at_exit_ends_without_an_error() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0 and not found.stderr
    assert found.stdout.count("frames/s") == 1


@pytest.mark.parametrize(("budget", "total"), [("-1", "frames"), ("20", "of 20 frames")])
def test_lines_are_printed_where_rich_cannot_be_imported(budget: str, total: str) -> None:
    without = "import sys; sys.modules['rich'] = None" + PROGRAM.replace("-1", budget)
    found = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0 and not found.stderr
    first, last = found.stdout.splitlines()
    assert first.startswith(f"0 {total}  ") and last.startswith(f"10 {total}  ")
    assert "frames/s  " in last and "mean return" in last


def test_a_line_is_printed_every_ten_seconds_at_most(
    fake_clock: clock.FakeClock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    progress = CollectorProgress(30_000)
    for n in range(1, 26):
        progress.update(1_000 * n, stats(episodes=n, mean_return=-n, frames_per_s=1_234.5))
        fake_clock.advance(1.0)
    progress.close()
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["1,000", "11,000", "21,000", "25,000"]
    assert lines[-1] == "25,000 of 30,000 frames  1,234 frames/s  25 episodes  mean return -25.0"
