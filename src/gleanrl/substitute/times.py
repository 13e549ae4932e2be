"""How the time of a program is spent: its main thread is looked at now and then.

Nothing is wrapped, so that nothing runs otherwise than without; what a look finds stands for the time since the last.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import FrameType

from gleanrl.system import clock

_EVERY_S = 0.005
_ROOMS = {  # the first that fits
    "gleanrl.collectors": "collectors",
    "gleanrl.data": "buffers and specs",
    "gleanrl.envs": "environments",
    "gleanrl.rollouts": "rollouts",
    "gleanrl.workers": "waiting for processes",
    "gleanrl.system": "waiting for processes",
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
    "gleanrl.substitute",
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
