"""Training scripts on torchrl and under gleanrl's takeover: times in collectors and buffers, and of the programs.

Both sides have the same seeds, networks, frames and updates. They alternate, one process after the other. They need the
interpreter that `make test-programs` sets up. Two programs are also compared with hand-written loops, which replace
their collector and buffer.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
from pathlib import Path

from benchmarks.by_hand import LOOPS
from benchmarks.harness import Gauge

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("FOREIGN_PYTHON", ROOT / ".venv-foreign/bin/python"))
PROGRAMS = ("dqn", "sac", "ppo_discrete", "ppo_continuous")
ROUNDS = 5
LIMIT_S = 900.0


Parts = dict[str, float]


@functools.cache
def rounds(program: str, other: str) -> list[dict[str, Parts]]:
    """Return the times that `metered` prints, for each round and for each of its two sides, `other` and ours.

    Raises:
        RuntimeError: a run failed, or the interpreter does not exist.
    """
    ways = ("takeover", other)
    found: list[dict[str, Parts]] = []
    for turn in range(ROUNDS):
        order = ways if turn % 2 else tuple(reversed(ways))
        found.append({way: _run(program, way, "data") | _run(program, way, "parts") for way in order})
    for way in ways:
        parts = found[0][way]
        medians = {part: round(statistics.median(runs[way][part] for runs in found), 3) for part in parts}
        print(f"  {program}, {way}: {medians}", flush=True)
    return found


def _run(program: str, way: str, what: str) -> dict[str, float]:
    path = ROOT / "tests/programs" / f"{program}.py"
    if not PYTHON.exists():
        raise RuntimeError(
            f"programs: expected an interpreter at {PYTHON}, found none; `make test-programs` sets it up"
        )
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-m", "benchmarks.metered", way, what, path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{program}, {way}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _share(program: str, without: tuple[str, ...], part: str, of: str = "torchrl") -> float:
    """Return the median over rounds of our time over another side's.

    Only times of the same round are subtracted or compared, since the machine's speed drifts by a fifth within minutes.

    Args:
        program: the program's name.
        without: the parts to subtract from both times.
        part: the time to compare.
        of: the other side.
    """

    def left(runs: Parts) -> float:
        return runs[part] - sum(runs[own] for own in without)

    shares = [left(runs["takeover"]) / left(runs[of]) for runs in rounds(program, of)]
    print(
        f"  {program}, {part} without {without}: {[round(share, 3) for share in shares]} x {of}'s time",
        flush=True,
    )
    return statistics.median(shares)


OWN = ("networks", "environments")

GAUGES = tuple(
    Gauge(
        f"programs/{program}-{name}",
        f"{program} under takeover: {title}",
        "x torchrl's time",
        functools.partial(_share, program, without, part),
        bound,
    )
    for program in PROGRAMS
    for name, title, part, without, bound in (
        (
            "layer",
            "time in collector and buffer without the policy's modules",
            "data",
            ("networks",),
            1 / 8,
        ),
        (
            "driving",
            "time in collector and buffer without the policy's modules and the environments",
            "data",
            OWN,
            1 / 8,
        ),
        ("data", "total time in collector and buffer", "data", (), 1.0),
        ("whole", "time of the complete program", "whole", (), 1.0),
    )
) + tuple(
    Gauge(
        f"programs/{program}-by-hand",
        f"{program} under takeover: time in collector and buffer without the policy's modules and the environments",
        "x a hand-written loop's time",
        functools.partial(_share, program, OWN, "data", "by-hand"),
        1.25,
    )
    for program in LOOPS
)
