"""Run benchmarks: `python -m benchmarks [NAMES] [--rounds N] [--quick] [--peers PYTHON] [--out DIR]`.

Set the environment variable BENCH_CLOCK=cpu to measure processor time instead of elapsed time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console

from benchmarks import (
    checkpoint,
    collection,
    compact,
    datasets,
    device_replay,
    devices,
    envs,
    instructions,
    memory,
    multiprocess,
    multiprocess_gauges,
    native,
    prioritized,
    programs,
    ray,
    replay,
    report,
    slices,
    sweep,
    transforms,
    vector_envs,
)
from benchmarks.clock import CLOCK
from benchmarks.harness import Case, Gauge, GaugeResult, run_case, run_gauge

EVERYTHING: tuple[Case | Gauge, ...] = (
    *collection.CASES,
    *vector_envs.CASES,
    *native.CASES,
    *devices.CASES,
    *device_replay.CASES,
    *envs.CASES,
    *multiprocess.CASES,
    *multiprocess_gauges.GAUGES,
    *transforms.CASES,
    *replay.CASES,
    *prioritized.CASES,
    *slices.CASES,
    *instructions.GAUGES,
    *sweep.CASES,
    *memory.GAUGES,
    *compact.CASES,
    *compact.GAUGES,
    *programs.GAUGES,
    *checkpoint.CASES,
    *checkpoint.GAUGES,
    *ray.GAUGES,
    *datasets.GAUGES,
)
GROUPS = tuple(dict.fromkeys(item.name.split("/")[0] for item in EVERYTHING))
ROUNDS, QUICK = 15, 3
BUSY = 0.5  # above this load average per core, `main` prints a warning


def chosen(everything: Sequence[Case | Gauge], patterns: Sequence[str]) -> list[Case | Gauge]:
    """Return the cases and gauges that match a pattern; without patterns, return all.

    A pattern is a name, the name of a group, or a name with `*`.

    Raises:
        SystemExit: a pattern matches nothing.
    """
    unknown = [p for p in patterns if not any(_matches(item.name, p) for item in everything)]
    if unknown:
        raise SystemExit(
            f"benchmarks: expected names of cases, groups ({', '.join(GROUPS)}) or patterns with *, got "
            f"{', '.join(unknown)}, which match no case; `--list` prints all names"
        )
    return [item for item in everything if not patterns or any(_matches(item.name, p) for p in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or name.startswith(f"{pattern}/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the command line names, and write the report.

    Returns:
        0 if every case ran, even if it missed a target. 1 if a gauge failed, or a side that runs in this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"cases, groups ({', '.join(GROUPS)}) or patterns with * (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"counted rounds of each case (default: {ROUNDS})"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"run only {QUICK} rounds, too few for reliable figures"
    )
    parser.add_argument(
        "--peers", metavar="PYTHON", help="interpreter that has the other libraries (default: leave them out)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/benchmarks"),
        help="folder for the report (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print names and titles of the cases, and exit")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: expected a positive number, got {options.rounds}")
    selected = chosen(EVERYTHING, options.names)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.list:
        for item in selected:
            console.print(f"{item.name}: {item.title}", highlight=False)
        return 0
    rounds = QUICK if options.quick else options.rounds
    facts = {**report.machine(), "clock": CLOCK, "rounds": rounds, "peers": options.peers or "none"}
    if facts["load"] > BUSY * facts["cores"]:
        console.print(f"load {facts['load']} on {facts['cores']} cores: expect wide spreads of the figures")
    results: list[report.Result] = []
    for item in selected:
        console.print(f"{item.name} ...", highlight=False)
        results.append(run_gauge(item) if isinstance(item, Gauge) else run_case(item, rounds, options.peers))
        report.write(options.out, results, facts)  # after each case, so that an interrupted run has a report
    report.show(console, results)
    console.print(f"written to {options.out}/benchmarks.json and benchmarks.md", highlight=False)
    if sweep.plot(results, options.out / "sweep.png"):
        console.print(f"plot written to {options.out}/sweep.png", highlight=False)
    return int(any(_broken(result) for result in results))


def _broken(result: report.Result) -> bool:
    if isinstance(result, GaugeResult):
        return result.failure is not None
    return any(side in result.case.sides for side in result.failures)


if __name__ == "__main__":
    sys.exit(main())
