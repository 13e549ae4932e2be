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


def make(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    # The tests themselves may run under make. Its variables would add messages about folders.
    alone = {
        key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"
    }
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**alone, **variables},
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


FAKE = """#!/bin/sh
case "$1 $2" in
    *version_info*3.10* | *version_info*9.8*) exit 0 ;;
    *version_info*) exit 1 ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pytest") exit "${FAILS:-0}" ;;
esac
"""


@pytest.mark.parametrize(("fails", "word"), [("0", "passed"), ("1", "failed")])
def test_pythons_that_are_not_installed_are_named_and_the_others_run(tmp_path, fails, word):
    """The interpreter is a shell script, because real ones need an installation of torch each."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "pythons.sh", tmp_path / "tests")
    for name in ("python3.10", "python9.8", "python9.7"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = make(
        tmp_path, "test-pythons", "PYTHONS=9.7 9.8 3.10", "T=tests/x", PATH=path, PYENV_ROOT="/", FAILS=fails
    )
    assert done.stdout.splitlines()[1:4] == [
        "Python 9.7: not installed here",
        f"Python 9.8, newest releases: {word}",
        f"Python 3.10, lowest releases: {word}",
    ]
    assert (done.returncode == 0) == (word == "passed")
    lowest = (tmp_path / ".venv-pythons" / "lowest.txt").read_text().split()
    assert "torch==2.6" in lowest and "gymnasium==1.1" in lowest and len(lowest) == 6


def test_no_python_of_the_list_is_a_failure(tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "pythons.sh", tmp_path / "tests")
    done = make(tmp_path, "test-pythons", "PYTHONS=9.9", PYENV_ROOT="/")
    assert done.returncode != 0 and "Python 9.9: not installed here" in done.stdout


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
