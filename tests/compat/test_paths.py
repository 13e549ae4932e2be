"""Module paths that hold nothing of their own."""

from __future__ import annotations

import importlib
import sys

import pytest

from gleanrl import compat


def test_installing_twice_makes_one_finder():
    before = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == before


def test_paths_that_nobody_has_fail_as_ever():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gleanrl.data.no_such_path")


def test_a_package_of_the_table_holds_its_modules():
    module = importlib.import_module("gleanrl.envs.transforms.transforms")
    assert module is sys.modules["gleanrl.envs"].transforms.transforms
    assert module._apply_to_composite.__module__ == "gleanrl.envs.transforms.spec_tools"
