"""The short examples run in seconds without a warning, and print the documented results."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, capsys: Any) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_custom_environment_passes_the_checks(capsys: Any) -> None:
    out = run("custom_environment", capsys)
    assert "passed   rollout" in out and out.count("200 frames") == 3


def test_the_environment_has_ten_lines() -> None:
    lines = (EXAMPLES / "custom_environment.py").read_text().splitlines()
    begin = lines.index("    def _reset(self, tensordict=None, **kwargs):")
    end = next(i for i in range(begin, len(lines)) if lines[i].startswith("def home"))
    assert len([line for line in lines[begin:end] if line.strip()]) == 10


def test_vector_environment_example_finishes_all_episodes(capsys: Any) -> None:
    out = run("vector_environment", capsys)
    assert out.count("7680 frames of") == 2
    fallen, all_of_them = (int(word) for word in out.splitlines()[-1].split() if word.isdigit())
    assert fallen == all_of_them > 50


def test_multi_agent_example_succeeds(capsys: Any) -> None:
    out = run("multi_agent", capsys)
    assert "passed   flags" in out and "of them successful" in out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_example_names_its_command(path: Path) -> None:
    assert f"python examples/{path.name}" in path.read_text()
