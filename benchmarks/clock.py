"""The clock of all sides: the wall's, or with BENCH_CLOCK=cpu the processor time of the side's process.

Processor time leaves out the turns that other programs take on a busy machine; only for sides that work in one process
and wait for nothing. What the others do to the caches is in either.
"""

from __future__ import annotations

import os
import time

CLOCK = os.environ.get("BENCH_CLOCK", "wall")
if CLOCK not in ("wall", "cpu"):
    raise SystemExit(f"BENCH_CLOCK: expected wall or cpu, got {CLOCK!r}")
now = time.process_time if CLOCK == "cpu" else time.perf_counter
"""Returns seconds."""

in_thread = time.thread_time if CLOCK == "cpu" else time.perf_counter
"""Returns seconds; of processor time that of the calling thread alone."""
