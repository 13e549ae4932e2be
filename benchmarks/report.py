"""Reports of a run: the machine, and the figures as JSON, as Markdown and as a table in the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Case, CaseResult, GaugeResult, Growth, Spread, Target

Result = CaseResult | GaugeResult
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gleanrl", "torch", "tensordict", "gymnasium", "numpy")
HEADINGS = ("case", "side", "median", "speed / reference [quartiles]", "target", "")


def machine() -> dict[str, Any]:
    """Return the processor, the memory, the versions, the commit and the current load."""
    return {
        "cpu": _cpu(),
        "gpu": _gpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "load": round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str:
    """Return the accelerator's name, its driver and the version of CUDA that torch was built for."""
    if not torch.cuda.is_available():
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " and changes" if git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def pace(case: Case, speed: Spread) -> str:
    """Return a speed in the case's unit: frames per second, or time per call."""
    if case.unit == "frame":
        return (
            f"{speed.median / 1e3:.1f}k frames/s" if speed.median >= 1e4 else f"{speed.median:.0f} frames/s"
        )
    us = 1e6 / speed.median
    return f"{us / 1e3:.2f} ms/call" if us >= 1e3 else f"{us:.1f} us/call"


def wording(target: Target | Growth) -> str:
    """Return a target in a few words."""
    if isinstance(target, Growth):
        return f"growth <= {target.bound:g} x that of {target.against[0]} to {target.against[1]}"
    of = f" {target.against}" if target.against else ""
    if target.quantity == "us":
        return f"time <= {target.bound:g} us"
    return (
        f"speed >= {target.bound:g} x{of}"
        if target.quantity == "speed"
        else f"time <= {target.bound:g} x{of}"
    )


def judgement(met: bool | None) -> str:
    """Return a verdict in one or two words."""
    return {True: "met", False: "MISSED", None: "not judged"}[met]


def table_rows(result: Result) -> list[tuple[str, ...]]:
    """Return a result as rows of cells, one cell for each of HEADINGS."""
    if isinstance(result, GaugeResult):
        value = result.failure if result.value is None else f"{result.value:.3g} {result.gauge.unit}"
        target = f"<= {result.gauge.bound:g} {result.gauge.unit}"
        return [(result.gauge.name, "gleanrl", str(value), "", target, judgement(result.met))]
    case, out = result.case, []
    for side, speeds in result.speeds.items():
        ratio = ""
        if speeds and side != case.reference and case.reference in result.speeds:
            median, low, high = result.ratio(side)
            ratio = f"{median:.3g} [{low:.3g}, {high:.3g}]"
        label = f"{side} {result.versions.get(side, '')}".strip()
        label += " (reference)" if side == case.reference else ""
        targets = case.targets if side == case.subject else ()
        verdicts = "\n".join(judgement(result.verdict(target)) for target in targets)
        out.append((label, pace(case, result.speed(side)), ratio, "\n".join(map(wording, targets)), verdicts))
    for side, why in result.failures.items():
        targets = case.targets if side == case.subject else ()
        out.append(
            (side, f"failed: {why}", "", "\n".join(map(wording, targets)), "not judged" if targets else "")
        )
    return [(case.name if number == 0 else "", *row) for number, row in enumerate(out)]


def as_json(results: Sequence[Result], facts: dict[str, Any]) -> dict[str, Any]:
    """Return a run as values for JSON, with the figures of every round. `facts` describe the machine and options."""
    cases = []
    for result in results:
        if isinstance(result, GaugeResult):
            gauge = result.gauge
            entry: dict[str, Any] = {"name": gauge.name, "title": gauge.title, "unit": gauge.unit}
            entry |= {
                "value": result.value,
                "bound": gauge.bound,
                "met": result.met,
                "failure": result.failure,
            }
        else:
            entry = _case_json(result)
        cases.append(entry)
    return {"run": facts, "cases": cases}


def _case_json(result: CaseResult) -> dict[str, Any]:
    case = result.case
    sides: dict[str, Any] = {}
    for side, speeds in result.speeds.items():
        sides[side] = {"speed": result.speed(side)._asdict(), "rounds": speeds}
        if case.reference in result.speeds:
            sides[side]["ratio"] = result.ratio(side)._asdict()
        if side in result.versions:
            sides[side]["version"] = result.versions[side]
    return {
        "name": case.name,
        "title": case.title,
        "unit": f"{case.unit}s/s",
        "reference": case.reference,
        "threads": case.threads,
        "sides": sides,
        "targets": [{**asdict(target), "met": result.verdict(target)} for target in case.targets],
        "failures": result.failures,
    }


def markdown(results: Sequence[Result], facts: dict[str, Any]) -> str:
    """Return a run as a Markdown page."""
    lines = ["# Benchmarks", "", "; ".join(f"{name}: {value}" for name, value in facts.items()) + ".", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "| " + " | ".join("---" for _ in HEADINGS) + " |"]
    for result in results:
        for row in table_rows(result):
            lines.append(
                "| " + " | ".join(cell.replace("|", "/").replace("\n", "<br>") for cell in row) + " |"
            )
    lines += ["", "The cases:", ""]
    for result in results:
        about = result.gauge if isinstance(result, GaugeResult) else result.case
        lines.append(f"- `{about.name}`: {about.title}.")
    return "\n".join(lines) + "\n"


def write(folder: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Write `benchmarks.json` and `benchmarks.md` into a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(as_json(results, facts), indent=1) + "\n")
    (folder / "benchmarks.md").write_text(markdown(results, facts))


def show(console: Console, results: Sequence[Result]) -> None:
    """Print the table of a run."""
    table = Table(*HEADINGS, title="Medians over rounds; a ratio is the median of the ratios within a round")
    colours = {"met": "green", "MISSED": "red"}
    for result in results:
        for row in table_rows(result):
            word = row[-1].split("\n")[0] if "MISSED" not in row[-1] else "MISSED"
            table.add_row(*row, style=colours.get(word))
        table.add_section()
    console.print(table)
