"""The native reader handles short reads, interrupted reads and failing disks."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.native_reads import build, run


def test_load_with_a_failing_native_call_raises_or_succeeds(tmp_path: Path) -> None:
    print(run(build(tmp_path), tmp_path / "kept"))
