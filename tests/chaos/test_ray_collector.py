"""Nodes of a cluster are taken away: their frames are counted, and the learner goes on; full object stores wait."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.drills import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REMOVALS = 20


def test_nodes_are_taken_away():
    command = [sys.executable, "-m", "tests.chaos.clusters", str(scaled(REMOVALS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())
