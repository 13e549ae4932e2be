"""What a program took from the data layer: said as it happens, and summed up at the end where it is asked for.

How the time of a program is spent: its main thread is looked at now and then.

Nothing is wrapped, so that nothing runs otherwise than without; what a look finds stands for the time since the last.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import os
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from gleanrl import __version__
from gleanrl._os import clock
from gleanrl._takeover.names import PACKAGES, ROOT, served

_EVERY_S = 0.005
_ROOMS = {  # the first that fits
    "gleanrl.collectors": "collectors",
    "gleanrl.data": "buffers and specs",
    "gleanrl.envs": "environments",
    "gleanrl._rollout": "rollouts",
    "gleanrl._process": "waiting for processes",
    "gleanrl._os": "waiting for processes",
    "torchrl.collectors": "torchrl's collectors",
    "torchrl.data": "torchrl's buffers and specs",
    "torchrl.envs": "torchrl's environments",
    "torchrl.objectives": "losses",
    "torchrl": "modules",
    "tensordict": "modules",
    "gymnasium": "gymnasium",
    "torch.optim": "optimizers",
    "torch.nn": "modules",
    "torch": "backward and tensors",
}
_PROGRAM = "the program's own code"
_AROUND = (
    "runpy",
    "gleanrl.__main__",
    "gleanrl._takeover",
    "gleanrl.takeover",
)  # below the program, or imports


class Times:
    """Looks at the main thread from a thread of its own, from `start` to `stop`."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._watch, name="gleanrl-times", daemon=True)
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._start = clock.monotonic()
        self._goes_on = True

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End; a thread that the interpreter's end finds running could end it badly."""
        self._goes_on = False
        self._thread.join()

    def table(self) -> str:
        """Return the seconds as a table: what the program called, and below it what ran in there."""
        total = clock.monotonic() - self._start
        called: dict[str, float] = defaultdict(float)
        for (outer, _), seconds in self._spent.items():
            called[outer] += seconds
        lines = [f"{'time since the import':34} {total:8.2f} s"]
        for outer, seconds in _falling(called):
            lines.append(f"  {outer:32} {seconds:8.2f} s {seconds / total:6.1%}")
            inside = {inner: spent for (by, inner), spent in self._spent.items() if by == outer}
            if list(inside) != [outer]:
                lines += [f"    {inner:30} {spent:8.2f} s" for inner, spent in _falling(inside)]
        return "\n".join(lines)

    def _watch(self) -> None:
        last = clock.monotonic()
        while self._goes_on:
            clock.sleep(_EVERY_S)
            frame = sys._current_frames().get(self._main)  # none between calls of Python code
            now = clock.monotonic()
            self._spent[_place(frame)] += now - last
            last = now


def _place(frame: FrameType | None) -> tuple[str, str]:
    """Return what the program called, and in which room the code is that runs, by the top of a stack."""
    outer = inner = ""
    while frame is not None:
        room = _room(frame.f_globals.get("__name__", ""))
        inner = inner or room
        if room not in ("", _PROGRAM):
            outer = room  # the last one that is found is the nearest to the program
        frame = frame.f_back
    return outer or _PROGRAM, inner or _PROGRAM


@functools.cache
def _room(module: str) -> str:
    if module.startswith(_AROUND):
        return ""
    return next((room for path, room in _ROOMS.items() if f"{module}.".startswith(f"{path}.")), _PROGRAM)


def _falling(seconds: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


VARIABLE = "GLEANRL_TAKEOVER"
REPORT = "report"
_WIDTH = 118


class Notes:
    """The notes of one process. Any thread may take names; a note that two write is the same note.

    Attributes:
        quiet: whether nothing is said, as in processes that a program started.
    """

    def __init__(self) -> None:
        self.quiet = False
        self._told = False
        self._classes: dict[str, str] = {}
        """Names that were taken, and where what they stand for is defined."""

    def began(self) -> None:
        """Say once, with the first import of the data layer, which names are served."""
        if self._told or self.quiet:
            return
        self._told = True
        release = importlib.metadata.version(ROOT)
        _say(f"gleanrl {__version__} stands in for the data layer of torchrl {release}. It serves:")
        for package in PACKAGES:
            names = " ".join(sorted(name for name in served(package) if name[0] != "_"))
            _say(textwrap.fill(f"{package}: {names}", _WIDTH, initial_indent="  ", subsequent_indent="    "))
        _say(f"What else a program takes stays torchrl's, and is named below; {VARIABLE}={REPORT} sums up.")
        if os.environ.get(VARIABLE) == REPORT:
            times = Times()
            times.start()
            atexit.register(self._report, times)

    def took(self, path: str, name: str, value: Any) -> Any:
        """Note that the program took a name; return its value."""
        origin = getattr(value, "__module__", None)
        if isinstance(origin, str) and f"{path}.{name}" not in self._classes:
            self._classes[f"{path}.{name}"] = origin
            if _is_theirs(origin) and not self.quiet:
                _say(f"gleanrl: {path}.{name} stays torchrl's")
        return value

    def _report(self, times: Times) -> None:
        times.stop()
        for title, wanted in (("gleanrl's classes", False), ("torchrl's classes", True)):
            names = sorted(name for name, origin in self._classes.items() if _is_theirs(origin) is wanted)
            text = ", ".join(name.removeprefix(f"{ROOT}.") for name in names) or "none"
            _say(textwrap.fill(f"{title}: {text}", _WIDTH, subsequent_indent="    "))
        _say(times.table())


def _is_theirs(origin: str) -> bool:
    return origin.partition(".")[0] == ROOT


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


NOTES = Notes()
