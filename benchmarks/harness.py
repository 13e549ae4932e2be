"""Cases, gauges and their results, and the rounds in which the sides of a case alternate.

A *case* compares *sides*, for example a collector and a hand-written loop. In each *round* every side takes one *turn*:
it does its work once, under the clock. Each round reverses the order of the sides. A *gauge* is a single reading.

The speed of a machine drifts by a third from minute to minute, so the speed of one side alone means little. The result
is the median over all rounds of the ratio within a round. Two sides never work at the same time, whether they run in
this process or in another interpreter (`remote.py`).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch

from benchmarks.clock import now
from benchmarks.remote import RemoteSide, Turn
from benchmarks.settle import settle_allocator, settle_garbage

Work = Callable[[], float]
"""Does a fixed amount of work and returns that amount, in the case's unit."""
Setup = Callable[[], Work]
"""Builds everything that a side needs, outside the timed section, and returns its work."""

WARM_UP = 2


@dataclass(frozen=True)
class Target:
    """A bound that the case's subject has to reach.

    Args:
        bound: the bound.
        quantity: "speed": at least `bound` times the speed of `against`. "time": at most `bound` times its time. "us":
            at most `bound` microseconds per unit of work.
        against: the side to compare with; None for the case's reference. If that side did not run, the target is not
            judged.
    """

    bound: float
    quantity: Literal["speed", "time", "us"] = "speed"
    against: str | None = None


@dataclass(frozen=True)
class Growth:
    """A bound on how the subject's time grows from a small size to a large one, relative to a reference.

    Growth is the time at the large size over the time at the small size.

    Args:
        bound: the largest allowed ratio of the subject's growth to the reference's growth.
        sides: the subject's sides at the small and at the large size.
        against: the reference's sides at the small and at the large size.
    """

    bound: float
    sides: tuple[str, str]
    against: tuple[str, str]


@dataclass(frozen=True)
class Case:
    """A comparison of several sides.

    Args:
        name: "group/name".
        title: one line that describes the case in reports.
        unit: the unit of a side's work: "frame" (shown as frames/s) or "call" (shown as time per call).
        sides: name -> set-up of each side that runs in this process, in the order of the first round.
        reference: the side that ratios refer to.
        targets: bounds for `subject`; empty for a case that only informs.
        peers: sides that need another interpreter: modules of `benchmarks.peers`. If a module has several variants, the
            side is "module variant".
        subject: the side that the targets apply to.
        threads: torch threads of every side.
    """

    name: str
    title: str
    unit: Literal["frame", "call"]
    sides: Mapping[str, Setup]
    reference: str
    targets: tuple[Target | Growth, ...] = ()
    peers: tuple[str, ...] = ()
    subject: str = "gleanrl"
    threads: int = 1


@dataclass(frozen=True)
class Gauge:
    """A single reading: `measure()` must not exceed `bound`, both in `unit`."""

    name: str
    title: str
    unit: str
    measure: Callable[[], float]
    bound: float


class Spread(NamedTuple):
    """The median and the quartiles of a series."""

    median: float
    low: float
    high: float


@dataclass
class CaseResult:
    """The speeds of a case's sides, round by round.

    Args:
        case: the case that ran.
        speeds: side -> units of work per second, one figure per round.
        failures: side -> the reason why it has no figures.
        versions: side in another interpreter -> the version of the library that ran.
    """

    case: Case
    speeds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def speed(self, side: str) -> Spread:
        """Return the spread of a side's speed, in units of work per second."""
        return spread(self.speeds[side])

    def ratio(self, side: str, against: str | None = None) -> Spread:
        """Return the spread of the speed of `side` over that of `against`, by default the reference."""
        return spread(ratios(self.speeds[side], self.speeds[against or self.case.reference]))

    def growth(self, sides: tuple[str, str]) -> list[float]:
        """Return the time of the second side over that of the first, one figure per round."""
        return ratios(self.speeds[sides[0]], self.speeds[sides[1]])

    def verdict(self, target: Target | Growth) -> bool | None:
        """Return whether the subject met a target, or None if a side that the target needs has no figures."""
        if isinstance(target, Growth):
            if not {*target.sides, *target.against} <= self.speeds.keys():
                return None
            return (
                spread(ratios(self.growth(target.sides), self.growth(target.against))).median <= target.bound
            )
        against = target.against or self.case.reference
        needed = {self.case.subject} | (set() if target.quantity == "us" else {against})
        if not needed <= self.speeds.keys():
            return None
        if target.quantity == "us":
            return 1e6 / self.speed(self.case.subject).median <= target.bound
        ratio = self.ratio(self.case.subject, against).median
        return ratio >= target.bound if target.quantity == "speed" else 1 / ratio <= target.bound


