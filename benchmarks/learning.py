"""PPO and SAC with policies run by torch and by the core: do they learn alike?

    python -m benchmarks.learning --seeds 10

Runs two examples with each seed and each backend, and prints the difference of their means with a 95 % confidence
interval (bootstrap over seeds). PPO counts the frames until CartPole is solved. SAC counts the mean return of all
episodes of Pendulum.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MEASURES = {"ppo_workers": r"after ([\d,]+) frames", "sac_pendulum": r"mean return (-?[\d.]+)"}
BACKENDS = ("torch", "native")
RESAMPLES = 10_000


def measure(program: str, backend: str, seed: int) -> float:
    """Run an example and return its measure."""
    command = [sys.executable, EXAMPLES / f"{program}.py", "--seed", str(seed), "--policy-backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(MEASURES[program], done.stdout)
    if found is None:
        raise RuntimeError(f"{program}: expected {MEASURES[program]!r} in its output, got {done.stdout!r}")
    return float(found[1].replace(",", ""))


def interval(theirs: list[float], ours: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of `ours` minus the mean of `theirs`."""
    generator = np.random.default_rng(0)
    means = [generator.choice(part, (RESAMPLES, len(part))).mean(1) for part in (theirs, ours)]
    low, high = np.quantile(means[1] - means[0], (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1, help="programs that run at the same time")
    args = parser.parse_args()
    for program in MEASURES:
        runs = list(product([program], BACKENDS, range(args.seeds)))
        with ThreadPoolExecutor(args.processes) as pool:
            found = list(pool.map(measure, *zip(*runs, strict=True)))
        theirs, ours = found[: args.seeds], found[args.seeds :]
        low, high = interval(theirs, ours)
        for backend, values in zip(BACKENDS, (theirs, ours), strict=True):
            spread = statistics.stdev(values)
            print(f"{program}, {backend}: mean {statistics.mean(values):,.1f}, deviation {spread:,.1f}")
        difference = statistics.mean(ours) - statistics.mean(theirs)
        print(f"{program}: difference {difference:,.1f}, 95 % interval [{low:,.1f}, {high:,.1f}]", flush=True)


if __name__ == "__main__":
    main()
