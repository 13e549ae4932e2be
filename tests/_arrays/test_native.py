"""A failed import of the native core explains how to repair the installation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gleanrl._arrays import native


def test_every_name_of_the_core_is_reexported():
    public = {name for name in vars(sys.modules["gleanrl._core"]) if not name.startswith("_")}
    assert set(native.__all__) == public


@pytest.mark.slow
def test_failing_import_of_the_core_gives_advice():
    # None in sys.modules makes the import fail in the same way as a missing file.
    script = "import sys; sys.modules['gleanrl._core'] = None; import gleanrl._arrays.native"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: gleanrl's compiled core can't be imported (")
    assert "run `make build` in a clone" in last and "pip install --force-reinstall gleanrl" in last
