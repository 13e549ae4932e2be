"""Manifests of earlier formats are migrated step by step to the newest one. Later formats are refused by number."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl._checkpoint import hdf5, manifest, tree_codec
from gleanrl._checkpoint import manifest as migrations
from gleanrl._checkpoint.manifest import migrated
from gleanrl.errors import CorruptCheckpointError, IncompatibleCheckpointError

STEPS = {
    1: lambda tree: {**tree, "format": 2, "b": tree["a"] + 1},
    2: lambda tree: {"format": 3, "c": tree["b"] * 10},
}


def test_migrations_run_step_by_step() -> None:
    assert migrated({"format": 1, "a": 4}, 3, STEPS, "it") == {"format": 3, "c": 50}
    assert migrated({"format": 2, "b": 4}, 3, STEPS, "it") == {"format": 3, "c": 40}
    assert migrated({"format": 3, "c": 4}, 3, STEPS, "it") == {"format": 3, "c": 4}


def test_unknown_formats_are_refused_by_number() -> None:
    with pytest.raises(
        IncompatibleCheckpointError, match="it: expected format 3 or an earlier one, got 4: a later release"
    ):
        migrated({"format": 4}, 3, STEPS, "it")
    with pytest.raises(IncompatibleCheckpointError, match="it: format 0, which no release wrote"):
        migrated({"format": 0}, 3, STEPS, "it")


@pytest.mark.parametrize(
    "tree", [{}, {"format": "1"}, {"format": True}, {"format": -1}, {"format": 1}, {"format": 1, "a": "x"}]
)
def test_error_in_a_migration_is_damage(tree: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="it: "):
        migrated(tree, 3, STEPS, "it")


@pytest.mark.parametrize(
    ("steps", "newest"), [(migrations.MANIFESTS, manifest.FORMAT), (migrations.HDF5, hdf5.FORMAT)]
)
def test_the_tables_have_no_gaps(steps: dict[int, Any], newest: int) -> None:
    assert sorted(steps) == list(range(min(steps, default=newest), newest))


KINDS = {
    1: {"float", "bytes", "dtype", "device", "file", "size", "tuple", "map", "tensor", "tensordict"},
    2: {"rows"},
    3: {"data", "stack"},
    4: set(),
}
"""The kinds of values that each format of manifests adds to the format before it."""


def test_new_kind_of_value_needs_a_new_format() -> None:
    """An older library must report a later format instead of a damaged checkpoint."""
    assert {f"${kind}" for kinds in KINDS.values() for kind in kinds} == set(tree_codec._MAKERS)
    assert max(KINDS) == manifest.FORMAT
