"""Module paths that hold nothing of their own."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys

import pytest

import gleanrl
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


def test_asking_for_a_module_that_is_not_served_finds_none():
    for path in ("gleanrl.services", "gleanrl.envs.libs.vmas", "gleanrl.envs.PettingZooEnv"):
        assert importlib.util.find_spec(path) is None


def test_packages_can_be_walked():
    names = [module.name for module in pkgutil.walk_packages(gleanrl.__path__, "gleanrl.")]
    assert "gleanrl.envs.utils" in names and len(names) == len(set(names))
