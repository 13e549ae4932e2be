"""The examples with worker processes compute the right values, run briefly, and learn."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, monkeypatch: Any, capsys: Any, *arguments: str) -> str:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    threads = torch.get_num_threads()
    runpy.run_path(str(path), run_name="__main__")
    torch.set_num_threads(threads)
    return capsys.readouterr().out


def test_advantages_are_sums_of_errors_within_an_episode() -> None:
    """The expected sum is written out for an episode that ends in the middle, and for one that is truncated."""
    example = runpy.run_path(str(EXAMPLES / "ppo_workers.py"))
    torch.manual_seed(0)
    critic = nn.Linear(4, 1)
    size, steps = 2, 6
    done = torch.zeros(size, steps, 1, dtype=torch.bool)
    done[0, 2], done[1, 4] = True, True
    terminated = done.clone()
    terminated[1] = False
    after = {"observation": torch.rand(size, steps, 4), "reward": torch.rand(size, steps, 1)}
    flags = {"done": done, "terminated": terminated}
    batch = TensorDict({"observation": torch.rand(size, steps, 4), "next": {**after, **flags}}, [size, steps])
    found, target = example["advantages"](batch, critic)
    gamma, decay = example["GAMMA"], example["GAMMA"] * example["LAMBDA"]
    with torch.no_grad():
        value, future = critic(batch["observation"])[..., 0], critic(after["observation"])[..., 0]
    delta = after["reward"][..., 0] + gamma * future * ~terminated[..., 0] - value
    for row in range(size):
        for t in range(steps):
            ends = [k for k in range(t, steps) if done[row, k]] or [steps - 1]
            expected = sum(decay ** (k - t) * float(delta[row, k]) for k in range(t, ends[0] + 1))
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(target, found + value)


@pytest.mark.parametrize("name", ["ppo_workers", "dqn_workers"])
def test_a_short_run(name: str, monkeypatch: Any, capsys: Any) -> None:
    out = run(name, monkeypatch, capsys, "--total-frames", "2000")
    assert "not solved" in out and "after 2,000 frames" in out


@pytest.mark.parametrize(("name", "frames"), [("ppo_workers", 16_000), ("dqn_workers", 12_000)])
def test_it_learns(name: str, frames: int, monkeypatch: Any, capsys: Any) -> None:
    out = run(name, monkeypatch, capsys, "--total-frames", str(frames))
    assert float(out.split("mean return ")[1].split()[0]) > 50.0
