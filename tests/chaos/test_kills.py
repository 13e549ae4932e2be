"""Dumps stay complete if their process is killed, and two processes never dump into one folder at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.drills import scaled

KILLS = 1_000


@pytest.mark.timeout(1800)
def test_kills_at_any_instant_leave_the_last_complete_checkpoint(tmp_path: Path) -> None:
    kills, begin = scaled(KILLS), time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.killing", str(tmp_path / "checkpoints"), str(kills), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{found} in {time.monotonic() - begin:.0f} s")
    assert found["kills"] == kills and found["dumps"] > kills // 8
    assert "another process is writing" in found["refused"]
