"""Libraries of optional extras are imported, or an error names the missing extra. Unsupported systems get an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gleanrl import _util
from gleanrl.errors import MissingLibraryError


def test_missing_h5py_raises_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py")
    assert _util.h5py().__name__ == "h5py"
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingLibraryError, match=r"gleanrl\[h5\]"):
        _util.h5py()


def test_windows_raises_one_sentence_that_names_wsl() -> None:
    program = "import sys; sys.platform = 'win32'; import gleanrl"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "ImportError: gleanrl supports Linux and macOS, not Windows: install Linux with `wsl --install`, then gleanrl "
        "inside it"
    )
    assert "During handling" not in found.stderr


def test_library_is_imported_where_no_extra_can_be_imported() -> None:
    program = """
import sys
sys.modules.update(dict.fromkeys(["rich", "h5py", "ray", "matplotlib", "pygame", "ale_py", "minari"]))
import gleanrl.checkpoint, gleanrl.collectors, gleanrl.data, gleanrl.envs, gleanrl.extending, gleanrl.testing
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr


def test_missing_ray_raises_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    assert _util.ray().__name__ == "ray"
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingLibraryError, match=r"gleanrl\[ray\]"):
        _util.ray()
