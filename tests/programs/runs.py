"""Runs the programs of this folder: on TorchRL, under takeover, and ported by a change of imports.

`python -m tests.programs.runs [NAMES]` prints a table of returns and seconds. It needs TorchRL.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tests.takeovers import run

HERE = Path(__file__).parent
WAYS = ("torchrl", "takeover", "ported")
MOST_CPU_S = 300
"""CPU limit of a program's process in seconds. The longest program takes a quarter of it."""
MOST_S = 2_700
"""Time limit of a program in seconds on a busy machine. It ends programs that hang."""


class Program(NamedTuple):
    """A program of this folder, the return that it reaches, and its arguments."""

    name: str
    reaches: float
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    needs_core: bool = False
    """Whether it needs TorchRL's compiled core, which fits one release of torch."""


PROGRAMS = {
    "-".join([program.name, *program.arguments[1:]]): program
    for program in (
        Program("dqn", 100),
        Program("dqn_per", 150, needs_core=True),
        Program("ddpg", -1),
        Program("td3", -1.5),
        Program("sac", -2.5),
        Program("sac_discrete", 0.5),
        Program("redq", -5),
        Program("ppo_continuous", -2),
        Program("ppo_discrete", 80),
        Program("a2c", 150, is_module=True),
        Program("ppo_recurrent", 0.95),
        Program("dqn_recurrent", 0.95),
        Program("offline", -5),
        Program("offline", -7, ("--algorithm", "cql")),
        Program("agents", -1),
        Program("pixels", 0.5),
        Program("vecnorm", 60),
        Program("ppo_multi", 200),
        Program("dqn_multi", 80),
        Program("actors", 100),
        Program("her", 0.8),
        Program("trainer", 120),
        Program("dagger", 150),
    )
}


class Outcome(NamedTuple):
    """The outcome of a run."""

    value: float
    seconds: float
    errors: str


@cache
def has_core() -> bool:
    """Return whether TorchRL's compiled core can be loaded with this torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchrl._torchrl")
        except ImportError:
            return False
    return True


def ported(source: str) -> str:
    """Return a program with its import root changed."""
    return re.sub(r"\btorchrl\.(collectors|data|envs)\b", r"gleanrl.\1", source)


def outcome(program: Program, way: str, folder: Path) -> Outcome:
    """Run a program; `folder` is for its files.

    Raises:
        AssertionError: it failed, or printed no return.
    """
    start = monotonic()
    path = folder / f"{program.name}.py"
    source = (HERE / path.name).read_text()
    path.write_text(ported(source) if way == "ported" else source)
    target = ("-m", program.name) if program.is_module else (path,)
    command = ("-m", "gleanrl", "run", *target) if way == "takeover" else target
    done = run(*command, *program.arguments, folder=folder, timeout=MOST_S, cpu_s=MOST_CPU_S)
    assert done.returncode == 0, f"{program.name}, {way}: {done.stderr[-3000:]}"
    found = re.findall(r"^return (\S+)$", done.stdout, re.M)
    assert found, f"{program.name}, {way}: no return in {done.stdout[-500:]!r}"
    return Outcome(float(found[-1]), monotonic() - start, done.stderr)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names or [*PROGRAMS]
    print("| program | reaches | " + " | ".join(f"{way}, s" for way in WAYS) + " |", flush=True)
    print("| --- |" + " --- |" * (len(WAYS) + 1))
    for name in names:
        program, cells = PROGRAMS[name], []
        for way in WAYS:
            if program.needs_core and way == "torchrl" and not has_core():
                cells.append("needs its core")
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = outcome(program, way, Path(folder))
                except AssertionError as error:
                    print(error, file=sys.stderr)
                    cells.append("failed")
                else:
                    cells.append(f"{result.value:g} ({result.seconds:.0f} s)")
        print(f"| {name} | {program.reaches:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
