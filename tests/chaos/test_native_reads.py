"""The native reader handles short reads, interrupted reads and failing disks."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.native_reads import build, run


def test_a_load_whose_nth_native_call_fails(tmp_path: Path) -> None:
    print(run(build(tmp_path), tmp_path / "kept"))
