"""Every name in the compatibility table can be imported, and the page about other releases agrees with the table."""

from __future__ import annotations

import importlib

import pytest

from gleanrl.compat.names import ALIASES, KEYWORDS, MODULES


@pytest.mark.parametrize("row", ALIASES, ids=lambda row: f"{row.module}.{row.name}")
def test_an_alias_is_its_target(row):
    module = importlib.import_module(row.module)
    owner, _, name = row.target.rpartition(":")
    target = getattr(importlib.import_module(owner) if owner else module, name)
    assert getattr(module, row.name) is target
    assert row.name.startswith("_") or row.name in module.__all__


@pytest.mark.parametrize("path", MODULES)
def test_other_paths_return_the_same_objects(path):
    module = importlib.import_module(path)
    assert module.__all__
    for source in MODULES[path]:
        owner, _, name = source.partition(":")
        origin = importlib.import_module(owner)
        for given in [name] if name else origin.__all__:
            assert getattr(module, given) is getattr(origin, given)


def test_no_name_has_two_rows():
    names = [(row.module, row.name) for row in ALIASES]
    assert len(names) == len(set(names))


def test_older_keywords_have_another_spelling():
    for words in KEYWORDS.values():
        assert all(before != now for before, now in words.items())
