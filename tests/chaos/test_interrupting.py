"""Programs that receive SIGINT twice at random moments deliver right rows only."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.chaos.drills import scaled
from tests.chaos.interrupting import KINDS

ROUNDS = 600


@pytest.mark.timeout(3600)
def test_rows_after_two_interrupts_are_transitions() -> None:
    """One program runs all kinds, because each program and its fork server import torch."""
    rounds, begin = scaled(ROUNDS), time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.interrupting", str(rounds), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{found} in {time.monotonic() - begin:.0f} s")
    assert [*found] == [*KINDS] and all(counts["interrupted"] for counts in found.values())
