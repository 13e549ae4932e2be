"""A training doesn't depend on the system clock, which is set while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.clock_step import train
from tests.chaos.drills import SHARE, scaled

pytestmark = pytest.mark.timeout(600)

ROUNDS = 200
WORKERS = 2 if SHARE >= 1 else 0


def test_the_time_of_day_jumps_by_years(tmp_path):
    library, step, rounds = tmp_path / "clock_step.so", tmp_path / "step", scaled(ROUNDS)
    compile_it = [os.environ.get("CXX", "c++"), "-x", "c", "-shared", "-fPIC", "-o", library]
    subprocess.run([*compile_it, Path(__file__).with_name("clock_step.c"), "-ldl"], check=True)
    step.write_bytes(bytes(8))
    command = [sys.executable, "-m", "tests.chaos.clock_step", tmp_path / "jumps", rounds, WORKERS]
    jumping = os.environ | {"LD_PRELOAD": str(library), "CLOCK_STEP": str(step)}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=jumping)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == train(tmp_path / "steady", rounds, WORKERS)
