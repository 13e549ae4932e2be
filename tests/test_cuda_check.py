"""The script that checks a GPU reports missing parts of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "cuda_check.sh"


def check(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, **given}
    return subprocess.run(
        ["bash", str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=60, env=env
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_check_without_cuda_stops_and_names_the_cpu_option(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("cuda_check: torch finds no usable CUDA device: ")
    assert second == "cuda_check: DEVICE=cpu runs the same steps on the CPU."


def test_missing_python_prints_one_sentence(tmp_path: Path) -> None:
    done = check(tmp_path, PYTHON="no-such-python")
    assert done.returncode == 2
    assert done.stderr == "cuda_check: no no-such-python here: name an interpreter with PYTHON=...\n"


def test_another_device_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, DEVICE="tpu")
    assert done.returncode == 2 and done.stderr == "cuda_check: DEVICE: expected cuda or cpu, got tpu\n"
