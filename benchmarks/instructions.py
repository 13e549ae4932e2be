"""Count the instructions of a call in a separate process under valgrind.

On a busy machine, a count shows whether a call does more work; a time does not. Hardware counters would serve as well,
but virtual machines often have none. The separate process runs `python -m benchmarks.instructions ROWS`.
"""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.climit import build
from benchmarks.harness import Gauge
from benchmarks.slices import LARGE, STORED, our_buffer
from benchmarks.workload import episode_rows

ROOT = Path(__file__).resolve().parents[1]
MARKS = Path(__file__).with_name("callmarks.c")
WARM_UP, CALLS = 20, 50


def slices(n: int) -> None:
    """Sample slices out of `n` rows. Callgrind counts all calls except the first `WARM_UP`."""
    marks = ctypes.CDLL(str(build(MARKS)))
    buffer = our_buffer(n, episode_rows(n))
    for _ in range(WARM_UP):
        buffer.sample()
    gc.disable()  # garbage collections would be counted
    marks.counting_on()
    for _ in range(CALLS):
        buffer.sample()
    marks.counting_off()


def of_slices(n: int) -> float:
    """Return the number of instructions that a sample of slices out of `n` rows takes.

    Raises:
        RuntimeError: valgrind or its headers are missing, or valgrind failed.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise RuntimeError("instructions: expected valgrind, found none; install it")
    build(MARKS)  # here, so that a failure is reported and the process under valgrind need not compile
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        tool = [valgrind, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command = [*tool, sys.executable, "-m", "benchmarks.instructions", str(n)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError("instructions: " + " | ".join(done.stderr.strip().split("\n")[-3:]))
        total = re.search(r"^totals: (\d+)", out.read_text(), re.MULTILINE)
    if total is None or total[1] == "0":
        raise RuntimeError("instructions: expected a count from callgrind, got none")
    return int(total[1]) / CALLS


GAUGES = (
    Gauge(
        "slices/instructions",
        f"instructions of a sample of slices out of {LARGE:,} rows, over a sample out of {STORED:,} (valgrind)",
        "x",
        lambda: of_slices(LARGE) / of_slices(STORED),
        1.05,
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    slices(int(sys.argv[1]))
