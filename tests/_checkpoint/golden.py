"""Checkpoints of every released format, which have to load for ever: `python -m tests._checkpoint.golden` adds today's.

Each folder ``golden/<format>/<specimen>`` is one that `dumps` wrote; `records.json` beside it says what was in it.
What stands there is never changed. Run this once a format is final, before it is released.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gleanrl._checkpoint.manifest import FORMAT
from tests._checkpoint.specimens import SPECIMENS, filled, records_in

GOLDEN = Path(__file__).with_name("golden")


def add(folder: Path) -> None:
    """Write a checkpoint of each specimen, and what is in it."""
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
