"""What a program took from the data layer: said as it happens, and summed up at the end where it is asked for."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import sys
import textwrap
from typing import Any

from gleanrl import __version__
from gleanrl.substitute.names import PACKAGES, ROOT, served
from gleanrl.substitute.times import Times

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
