"""The example of prioritized replay has the right loss, runs briefly, and learns."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "per_dqn_cartpole.py"


def run(monkeypatch: Any, capsys: Any, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return capsys.readouterr().out


class Sum(nn.Module):
    """Returns the values of both actions: the sum of the observation, and ten times this sum."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        total = observation.sum(-1, keepdim=True)
        return torch.cat([total, 10 * total], -1)


def test_the_error_bootstraps_all_but_the_terminated() -> None:
    td_error = runpy.run_path(str(EXAMPLE))["td_error"]
    flags = torch.tensor([[False], [True]])
    after = {"observation": torch.ones(2, 4), "reward": torch.ones(2, 1), "terminated": flags}
    data = {"observation": torch.ones(2, 4), "action": torch.tensor([[1, 0], [0, 1]]), "next": after}
    error = td_error(Sum(), Sum(), TensorDict(data, [2]), gamma=0.5)
    assert error.tolist() == [4.0 - (1.0 + 0.5 * 40.0), 40.0 - 1.0]


def test_a_short_run(monkeypatch: Any, capsys: Any) -> None:
    out = run(monkeypatch, capsys, "--total-frames", "1200", "--updates-per-batch", "3")
    assert "not solved" in out and "after 1,200 frames" in out


def test_it_learns(monkeypatch: Any, capsys: Any) -> None:
    out = run(monkeypatch, capsys, "--total-frames", "9000")
    assert float(out.split("mean return ")[1].split()[0]) > 40.0
