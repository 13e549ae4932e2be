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


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_after_two_interrupts_are_transitions(kind: str) -> None:
    rounds, begin = scaled(ROUNDS), time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.interrupting", kind, str(rounds), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{kind}: {found} in {time.monotonic() - begin:.0f} s")
    assert found["interrupted"]
