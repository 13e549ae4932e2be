"""Checkpoints of every released format. Each of them must load in all later releases.

Each folder ``golden/<format>/<specimen>`` was written by `dumps`, and `records.json` next to it holds its expected
values.
Committed folders are never changed. When a format is final, and before its release, run `python -m
tests._checkpoint.golden` once to add its folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gleanrl._checkpoint.manifest import FORMAT
from tests._checkpoint.specimens import SPECIMENS, filled, records_in

GOLDEN = Path(__file__).with_name("golden")


def add(folder: Path) -> None:
    """Write a checkpoint of each specimen, and the expected values of all of them."""
    if folder.exists():
        sys.exit(f"{folder} is there: what is released isn't changed")
    expected = {}
    for name in SPECIMENS:
        made = filled(name)
        expected[name] = records_in(name, made)
        made.dumps(folder / name.replace(" ", "-"))
        (folder / name.replace(" ", "-") / "LOCK").unlink()
    (folder / "records.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    add(GOLDEN / f"{FORMAT}")
