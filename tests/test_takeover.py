"""`import gleanrl.takeover` fails clearly without torchrl.

With torchrl, see `tests/_takeover/test_import_hook_importing.py`.
"""

import importlib.util

import pytest

from tests.takeovers import run


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is not None, reason="torchrl is installed")
@pytest.mark.parametrize("command", [("-c", "import gleanrl.takeover"), ("-m", "gleanrl", "run", __file__)])
def test_takeover_without_torchrl_raises_a_clear_error(command):
    done = run(*command)
    assert done.returncode == 1
    assert "TakeoverError: takeover: torchrl isn't installed here" in done.stderr
