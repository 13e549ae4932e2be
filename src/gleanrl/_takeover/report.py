"""Messages about the names that a program imports from the data layer, and a summary with a sampling profile.

A thread samples the stack of the main thread, and assigns the time since the last sample to the code that it finds.
Sampling wraps no function, so that the program behaves as without it.
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
_ROOMS = {  # the title of a module in the table; the first prefix that matches counts
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
)  # frames of the launcher and of imports, which count for no title


class Times:
    """Samples the main thread from a separate thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._watch, name="gleanrl-times", daemon=True)
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._start = clock.monotonic()
        self._goes_on = True

    def start(self) -> None:
        """Start the sampling thread; may be called once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling, and wait for the thread: a thread that runs at interpreter exit could crash the process."""
        self._goes_on = False
        self._thread.join()

    def table(self) -> str:
        """Return the seconds as a table: one line per part that the program called, with the code that ran inside.

        The total counts from the creation of this object, also after `stop`.
        """
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
            frame = sys._current_frames().get(self._main)  # None while the thread runs no Python code
            now = clock.monotonic()
            self._spent[_location(frame)] += now - last
            last = now


def _location(frame: FrameType | None) -> tuple[str, str]:
    """Return two titles for a stack: the part that the program called, and the part whose code runs.

    Args:
        frame: the top of the stack.
    """
    outer = inner = ""
    while frame is not None:
        room = _room(frame.f_globals.get("__name__", ""))
        inner = inner or room
        if room not in ("", _PROGRAM):
            outer = room  # the loop runs towards the program, so the last assignment is the called part
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
    """The record of imported names in one process, and its messages.

    Any thread may call `took`. It needs no lock, because two threads that record the same name write the same value.

    Attributes:
        silent: whether to print no messages; True in processes that the program started.
    """

    def __init__(self) -> None:
        self.silent = False
        self._announced = False
        self._classes: dict[str, str] = {}
        """The names that the program used, each with the module that defines its object."""

    def began(self) -> None:
        """Print one line at the first import of the data layer.

        If the environment asks for a summary, also print the served names, start the sampling thread, and print the
        summary at exit.
        """
        if self._announced or self.silent:
            return
        self._announced = True
        release = importlib.metadata.version(ROOT)
        reports = os.environ.get(VARIABLE) == REPORT
        hint = "It serves:" if reports else f"{VARIABLE}={REPORT} lists its names and adds a summary."
        _say(f"gleanrl {__version__} replaces the data layer of torchrl {release}. {hint}")
        if reports:
            for package in PACKAGES:
                names = " ".join(sorted(name for name in served(package) if name[0] != "_"))
                _say(
                    textwrap.fill(
                        f"{package}: {names}", _WIDTH, initial_indent="  ", subsequent_indent="    "
                    )
                )
            _say("Other names stay torchrl's, and are reported at their first use.")
            times = Times()
            times.start()
            atexit.register(self._report, times)

    def took(self, path: str, name: str, value: Any) -> Any:
        """Record that the program used a name, and return the object.

        The first use of a name is reported if its object is TorchRL's. Objects without `__module__` aren't recorded.
        """
        origin = getattr(value, "__module__", None)
        if isinstance(origin, str) and f"{path}.{name}" not in self._classes:
            self._classes[f"{path}.{name}"] = origin
            if _is_torchrl(origin) and not self.silent:
                _say(f"gleanrl: {path}.{name} stays torchrl's")
        return value

    def _report(self, times: Times) -> None:
        times.stop()
        for title, wanted in (("gleanrl's classes", False), ("torchrl's classes", True)):
            names = sorted(name for name, origin in self._classes.items() if _is_torchrl(origin) is wanted)
            text = ", ".join(name.removeprefix(f"{ROOT}.") for name in names) or "none"
            _say(textwrap.fill(f"{title}: {text}", _WIDTH, subsequent_indent="    "))
        _say(times.table())


def _is_torchrl(origin: str) -> bool:
    return origin.partition(".")[0] == ROOT


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


NOTES = Notes()
