"""Interrupts of calls: an exception at every line of the library that a call executes, as Ctrl-C raises it.

    for subject, place in interruptions(make, call):
        ...  # `call(subject)` was interrupted at `place`: look at what it left

The lines are counted by `sys.settrace` in the calling thread; other threads aren't touched. Cases that run the same
code try different lines of it: each test draws its own.
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
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import gleanrl

SOURCE = str(Path(gleanrl.__file__).parent)

SHARE = max(0.15, min(1.0, float(os.environ.get("GLEANRL_CHAOS", 0))))

Subject = TypeVar("Subject")


class Place(NamedTuple):
    """The moment before a line."""

    count: int
    """How many lines of the library came before it."""
    file: str
    line: int

    def __str__(self) -> str:
        return f"line {self.count}: {self.file}:{self.line}"


class Interrupt(KeyboardInterrupt):
    """What the harness raises: nothing in the library can raise it by itself."""


class _Lines:
    """A trace function that lists the lines of the library, and raises before the one at `stop`."""

    def __init__(self, stop: int | None, also: tuple[str, ...]) -> None:
        self.stop, self.sources = stop, (SOURCE, *also)
        self.places: list[Place] = []

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
            raise Interrupt(str(place))
        return self.lines


def _finalizes(frame: FrameType | None) -> bool:
    """Whether a finalizer runs: what is raised there is told nobody."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _leaves_handler(frame: FrameType) -> bool:
    """Whether an `except` clause is about to be left: there are no signal handlers there either.

    CPython 3.11 would keep the exception that was handled, and what its traceback refers to, for ever.
    """
    return frame.f_code.co_code[frame.f_lasti] == opmap["POP_EXCEPT"]


def _leaves_with(frame: FrameType) -> bool:
    """Whether a `with` statement is about to be left.

    Python runs signal handlers at calls and jumps: between the body of a `with` and its `__exit__` there are none.
    """
    code, line = frame.f_code, frame.f_lineno
    return line in _with_lines(code.co_filename) and frame.f_lasti != _entry(code, line)


def _begins_finally(frame: FrameType) -> bool:
    """Whether a `finally` begins: signal handlers run after the last call before it, or in the first one within."""
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
    """Make a call, interrupt it before its line number `stop`; return its lines and what it raised."""
    tracer = _Lines(stop, also)
    former, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a finalizer that is interrupted tells nobody
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
    """Yield subjects whose call was interrupted, each at another line, and the line.

    Args:
        make: returns a fresh subject, each time the same.
        call: what is interrupted; by itself it raises nothing.
        most: lines to try in `make chaos`, a seventh otherwise; the first execution of each line comes first,
            then others, spread evenly and always the same. None for every line, everywhere.
        close: what ends a subject whose call wasn't interrupted.
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
        if len(seen) <= count:  # it went another way, and ended: threads may be faster than before
            assert error is None, error
            if close is not None:
                close(subject)
            continue
        # Whatever else comes out of the call has to say that it was interrupted.
        assert _comes_from_interrupt(error), f"{seen[count]}: came out as {error!r}"
        error = None  # its traceback would keep alive what the call had made
        yield subject, seen[count]


def _chosen(places: list[Place], most: int | None) -> list[int]:
    if most is not None:
        most = round(SHARE * most)
    if most is None or most >= len(places):
        return [place.count for place in places]
    first = {(place.file, place.line): place.count for place in reversed(places)}
    others = sorted({place.count for place in places} - set(first.values()))
    draws = random.Random(os.environ["PYTEST_CURRENT_TEST"])
    chosen = _spread(sorted(first.values()), min(most, len(first)), draws)
    return sorted(chosen + _spread(others, min(most - len(chosen), len(others)), draws))


def _spread(counts: list[int], number: int, draws: random.Random) -> list[int]:
    """Some of the moments, evenly: of several lines in a row, between which a change is half done, one is tried."""
    begin = draws.random()
    return [counts[int((begin + k) * len(counts) / number)] for k in range(number)]


def _comes_from_interrupt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, Interrupt):
            return True
        error = error.__cause__
    return False


def in_turn(rows: Sequence[Any], columns: Sequence[Any], turns: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return every pair of the first two parameters with a value of the third, by turns; in `make chaos` with each.

    The values of the third one meet all of the first and all of the second ones, where there are enough of these.
    """
    return [
        (row, column, turn)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        for k, turn in enumerate(turns)
        if SHARE == 1 or (i + j) % len(turns) == k
    ]


def in_another_thread(call: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Return what a call returns in another thread; fails if it doesn't end: somebody holds a lock."""
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
