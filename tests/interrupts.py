"""Interrupts of calls: an exception at every line of the library that a call executes, as Ctrl-C raises it.

    for subject, place in interruptions(make, call):
        ...  # `call(subject)` was interrupted at `place`: check the subject's state

    for subject, places in double_interruptions(make, call, most):
        ...  # a second interrupt came in the clean-up of the first

`sys.settrace` counts the lines in the calling thread; other threads are not interrupted. The draws of lines are seeded
by the name of the test, so cases that execute the same code try different lines of it.
"""

from __future__ import annotations

import ast
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dis import opmap
from functools import lru_cache
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import gleanrl

SOURCE = str(Path(gleanrl.__file__).parent)

SHARE = max(0.05, min(1.0, float(os.environ.get("GLEANRL_CHAOS", 0))))

Subject = TypeVar("Subject")

Interruptions = Callable[..., Iterator[tuple[Any, Any]]]
"""The type of `interruptions` and of `double_interruptions`."""


class Place(NamedTuple):
    """The moment before a line is executed."""

    count: int
    """Number of the library's lines that were executed before it."""
    file: str
    line: int

    def __str__(self) -> str:
        return f"line {self.count}: {self.file}:{self.line}"


class Interrupt(KeyboardInterrupt):
    """Raised by this harness only. The library never raises it by itself."""


class _Lines:
    """A trace function that lists the executed lines of the library and raises before line number `stop`."""

    def __init__(self, stop: int | None, also: tuple[str, ...]) -> None:
        self.stop, self.sources = stop, (SOURCE, *also)
        self.places: list[Place] = []
        self.raised = False

    def calls(self, frame: FrameType, event: str, argument: Any) -> Any:
        return (
            self.lines
            if frame.f_code.co_filename.startswith(self.sources) and not _finalizes(frame)
            else None
        )

    def lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or _leaves_with(frame) or _leaves_handler(frame) or _begins_finally(frame):
            return self.lines
        code = frame.f_code
        place = Place(len(self.places), code.co_filename.removeprefix(SOURCE + "/"), frame.f_lineno)
        self.places.append(place)
        if place.count == self.stop:
            self.raised = True
            raise Interrupt(str(place))
        return self.lines


def _finalizes(frame: FrameType | None) -> bool:
    """Return whether a finalizer runs. Python reports an exception in a finalizer to no caller."""
    while frame is not None:
        name = frame.f_code.co_name
        if name == "__del__" or (name in ("__call__", "_remove", "remove") and _is_of_weakref(frame)):
            return True
        frame = frame.f_back
    return False


def _is_of_weakref(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).name in ("weakref.py", "_weakrefset.py")


def _leaves_handler(frame: FrameType) -> bool:
    """Return whether an `except` clause is about to be left. Python runs no signal handlers there.

    An exception raised there would make CPython 3.11 keep the handled exception, and its traceback, for ever.
    """
    return frame.f_code.co_code[frame.f_lasti] == opmap["POP_EXCEPT"]


def _leaves_with(frame: FrameType) -> bool:
    """Return whether a `with` statement is about to be left.

    Python runs signal handlers at calls and jumps, so none runs between the body of a `with` and its `__exit__`.
    """
    code, line = frame.f_code, frame.f_lineno
    return line in _with_lines(code.co_filename) and frame.f_lasti != _entry(code, line)


def _begins_finally(frame: FrameType) -> bool:
    """Return whether a `finally` block begins.

    Python runs signal handlers after the last call before it, or in the first call within it.
    """
    return frame.f_lineno in _finally_lines(frame.f_code.co_filename)


@lru_cache
def _finally_lines(file: str) -> frozenset[int]:
    tree = ast.parse(Path(file).read_text())
    return frozenset(
        node.finalbody[0].lineno for node in ast.walk(tree) if isinstance(node, ast.Try) and node.finalbody
    )


@lru_cache
def _with_lines(file: str) -> frozenset[int]:
    tree = ast.parse(Path(file).read_text())
    return frozenset(
        item.context_expr.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
    )


@lru_cache
def _entry(code: CodeType, line: int) -> int:
    return min(start for start, _, number in code.co_lines() if number == line)