@dataclass
class GaugeResult:
    """The value of a gauge, or the reason why it has none."""

    gauge: Gauge
    value: float | None = None
    failure: str | None = None

    @property
    def met(self) -> bool | None:
        """Return whether the value is within the bound, or None without a value."""
        return None if self.value is None else self.value <= self.gauge.bound


class Side(Protocol):
    """A side that is set up and can take turns."""

    def turn(self) -> Turn:
        """Do the side's work once, and return its seconds and its amount."""


class LocalSide:
    """A side in this process. The constructor sets it up."""

    def __init__(self, setup: Setup) -> None:
        self._work = setup()

    def turn(self) -> Turn:
        """Do the work once. Garbage of other sides is collected before the clock starts."""
        gc.collect()
        start = now()
        amount = self._work()
        return Turn(now() - start, amount)


def ratios(series: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Divide two series round by round."""
    return [a / b for a, b in zip(series, reference, strict=True)]


def spread(series: Sequence[float]) -> Spread:
    """Return the median and the quartiles, interpolated linearly. A single figure is its own quartiles."""
    if len(series) == 1:
        return Spread(series[0], series[0], series[0])
    low, median, high = statistics.quantiles(series, n=4, method="inclusive")
    return Spread(median, low, high)


def turn_order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of turns in round `number`. Odd rounds reverse it, so that no side is always first."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def interleave(sides: Mapping[str, Side], rounds: int, failures: dict[str, str]) -> dict[str, list[float]]:
    """Let every side take one turn in each of `rounds` rounds, after `WARM_UP` rounds that don't count.

    A side that raises leaves the comparison. The reason is added to `failures`, and the side's figures are dropped.

    Returns:
        Side -> units of work per second, one figure per round.
    """
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-WARM_UP, rounds):
        for name in turn_order(list(speeds), number):
            try:
                turn = sides[name].turn()
            except Exception as error:
                failures[name] = reason(error)
                del speeds[name]
                continue
            if number >= 0:
                speeds[name].append(turn.amount / turn.seconds)
    return speeds


def reason(error: BaseException) -> str:
    """Return an exception as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def run_case(case: Case, rounds: int, peers: str | None = None) -> CaseResult:
    """Run a case and return its result, which includes the failures of sides.

    Args:
        case: the case to run.
        rounds: counted rounds. Two more rounds warm up.
        peers: the interpreter in which the case's peers run; None leaves the peers out.
    """
    result = CaseResult(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    settle_allocator()
    try:
        with ExitStack() as stack:
            sides = _set_up(case, peers, stack, result)
            settle_garbage()
            result.speeds = interleave(sides, rounds, result.failures)
            sides.clear()  # frees the sides before the next case is set up
    finally:
        gc.unfreeze()  # `settle_garbage` froze the objects of this case
        gc.collect()
        torch.set_num_threads(threads)
    return result


def _set_up(case: Case, peers: str | None, stack: ExitStack, result: CaseResult) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for name, setup in case.sides.items():
        try:
            sides[name] = LocalSide(setup)
        except Exception as error:
            result.failures[name] = reason(error)
    for name in case.peers if peers else ():
        try:
            remote = stack.enter_context(RemoteSide(str(peers), case.name, name, threads=case.threads))
        except Exception as error:
            result.failures[name] = reason(error)
        else:
            sides[name] = remote
            result.versions[name] = remote.version
    return sides


def run_gauge(gauge: Gauge) -> GaugeResult:
    """Read a gauge and return its result. An exception becomes the result's failure."""
    try:
        return GaugeResult(gauge, value=gauge.measure())
    except Exception as error:
        return GaugeResult(gauge, failure=reason(error))
