"""The example with Ray runs briefly, on a Ray cluster that is already running."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_dqn.py"


@pytest.mark.filterwarnings("ignore:ray_init_config. Ray runs already")
def test_a_short_run(monkeypatch: Any, capsys: Any, ray_session: Any) -> None:
    address = ray_session.get_runtime_context().gcs_address
    arguments = ["--total-frames", "1500", "--collectors", "1", "--address", address]
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *arguments])
    threads = torch.get_num_threads()
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "not solved" in out and "after 1,500 frames" in out
    assert ray_session.is_initialized()  # only the program that started Ray ends it