def trace(
    call: Callable[[], Any], stop: int | None = None, also: tuple[str, ...] = ()
) -> tuple[list[Place], BaseException | None]:
    """Run `call` and interrupt it before line number `stop`; return its lines and the exception that it raised."""
    tracer = _Lines(stop, also)
    former, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # an interrupt in a finalizer would reach no caller
    try:
        sys.settrace(tracer.calls)
        try:
            call()
        finally:
            sys.settrace(former)
    except BaseException as error:
        return tracer.places, error
    finally:
        if collects:
            gc.enable()
    return tracer.places, None


def interruptions(
    make: Callable[[], Subject],
    call: Callable[[Subject], Any],
    most: int | None = None,
    close: Callable[[Subject], Any] | None = None,
    also: tuple[str, ...] = (),
) -> Iterator[tuple[Subject, Place]]:
    """Yield subjects whose call was interrupted, each at another line, together with that line.

    Args:
        make: returns a fresh subject, always in the same state.
        call: the interrupted call. It must not raise without an interrupt.
        most: number of lines to try in `make chaos`; other runs try a twentieth, at least three. The first executions
            of each line have priority, then further executions follow, evenly spread. The choice is deterministic. None
            tries every line.
        close: ends a subject whose call wasn't interrupted.
        also: files of other libraries whose lines are interrupted too.
    """
    whole = make()
    places, error = trace(lambda: call(whole), None, also)
    if close is not None:
        close(whole)
    if error is not None:
        raise error
    assert places, "the call executes no line of the library"
    for count in _chosen(places, most):
        subject = make()
        seen, error = trace(lambda subject=subject: call(subject), count, also)  # type: ignore[misc]
        if len(seen) <= count:  # it took another path: threads may be faster than before
            assert error is None, error
            if close is not None:
                close(subject)
            continue
        # Any other exception that leaves the call must have the interrupt as its cause.
        assert _comes_from_interrupt(error), f"{seen[count]}: came out as {error!r}"
        error = None  # its traceback would keep objects of the call alive
        yield subject, seen[count]


def _chosen(places: list[Place], most: int | None) -> list[int]:
    if most is not None:
        most = max(3, round(SHARE * most))
    if most is None or most >= len(places):
        return [place.count for place in places]
    first = {(place.file, place.line): place.count for place in reversed(places)}
    others = sorted({place.count for place in places} - set(first.values()))
    draws = random.Random(os.environ["PYTEST_CURRENT_TEST"])
    chosen = _spread(sorted(first.values()), min(most, len(first)), draws)
    return sorted(chosen + _spread(others, min(most - len(chosen), len(others)), draws))


def _spread(counts: list[int], number: int, draws: random.Random) -> list[int]:
    """Return `number` of the moments, evenly spread, so that each long run of lines (a half-done change) is tried."""
    begin = draws.random()
    return [counts[int((begin + k) * len(counts) / number)] for k in range(number)]


def _comes_from_interrupt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, Interrupt):
            return True
        error = error.__cause__
    return False


