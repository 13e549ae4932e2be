"""All names that README, pages and examples mention are in the list, and each listed name can be imported."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import gleanrl.extending
from tests.public_names import LIST, NOT_IMPORTED, imported, in_page, listed, mentioned, resolved


def test_mentioned_names_are_in_the_list():
    """`python -m tests.public_names` adds names. It fails for a wrong name in a page."""
    assert sorted(mentioned() - set(listed())) == []


def test_names_of_the_list_are_sorted_and_unique():
    assert listed() == sorted(set(listed())), f"sort {LIST.name} by python -m tests.public_names"


def test_names_of_the_list_can_be_imported():
    missing = []
    for name in listed():
        try:
            assert find_spec(name) if name in NOT_IMPORTED else resolved(name) is not None
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_both_modules_of_checkpoints_can_be_imported():
    for name in ("checkpoint", "checkpointing"):
        assert f"gleanrl.{name}" in listed() and resolved(f"gleanrl.{name}")


@pytest.mark.parametrize("name", gleanrl.extending.__all__)
def test_names_for_extensions_equal_the_names_in_their_modules(name):
    found = getattr(gleanrl.extending, name)
    assert found.__name__ == name and found.__doc__


def test_a_wrong_name_is_found():
    page = "`gleanrl.data.Nothing`\n```python\nfrom gleanrl.envs import Nowhere\n```\n"
    page += "::: gleanrl.data.specs\n    options:\n      members: [Binary, Gone]\n"
    wrong = {"gleanrl.data.Nothing", "gleanrl.envs.Nowhere", "gleanrl.data.specs.Gone"}
    assert in_page(page) == wrong | {"gleanrl.envs", "gleanrl.data.specs", "gleanrl.data.specs.Binary"}
    for name in sorted(wrong):
        with pytest.raises((ImportError, AttributeError)):
            resolved(name)
    assert list(imported("import torch\nfrom os import path\nfrom gleanrl import data")) == ["gleanrl.data"]
