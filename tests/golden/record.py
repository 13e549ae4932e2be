"""Record states, checkpoints and pickles with the values that follow: `python -m tests.golden.record`.

They were recorded before the package's modules moved. States and pickles name classes by their modules. Each must load
as long as these names are importable. A change that removes an attribute of an environment needs a new recording.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gleanrl.checkpoint import Checkpoint
from tests.golden.cases import BUFFERS, COLLECTORS, collected, collector, continued, filled
from tests.golden.objects import MADE, public_classes

FOLDER = Path(__file__).with_name("recorded")
EXPECTED = FOLDER / "expected.json"
PICKLES = FOLDER / "pickles.gz"
SAVED_TOGETHER = {"gym": "td_priorities", "transformed": "slices"}
"""Collectors and buffers that `Checkpoint` saves together."""


def state_file(name: str) -> Path:
    return FOLDER / "states" / f"{name}.pt.gz"


def checkpoint_file(name: str) -> Path:
    return FOLDER / "checkpoints" / f"{name}.tar.gz"


def write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def packed(save: Callable[[Path], Any]) -> bytes:
    """Return the folder that `save` fills, as an archive."""
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=archive, mode="w:gz") as tar:
        save(Path(folder, "saved"))
        tar.add(
            Path(folder, "saved"),
            "saved",
            filter=lambda found: None if found.name.endswith("LOCK") else found,
        )
    return archive.getvalue()


def unpacked(file: Path, folder: Path) -> Path:
    """Extract an archive, and return the folder that was packed."""
    with tarfile.open(file) as tar:
        tar.extractall(folder, filter="data")
    return folder / "saved"


def read_state(name: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(gzip.decompress(state_file(name).read_bytes())), weights_only=True)


def record_collector(name: str) -> dict[str, Any]:
    made = collector(name)
    try:
        next(iter(made))
        state = made.state_dict()
        if name not in SAVED_TOGETHER:  # the random generators of the process would take most of the space
            state["source"]["place"]["generators"] = None
        content = io.BytesIO()
        torch.save(state, content)
        write(state_file(name), gzip.compress(content.getvalue(), mtime=0))
        if name in SAVED_TOGETHER:
            both = Checkpoint(collector=made, buffer=filled(SAVED_TOGETHER[name]))
            write(checkpoint_file(name), packed(both.save))
        return collected(name, made)
    finally:
        made.shutdown()


def record_buffer(name: str) -> dict[str, Any]:
    made = filled(name)
    write(checkpoint_file(f"buffer_{name}"), packed(made.dumps))
    return continued(name, made)


def record_pickles() -> None:
    made = {name: MADE[kind]() for name, kind in public_classes().items() if kind in MADE}
    pickles = {name: (pickle.dumps(value), shown(value)) for name, value in made.items()}
    write(PICKLES, gzip.compress(pickle.dumps(pickles), mtime=0))


def shown(value: Any) -> str:
    """Return the repr of an object, without addresses and random seeds."""
    return re.sub(r"0x[0-9a-f]+|seed=\d+", "?", repr(value))


def main() -> None:
    """Record all, or the kinds named on the command line: collectors, buffers, pickles."""
    kinds = sys.argv[1:] or ["collectors", "buffers", "pickles"]
    expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    if "collectors" in kinds:
        expected["collectors"] = {name: record_collector(name) for name in COLLECTORS}
    if "buffers" in kinds:
        expected["buffers"] = {name: record_buffer(name) for name in BUFFERS}
    if "pickles" in kinds:
        record_pickles()
    write(EXPECTED, (json.dumps(expected, separators=(",", ":")) + "\n").encode())


if __name__ == "__main__":
    main()
