"""Compares the sides of a case in alternating rounds: what a case is, how it runs, what its figures mean.

One machine's speed drifts by a third from minute to minute, so no figure stands alone: the sides of a case
take turns, in an order reversed each round, and what counts is the median over the rounds of the ratio within
a round. Two sides never work at once, be they in this process or in another interpreter (`remote.py`).
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
"""Does a fixed amount of work and returns the amount, in the case's unit."""
Setup = Callable[[], Work]
"""Builds all that a side needs; not timed."""

WARM_UP = 2


@dataclass(frozen=True)
class Target:
    """What the case's subject has to reach.

    Args:
        bound: the figure.
        quantity: "speed": at least `bound` times the speed of `against`; "time": at most `bound` times its
            time; "us": at most `bound` microseconds a unit of work.
        against: the side compared with; None for the case's reference. A target against a side that did not
            run is not judged.
    """

    bound: float
    quantity: Literal["speed", "time", "us"] = "speed"
    against: str | None = None


@dataclass(frozen=True)
class Growth:
    """From a small size to a large one, the time of one thing may grow `bound` times as much as that of another.

    Args:
        bound: the figure.
        sides: the sides of the first thing, small and large.
        against: those of the other.
    """

    bound: float
    sides: tuple[str, str]
    against: tuple[str, str]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        name: "group/name".
        title: one line for people.
        unit: what a side's work is counted in: "frame" (shown as frames/s) or "call" (shown as us a call).
        sides: name -> set-up of the sides that run in this process, in their order of turns.
        reference: the side that ratios refer to.
        targets: what `subject` has to reach; none for a case that only informs.
        peers: sides that another interpreter can add: modules of `benchmarks.peers`, "module variant" for several of
            one.
        subject: the side that the targets are about.
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
    """A figure that is read, not raced: `measure()` must not exceed `bound`, both in `unit`."""

    name: str
    title: str
    unit: str
    measure: Callable[[], float]
    bound: float


class Spread(NamedTuple):
    """Median and quartiles of a series."""

    median: float
    low: float
    high: float


@dataclass
class CaseResult:
    """The speeds of a case's sides, round by round.

    Args:
        case: what ran.
        speeds: side -> units of work a second, one figure a round.
        failures: side -> why it has no figures.
        versions: side in another interpreter -> the version that ran.
    """

    case: Case
    speeds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def speed(self, side: str) -> Spread:
        """Returns the spread of a side's speed, in units of work a second."""
        return spread(self.speeds[side])

    def ratio(self, side: str, against: str | None = None) -> Spread:
        """Returns the spread of the speed of `side` over that of `against` (else the reference)."""
        return spread(ratios(self.speeds[side], self.speeds[against or self.case.reference]))

    def growth(self, sides: tuple[str, str]) -> list[float]:
        """Returns the time of the second side over that of the first, one figure a round."""
        return ratios(self.speeds[sides[0]], self.speeds[sides[1]])

    def verdict(self, target: Target | Growth) -> bool | None:
        """Tells whether the subject met a target; None if a side that it needs has no figures."""
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
    """What a gauge read, or why it could not."""

    gauge: Gauge
    value: float | None = None
    failure: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the value keeps the bound; None without a value."""
        return None if self.value is None else self.value <= self.gauge.bound


class Side(Protocol):
    """A side ready to take turns."""

    def turn(self) -> Turn:
        """Does the side's work once and returns the seconds it took and the amount done."""


class LocalSide:
    """A side in this process, set up at construction."""

    def __init__(self, setup: Setup) -> None:
        self._work = setup()

    def turn(self) -> Turn:
        """Does the work once; garbage of others is collected before the clock starts."""
        gc.collect()
        start = now()
        amount = self._work()
        return Turn(now() - start, amount)


def ratios(series: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Divides two series round by round."""
    return [a / b for a, b in zip(series, reference, strict=True)]


def spread(series: Sequence[float]) -> Spread:
    """Returns median and quartiles (linear between neighbours); one figure is its own quartiles."""
    if len(series) == 1:
        return Spread(series[0], series[0], series[0])
    low, median, high = statistics.quantiles(series, n=4, method="inclusive")
    return Spread(median, low, high)


def turn_order(names: Sequence[str], number: int) -> list[str]:
    """Returns the order of turns of round `number`: there and back, so that nobody always goes first."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def interleave(sides: Mapping[str, Side], rounds: int, failures: dict[str, str]) -> dict[str, list[float]]:
    """Lets every side take its turn in each of `rounds` rounds.

    A side that raises leaves the comparison: its reason goes into `failures` and its figures are dropped.

    Returns:
        Side -> units of work a second, one figure a round.
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
    """Puts an exception into one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def run_case(case: Case, rounds: int, peers: str | None = None) -> CaseResult:
    """Runs a case.

    Args:
        case: what to compare.
        rounds: counted rounds; two more warm up.
        peers: another interpreter, in which the case's peers run; None leaves them out.
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
            sides.clear()
    finally:
        gc.unfreeze()
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
    """Reads a gauge; a failure is part of the result."""
    try:
        return GaugeResult(gauge, value=gauge.measure())
    except Exception as error:
        return GaugeResult(gauge, failure=reason(error))
