"""Public modules gain the names of the compatibility table."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import gleanrl.data
import gleanrl.data.replay_buffers.utils
import gleanrl.envs
import gleanrl.envs.utils
from gleanrl.errors import UnservedMemberError


def test_unknown_names_are_attribute_errors():
    assert not hasattr(gleanrl.data, "NoSuchThing")
    with pytest.raises(ImportError, match="NoSuchThing"):
        exec("from gleanrl.envs import NoSuchThing")


def test_unserved_name_is_absent_and_its_error_names_a_replacement():
    assert not hasattr(gleanrl.envs, "PettingZooEnv") and "PettingZooEnv" not in dir(gleanrl.envs)
    assert getattr(gleanrl.envs, "PettingZooEnv", None) is None
    with pytest.raises(
        UnservedMemberError, match=r"^gleanrl\.envs\.PettingZooEnv isn't served: .*make TorchRL's own"
    ):
        gleanrl.envs.PettingZooEnv  # noqa: B018
    with pytest.raises(UnservedMemberError, match="gleanrl.services isn't served"):
        gleanrl.services  # noqa: B018


@pytest.mark.parametrize(
    "module", [gleanrl, gleanrl.data, gleanrl.envs, gleanrl.envs.utils, gleanrl.data.replay_buffers.utils]
)
def test_modules_can_be_inspected(module):
    members = dict(inspect.getmembers(module))
    assert set(getattr(module, "__all__", ())) <= members.keys()
    assert inspect.getsourcefile(module) == module.__file__


@pytest.mark.slow
def test_a_module_that_is_reloaded_keeps_its_names():
    script = (
        "import importlib, gleanrl.envs.utils as utils; before = dir(utils); importlib.reload(utils); "
        "assert dir(utils) == before and not hasattr(utils, 'clear_mpi_env_vars')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_star_imports_bring_second_names():
    script = "from gleanrl.data import *; print(CompositeSpec is Composite)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
