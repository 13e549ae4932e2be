"""Time of a sample in buffers of 10,000 to 10,000,000 rows, compared with a C copy of the same bytes.

Both sides draw random numbers. Without them the time of the C side would grow more, and the bound would be weaker.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.climit import Gather
from benchmarks.harness import Case, CaseResult, GaugeResult, Growth, Setup, Work
from benchmarks.prioritized import our_buffer as prioritized_buffer
from benchmarks.slices import LENGTH, SLICES, Table, c_runs
from benchmarks.slices import our_buffer as slices_buffer
from benchmarks.workload import Columns, as_tensordict, episode_rows
from gleanrl.data import LazyTensorStorage, ReplayBuffer

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
BATCH, CALLS = 256, 300
BOUND = 1.1
OURS, LIMIT = "gleanrl", "C copy"


class Kind(NamedTuple):
    """A kind of sample: the function that makes our buffer, the batch size, and the C side over the same columns."""

    name: str
    title: str
    buffer: Callable[[int, Columns], Any]
    batch: int
    limit: Callable[[Columns], Callable[[], Any]]


def uniform_buffer(n: int, columns: Columns) -> ReplayBuffer:
    """Return a uniform buffer that holds the columns."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(n))
    buffer.extend(as_tensordict(columns))
    return buffer


def random_rows(columns: Columns) -> Callable[[], Any]:
    """Return the C gather of random rows."""
    gather, rng = Gather(list(columns.values()), BATCH), np.random.default_rng(1)
    n = len(columns["observation",])
    return lambda: gather(rng.integers(0, n, BATCH))


def random_runs(columns: Columns) -> Callable[[], Any]:
    """Return the C copy of slices that an episode table in numpy draws."""
    gather, table = c_runs(list(columns.values())), Table(columns)
    return lambda: gather(table.draw())


KINDS = (
    Kind("uniform", f"sample({BATCH}), uniform", uniform_buffer, BATCH, random_rows),
    Kind("prioritized", f"sample({BATCH}), prioritized", prioritized_buffer, BATCH, random_rows),
    Kind("slices", f"{SLICES} slices of {LENGTH} steps", slices_buffer, SLICES * LENGTH, random_runs),
)


def ours(kind: Kind, n: int) -> Setup:
    """Return our set-up at `n` rows."""

    def setup() -> Work:
        buffer = kind.buffer(n, episode_rows(n))

        def work() -> int:
            for _ in range(CALLS):
                buffer.sample(kind.batch)
            return CALLS

        return work

    return setup


def limit(kind: Kind, n: int) -> Setup:
    """Return the set-up of the C side at `n` rows."""

    def setup() -> Work:
        call = kind.limit(episode_rows(n))

        def work() -> int:
            for _ in range(CALLS):
                call()
            return CALLS

        return work

    return setup


def side(who: str, n: int) -> str:
    """Return the name of a side."""
    return f"{who}, {n:,} rows"


def _case(kind: Kind) -> Case:
    sides = {side(LIMIT, n): limit(kind, n) for n in SIZES} | {side(OURS, n): ours(kind, n) for n in SIZES}
    first, last = SIZES[0], SIZES[-1]
    growth = Growth(BOUND, (side(OURS, first), side(OURS, last)), (side(LIMIT, first), side(LIMIT, last)))
    return Case(
        f"sweep/{kind.name}",
        f"{kind.title}, out of {first:,} to {last:,} rows, and a C copy of as many bytes",
        "call",
        sides,
        side(LIMIT, first),
        targets=(growth,),
        subject=side(OURS, last),
    )


CASES = tuple(_case(kind) for kind in KINDS)


def plot(results: Sequence[CaseResult | GaugeResult], path: Path) -> bool:
    """Draw the sweeps of a run, if it has any and matplotlib is installed.

    Returns:
        Whether a picture was written.
    """
    sweeps = [r for r in results if isinstance(r, CaseResult) and r.case in CASES and r.speeds]
    if not sweeps or importlib.util.find_spec("matplotlib") is None:
        return False
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(4 * len(sweeps), 3.6), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps, strict=True):
        for who, colour in ((OURS, "tab:blue"), (LIMIT, "tab:gray")):
            sizes = [n for n in SIZES if side(who, n) in result.speeds]
            speeds = [result.speed(side(who, n)) for n in sizes]
            axes.plot(sizes, [1e6 / s.median for s in speeds], "o-", color=colour, label=who)
            axes.fill_between(
                sizes, [1e6 / s.high for s in speeds], [1e6 / s.low for s in speeds], color=colour, alpha=0.2
            )
        axes.set(
            title=next(k.title for k in KINDS if result.case.name == f"sweep/{k.name}"),
            xscale="log",
            xlabel="rows stored",
            ylabel="us per call (median, quartiles)",
        )
        axes.set_ylim(bottom=0)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    return True
