"""Unserved names and modules are absent for `hasattr`, and importing one names a replacement."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from gleanrl.compat.unserved import UNSERVED, UNSERVED_MODULES, unserved_module, unserved_name
from gleanrl.errors import UnservedModuleError, UnservedNameError


@pytest.mark.parametrize("row", UNSERVED, ids=lambda row: f"{row.module}.{row.names.split()[0]}")
def test_importing_an_unserved_name_names_a_replacement(row):
    module = importlib.import_module(row.module)
    for name in row.names.split():
        assert not hasattr(module, name) and name not in dir(module)
        with pytest.raises(UnservedNameError, match=rf"\.{name} isn't served: {re.escape(row.why)}$"):
            exec(f"from {row.module} import {name}")


@pytest.mark.parametrize("row", UNSERVED_MODULES, ids=lambda row: f"{row.package}.{row.names.split()[0]}")
def test_importing_an_unserved_module_names_a_replacement(row):
    for name in row.names.split():
        statements = (
            f"import {row.package}.{name}",
            f"import {row.package}.{name}.more",
            f"from {row.package} import {name}",
        )
        for statement in statements:
            with pytest.raises(UnservedModuleError, match=rf"\.{name} isn't served: {re.escape(row.why)}$"):
                exec(statement)


@pytest.mark.parametrize(
    "module", ["gleanrl.envs", "gleanrl.envs.libs", "gleanrl.envs.libs.gym", "gleanrl.envs.utils"]
)
def test_submodules_of_an_unserved_module_name_a_replacement(module):
    with pytest.raises(
        UnservedNameError, match=rf"^{module}\.VmasEnv isn't served: it needs the package vmas"
    ):
        exec(f"from {module} import VmasEnv")


def test_importing_served_and_unserved_names_names_the_unserved_one():
    with pytest.raises(UnservedNameError, match="VmasEnv") as caught:
        exec("from gleanrl.envs import GymEnv, VmasEnv, ParallelEnv")
    assert caught.value.name == "gleanrl.envs"
    if sys.version_info >= (3, 12):
        assert caught.value.name_from == "VmasEnv"


def test_unknown_names_have_no_row():
    assert unserved_name("gleanrl.envs", "NoSuchEnv") is None and unserved_module("gleanrl.nothing") is None
    assert unserved_name("gleanrl.data", "VmasEnv") is None and unserved_name("elsewhere", "VmasEnv") is None


def test_no_name_has_two_rows_in_a_module():
    names = [(row.module, name) for row in UNSERVED for name in row.names.split()]
    names += [(row.package, name) for row in UNSERVED_MODULES for name in row.names.split()]
    assert len(names) == len(set(names))