def in_turn(rows: Sequence[Any], columns: Sequence[Any], turns: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return every pair of the first two parameters with one value of the third, in rotation.

    `make chaos` combines each pair with every value. If `rows` and `columns` are long enough, each value of `turns`
    meets every row and every column.
    """
    return [
        (row, column, turn)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        for k, turn in enumerate(turns)
        if SHARE == 1 or (i + j) % len(turns) == k
    ]


def in_another_thread(call: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Return the result of a call in another thread; fail if it doesn't end, because a lock is then still held."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the call hangs in another thread: a lock is still held"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


# ------------------------------------------------------------------ two interrupts
SECOND_SHARE = 1.0 if SHARE == 1 else 0.05
"""Fraction of second interrupts to try: all in `make chaos`, a twentieth otherwise."""
MOST_AFTER_ONE = 5
"""Number of second interrupts to try after each first one, except in `make chaos`: a start has hundreds of moments."""


class Moment(NamedTuple):
    """A point of a clean-up at which Python runs signal handlers."""

    count: int
    """Number of moments between the first interrupt and this one."""
    event: str
    """`call`: a function begins; `c_return`: a function of C has returned."""
    stack: tuple[tuple[str, int], ...]
    """Files and lines of the library, the innermost first."""

    def __str__(self) -> str:
        return f"moment {self.count} of the clean-up ({self.event}): {' < '.join(f'{f}:{n}' for f, n in self.stack)}"


class _CleanUp:
    """A profile function that lists the moments of a clean-up and raises at moment number `stop`.

    Python removes the trace function that raised the first interrupt, but not the profile function. Its events are the
    moments at which the interpreter checks for signals: a function begins, or a function of C has returned.
    """

    def __init__(self, lines: _Lines, stop: int | None) -> None:
        self._lines, self._stop = lines, stop
        self.moments: list[Moment] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._lines.raised or event not in ("call", "c_return"):
            return
        asker = frame.f_back if event == "call" else frame
        own = frame.f_code.co_filename.startswith(self._lines.sources)
        if not own and (asker is None or not asker.f_code.co_filename.startswith(self._lines.sources)):
            return
        if _finalizes(frame) or (event == "call" and frame.f_code.co_flags & CO_GENERATOR):
            return
        if isinstance(sys.exc_info()[1], GeneratorExit):
            return  # a generator that is being closed passes no interrupt to its caller
        moment = Moment(len(self.moments), event, _stack(frame, self._lines.sources))
        self.moments.append(moment)
        if moment.count == self._stop:
            raise Interrupt(str(moment))


def _stack(frame: FrameType | None, sources: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(sources):
            found.append((name.removeprefix(SOURCE + "/"), frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def trace_twice(
    call: Callable[[], Any], first: int, second: int | None = None, also: tuple[str, ...] = ()
) -> tuple[list[Place], list[Moment], BaseException | None]:
    """Run `call`; interrupt it before line number `first`, and its clean-up at moment number `second`."""
    tracer = _Lines(first, also)
    clean_up = _CleanUp(tracer, second)
    former, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    try:
        sys.setprofile(clean_up)
        sys.settrace(tracer.calls)
        try:
            call()
        finally:
            tracer.raised = False  # the library's clean-up ends here
            sys.settrace(former)
            sys.setprofile(None)
    except BaseException as error:
        return tracer.places, clean_up.moments, error
    finally:
        if collects:
            gc.enable()
    return tracer.places, clean_up.moments, None


def double_interruptions(
    make: Callable[[], Subject],
    call: Callable[[Subject], Any],
    most: int,
    close: Callable[[Subject], Any] | None = None,
    also: tuple[str, ...] = (),
) -> Iterator[tuple[Subject, str]]:
    """Yield subjects whose call was interrupted twice, and the places.

    The first interrupt comes before a line that is drawn at random. The second one comes at each moment of the clean-up
    that the first one starts. Moments with the same lines on the stack count as one.

    Args:
        make: see `interruptions`.
        call: see `interruptions`.
        most: number of first interrupts to draw in `make chaos`; other runs draw a twentieth, at least two.
        close: see `interruptions`.
        also: see `interruptions`.
    """
    whole = make()
    places, error = trace(lambda: call(whole), None, also)
    if close is not None:
        close(whole)
    if error is not None:
        raise error
    draws = random.Random(os.environ["PYTEST_CURRENT_TEST"])
    distinct = [
        *{(place.file, place.line): place.count for place in draws.sample(places, len(places))}.values()
    ]
    others = [place.count for place in places if place.count not in {*distinct}]
    firsts = (draws.sample(distinct, len(distinct)) + draws.sample(others, len(others)))[
        : max(2, round(SECOND_SHARE * most))
    ]
    known: set[Any] = set()
    for first in firsts:
        subject = make()
        seen, moments, error = trace_twice(lambda subject=subject: call(subject), first, None, also)  # type: ignore[misc]
        if error is None:  # it took another path: threads may be faster than before
            if close is not None:
                close(subject)
            continue
        assert _comes_from_interrupt(error), f"{seen[-1]}: came out as {error!r}"
        error = None
        yield subject, f"{seen[-1]}"
        new = [moment for moment in moments if (moment.event, moment.stack) not in known]
        known.update((moment.event, moment.stack) for moment in new)
        if SECOND_SHARE < 1:
            number = max(2, min(MOST_AFTER_ONE, round(SECOND_SHARE * len(new))))
            new = draws.sample(new, min(len(new), number))
        for moment in new:
            subject = make()
            seen, found, error = trace_twice(
                lambda subject=subject: call(subject),
                first,
                moment.count,
                also,  # type: ignore[misc]
            )
            if error is None:
                if close is not None:
                    close(subject)
                continue
            assert _comes_from_interrupt(error), f"{seen[-1]}, {moment}: came out as {error!r}"
            error = None
            yield subject, f"{seen[-1]}, {found[-1] if found else 'no clean-up'}"
