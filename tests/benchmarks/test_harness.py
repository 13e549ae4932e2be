"""The harness measures sides in turn and compares them by ratios within a round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.harness import (
    Case,
    CaseResult,
    Gauge,
    Spread,
    Target,
    Work,
    interleave,
    ratios,
    run_case,
    run_gauge,
    spread,
    turn_order,
)
from benchmarks.remote import RemoteSide, Turn
from benchmarks.report import as_json, machine, markdown, table_rows, wording

PEER = """
import os
VERSION = "1.2"
def adding():
    os.write(1, b"noise on standard output\\n")
    print("more noise")
    return lambda: 7
def broken():
    raise RuntimeError("no such thing")
def breaking():
    def work():
        raise ValueError("in mid-turn")
    return work
def dying():
    return lambda: os._exit(3)
SETUPS = {"t/adding": adding, "t/broken": broken, "t/breaking": breaking, "t/dying": dying}
SETUPS["t/adding twice"] = lambda: lambda: 14
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a package with one peer module, `dummy`, that a worker can import."""
    (tmp_path / "dummy_peers").mkdir()
    (tmp_path / "dummy_peers" / "__init__.py").write_text("")
    (tmp_path / "dummy_peers" / "dummy.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "dummy_peers"


def case(*targets: Target, reference: str = "ref") -> Case:
    return Case("t/case", "a case", "call", {}, reference, targets, subject="us")


def result(*targets: Target, **speeds: list[float]) -> CaseResult:
    return CaseResult(case(*targets), dict(speeds))


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.25, 1.75)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratio_is_the_median_of_the_ratios_within_a_round_not_the_ratio_of_medians() -> None:
    run = result(us=[10.0, 2.0, 30.0], ref=[1.0, 20.0, 10.0])  # ratios 10, 0.1, 3; medians 10 and 10
    assert run.ratio("us").median == 3.0
    assert run.ratio("ref") == Spread(1.0, 1.0, 1.0)
    assert run.ratio("ref", "us").median == pytest.approx(1 / 3)


def test_ratios_need_series_of_equal_length() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


def test_verdict_compares_with_the_target() -> None:
    run = result(us=[90.0], ref=[100.0], peer=[30.0])
    assert run.verdict(Target(0.9)) is True
    assert run.verdict(Target(0.91)) is False
    assert run.verdict(Target(1.12, "time")) is True
    assert run.verdict(Target(1.1, "time")) is False
    assert run.verdict(Target(11_112, "us")) is True
    assert run.verdict(Target(11_111, "us")) is False
    assert run.verdict(Target(3.0, against="peer")) is True
    assert run.verdict(Target(3.1, against="peer")) is False
    assert run.verdict(Target(3.0, against="absent")) is None
    assert result(ref=[1.0]).verdict(Target(1.0, "us")) is None


def test_order_of_sides_is_reversed_every_round() -> None:
    assert turn_order(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert turn_order(["a", "b", "c"], 1) == ["c", "b", "a"]


class Recorder:
    """A side that records its runs in a common list and reports the given speeds."""

    def __init__(self, name: str, log: list[str], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at, self.turns = name, log, fails_at, 0

    def turn(self) -> Turn:
        self.log.append(self.name)
        self.turns += 1
        if self.turns == self.fails_at:
            raise OSError("gone")
        return Turn(seconds=2.0, amount=10.0 * self.turns)


def test_sides_alternate_and_warm_up_rounds_are_not_counted() -> None:
    log: list[str] = []
    speeds = interleave({name: Recorder(name, log) for name in "ab"}, 3, {})
    assert "".join(log) == "ab" + "ba" + "ab" + "ba" + "ab"
    assert speeds == {name: [15.0, 20.0, 25.0] for name in "ab"}  # runs 3 to 5


def test_failing_side_is_dropped_and_the_rest_continues() -> None:
    log: list[str] = []
    failures: dict[str, str] = {}
    speeds = interleave({"a": Recorder("a", log), "b": Recorder("b", log, fails_at=4)}, 3, failures)
    assert failures == {"b": "OSError: gone"}
    assert speeds == {"a": [15.0, 20.0, 25.0]}


def test_run_case_reports_set_up_failures() -> None:
    def fine() -> Work:
        return lambda: 1

    def unbuildable() -> Work:
        raise KeyError("thing")

    run = run_case(Case("t/c", "", "call", {"ref": fine, "us": unbuildable}, "ref", subject="us"), rounds=2)
    assert run.failures == {"us": "KeyError: 'thing'"}
    assert len(run.speeds["ref"]) == 2


def test_gauges_report_limits_and_failures() -> None:
    assert run_gauge(Gauge("t/g", "", "bytes", lambda: 3.0, 3.0)).met is True
    assert run_gauge(Gauge("t/g", "", "bytes", lambda: 3.1, 3.0)).met is False
    failed = run_gauge(Gauge("t/g", "", "bytes", lambda: [][0], 3.0))  # type: ignore[index]
    assert failed.met is None
    assert failed.failure == "IndexError: list index out of range"


def test_worker_answers_each_go_without_other_output(package: str) -> None:
    with RemoteSide(sys.executable, "t/adding", "dummy", package=package) as side:
        assert side.version == "1.2"
        for _ in range(3):
            turn = side.turn()
            assert turn.amount == 7
            assert 0 < turn.seconds < 10


def test_a_worker_waits_for_its_turn(package: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    (tmp_path / "dummy_peers" / "marking.py").write_text(
        f"VERSION = '0'\ndef setup():\n    return lambda: open({str(marks)!r}, 'a').write('x')\n"
        "SETUPS = {'t/case': setup}\n"
    )
    with RemoteSide(sys.executable, "t/case", "marking", package=package) as side:
        assert not marks.exists()
        side.turn()
        side.turn()
    assert marks.read_text() == "xx"


def test_a_side_may_be_a_variant_of_a_module(package: str) -> None:
    with RemoteSide(sys.executable, "t/adding", "dummy twice", package=package) as side:
        assert side.turn().amount == 14


@pytest.mark.parametrize(
    ("name", "message"),
    [("broken", "no such thing"), ("absent", "KeyError: 't/absent'")],
)
def test_failing_set_up_of_a_worker_is_reported(package: str, name: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"dummy: .*{message}"):
        RemoteSide(sys.executable, f"t/{name}", "dummy", package=package)


@pytest.mark.parametrize(
    ("name", "message"), [("breaking", "ValueError: in mid-turn"), ("dying", "status 3")]
)
def test_failing_turn_of_a_worker_is_reported(package: str, name: str, message: str) -> None:
    side = RemoteSide(sys.executable, f"t/{name}", "dummy", package=package)
    with side, pytest.raises(RuntimeError, match=message):
        side.turn()


def test_the_report_holds_figures_targets_and_failures() -> None:
    run = result(Target(0.85), Target(6.0, against="peer"), us=[90.0, 80.0], ref=[100.0, 100.0])
    run.failures["peer"] = "RuntimeError: not installed"
    gauge = run_gauge(Gauge("t/g", "a gauge", "bytes", lambda: 20.0, 16.0))
    rows = table_rows(run)
    assert rows[0][4:] == ("speed >= 0.85 x\nspeed >= 6 x peer", "met\nnot judged")
    assert rows[0][3] == "0.85 [0.825, 0.875]"
    assert rows[2][2] == "failed: RuntimeError: not installed"
    document = as_json([run, gauge], {**machine(), "rounds": 2})
    assert document["cases"][0]["targets"][0]["met"] is True
    assert document["cases"][0]["sides"]["us"]["rounds"] == [90.0, 80.0]
    assert document["cases"][1]["met"] is False
    assert "MISSED" in markdown([gauge], {})
    assert {"cpu", "cores", "python", "torch", "commit"} <= document["run"].keys()


def test_targets_are_described_in_words() -> None:
    assert wording(Target(1.1, "time")) == "time <= 1.1 x"
    assert wording(Target(20.0, "us")) == "time <= 20 us"
    assert wording(Target(4.0, against="torchrl")) == "speed >= 4 x torchrl"
