"""Checkpoints of every released format load bit for bit, and `dumps` writes only the newest format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gleanrl._checkpoint.manifest import FORMAT
from tests._checkpoint.golden import GOLDEN, add
from tests._checkpoint.specimens import SPECIMENS, as_values, filled, records_in

EXPECTED = {path.parent.name: json.loads(path.read_text()) for path in GOLDEN.glob("*/records.json")}
CASES = [(version, name) for version, expected in EXPECTED.items() for name in expected]


@pytest.mark.parametrize(("version", "name"), CASES)
def test_checkpoints_of_earlier_releases_load(version: str, name: str) -> None:
    made = SPECIMENS[name]()
    made.loads(GOLDEN / version / name.replace(" ", "-"))
    assert records_in(name, made) == EXPECTED[version][name]


@pytest.mark.parametrize("name", [name for version, name in CASES if version == f"{FORMAT}"])
def test_checkpoints_of_the_newest_format_hold_all_state(name: str) -> None:
    made, same = SPECIMENS[name](), filled(name)
    made.loads(GOLDEN / f"{FORMAT}" / name.replace(" ", "-"))
    assert without_names(made.state_dict()) == without_names(same.state_dict())


def without_names(state: object) -> object:
    """Return the values of a state without its content names, which are unique to each state."""
    if isinstance(state, dict):
        return {
            key: without_names(value) for key, value in state.items() if key not in ("version", "content")
        }
    if isinstance(state, (list, tuple)):
        return [without_names(value) for value in state]
    return as_values(state)


def test_newest_format_has_a_checkpoint_of_every_specimen() -> None:
    assert set(EXPECTED[f"{FORMAT}"]) == set(SPECIMENS)


def test_existing_golden_folder_is_not_overwritten(tmp_path: Path) -> None:
    add(tmp_path / "new")
    assert set(json.loads((tmp_path / "new" / "records.json").read_text())) == set(SPECIMENS)
    with pytest.raises(SystemExit, match="isn't changed"):
        add(tmp_path / "new")
