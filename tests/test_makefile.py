"""The commands of the Makefile, and the build, adapt to missing parts of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    # The tests themselves may run under make. Its variables would add messages about folders.
    alone = {
        key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"
    }
    return subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, env=alone
    )


@pytest.mark.parametrize("target", ["demo", "test", "bench", "docs"])
def test_missing_python_prints_one_sentence(tmp_path, target):
    done = make(tmp_path, target, "PYTHON=no-such-python")
    assert done.returncode != 0
    assert done.stdout == "No no-such-python here: install Python 3.11, or name another one with PYTHON=...\n"
    assert not (tmp_path / ".venv").exists()


def test_old_python_prints_one_sentence(tmp_path):
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(tmp_path, "build", f"PYTHON={old}")
    assert done.returncode != 0
    assert done.stdout == f"{old} is older than 3.10: name a newer one with PYTHON=...\n"


def test_missing_compiler_prints_one_sentence(tmp_path):
    done = make(tmp_path, "compiler", "CXX=no-such-compiler")
    assert done.returncode != 0
    assert done.stdout.startswith(
        "No C++ compiler (no-such-compiler) here: install g++ 11 or clang 14 or newer"
    )
    assert done.stdout.count("\n") == 1
    assert make(tmp_path, "compiler").returncode == 0


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "CMAKE_CXX_COMPILER=NOTFOUND",
            "No C++ compiler here, and gleanrl compiles its core: install g++ 11",
        ),
        ("CMAKE_HOST_WIN32=ON", "gleanrl supports Linux and macOS, not Windows"),
    ],
)
def test_build_that_cannot_compile_ends_with_one_sentence(tmp_path, setting, sentence):
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, f"-D{setting}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": TOOLS}
    )
    assert done.returncode != 0
    assert " ".join(done.stderr.split()).count(sentence) == 1
    assert done.stderr.count("CMake Error") == 1


@pytest.mark.parametrize("target", ["test", "test-fast"])
def test_variable_t_selects_the_tests_that_run(tmp_path, target):
    for source in (Path("CMakeLists.txt"), Path("tests/devices/pretended/pretended.cc")):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).touch()

    def commands(*arguments: str) -> list[str]:
        lines = make(tmp_path, "--dry-run", target, *arguments).stdout.splitlines()
        return [line for line in lines if " -m pytest " in line]

    (one,) = commands("T=tests/x/test_y.py", "TEST_ARGS=-x")
    assert one.endswith(" tests/x/test_y.py -x")
    first, *rest = commands("TEST_ARGS=-x")
    assert first.endswith(" tests -x")
    assert bool(rest) == (target == "test")  # `make test` without T also runs devices and doctests
