"""What a public module gains from the table."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gleanrl.data
import gleanrl.envs
from gleanrl.compat import binding
from gleanrl.compat.names import Unserved
from gleanrl.errors import UnsupportedError


def test_unknown_names_are_attribute_errors():
    assert not hasattr(gleanrl.data, "NoSuchThing")
    with pytest.raises(ImportError, match="NoSuchThing"):
        exec("from gleanrl.envs import NoSuchThing")


def test_a_stand_in_can_neither_be_made_nor_derived_from(monkeypatch):
    row = Unserved("elsewhere", "BreadEnv", "bakes; since 9.1: use an oven")
    monkeypatch.setattr(binding, "UNSERVED", (row,))
    namespace = {"__all__": []}
    binding.bind("elsewhere", namespace)
    stand_in = namespace["__getattr__"]("BreadEnv")
    assert namespace["__all__"] == []
    with pytest.raises(UnsupportedError, match=r"elsewhere\.BreadEnv: bakes; since 9\.1: use an oven"):
        stand_in()
    with pytest.raises(UnsupportedError, match="use an oven"):
        type("Mine", (stand_in,), {})


@pytest.mark.slow
def test_star_imports_bring_second_names():
    script = "from gleanrl.data import *; print(CompositeSpec is Composite)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
