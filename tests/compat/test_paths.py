"""Old module paths resolve to the modules at their new paths."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from types import ModuleType

import pytest

import gleanrl
from gleanrl import compat
from gleanrl._state.attribute_kinds import present_name
from gleanrl.compat.moved import MOVED, RENAMED


def test_installing_twice_makes_one_finder():
    before = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == before


def test_unknown_paths_raise_module_not_found():
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


@pytest.mark.slow
def test_modules_at_old_paths_have_the_new_modules_names():
    for old, new in MOVED.items():
        if new == "gleanrl._takeover.child":  # importing this module replaces torchrl
            continue
        assert importlib.import_module(old).__name__ == old
        for name, value in vars(importlib.import_module(new)).items():
            # An import of an old path sets the module as an attribute of its old package, in place of the new module.
            if not name.startswith("__") and not isinstance(value, ModuleType):
                assert getattr(importlib.import_module(old), name) is value


def test_renamed_classes_are_found_by_their_old_names_at_old_paths():
    for old, new in RENAMED.items():
        module, _, name = old.rpartition(".")
        if module in MOVED:
            assert getattr(importlib.import_module(module), name).__name__ == new


@pytest.mark.parametrize(
    ("saved", "present"),
    [
        ("gleanrl.state.Stateful", "gleanrl._state.state.Stateful"),
        ("gleanrl.layout.Layout", "gleanrl._arrays.tensordicts.TensorDictBuilder"),
        ("gleanrl.envs.memory.f.<locals>.Inner", "gleanrl.envs.simulator_state.f.<locals>.Inner"),
        ("gleanrl.envs.libs.gym.GymEnv", "gleanrl.envs.libs.gym.GymEnv"),
        ("partial gleanrl.tree.as_key", "partial gleanrl._arrays.tensordicts.as_key"),
        ("theirs.gleanrl_like.Layout", "theirs.gleanrl_like.Layout"),
    ],
)
def test_states_name_classes_by_old_or_new_paths(saved, present):
    assert present_name(saved) == present
