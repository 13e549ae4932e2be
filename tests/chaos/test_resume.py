"""Killed programs resume from their checkpoint in another process, with identical results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.drills import scaled

CELLS, KILLS = 36, 200


def run(what: str, folder: Path, count: int) -> Any:
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.resuming", what, str(folder), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(f"{done.stdout.strip()} in {time.monotonic() - begin:.0f} s")
    return json.loads(done.stdout)


@pytest.mark.timeout(1800)
def test_resumed_programs_continue_as_unbroken_ones(tmp_path: Path) -> None:
    cells = scaled(CELLS)
    found = run("cells", tmp_path, cells)
    assert found == {"cells": cells, "streams": 5 * cells}


@pytest.mark.timeout(1800)
def test_a_training_that_is_killed_over_and_over_ends_with_the_same_weights(tmp_path: Path) -> None:
    kills = scaled(KILLS)
    found = run("chain", tmp_path, kills)
    assert found["kills"] >= kills and found["ends"] >= 1
