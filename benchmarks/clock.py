"""The clock of all sides: elapsed time, or with BENCH_CLOCK=cpu the processor time of the side's process.

Processor time leaves out the time that other programs take on a busy machine. It suits only sides that work in one
process and never wait. Other programs also displace data from the caches, and both clocks include the cost of that.
"""

from __future__ import annotations

import os
import time

CLOCK = os.environ.get("BENCH_CLOCK", "wall")
if CLOCK not in ("wall", "cpu"):
    raise SystemExit(f"BENCH_CLOCK: expected wall or cpu, got {CLOCK!r}")
now = time.process_time if CLOCK == "cpu" else time.perf_counter
"""Returns the time in seconds."""

in_thread = time.thread_time if CLOCK == "cpu" else time.perf_counter
"""Returns the time in seconds. With processor time, it counts the calling thread alone."""
