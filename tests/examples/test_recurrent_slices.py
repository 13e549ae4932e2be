"""The example of recurrent learning on slices has the right loss, runs briefly, and learns."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recurrent_slices.py"


def run(monkeypatch: Any, capsys: Any, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return capsys.readouterr().out


def slices(is_init: bool) -> TensorDict:
    """Return two slices of five steps; the last two steps of the second slice are padding."""
    torch.manual_seed(0)
    observations = torch.randn(2, 6, 2)
    first = torch.zeros(2, 5, 1, dtype=torch.int8)
    first[:, 0] = is_init
    after = {
        "observation": observations[:, 1:],
        "reward": torch.ones(2, 5, 1),
        "terminated": torch.zeros(2, 5, 1, dtype=torch.bool),
    }
    data = {
        "observation": observations[:, :-1],
        "is_init": first,
        "action": torch.tensor([1, 0]).expand(2, 5, 2),
        "next": after,
        "collector": {"mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2])},
    }
    return TensorDict(data, [2, 5])


@pytest.mark.parametrize(("is_init", "counted"), [(True, range(5)), (False, range(2, 5))])
def test_which_steps_count(is_init: bool, counted: range) -> None:
    example = runpy.run_path(str(EXAMPLE))
    net = example["RecurrentQ"](8)
    target = copy.deepcopy(net)

    def loss(row: int, step: int, reward: float) -> float:
        batch = slices(is_init)
        batch["next", "reward"][row, step] = reward
        return example["td_loss"](net, target, batch, burn_in=2, gamma=0.9).item()

    # A step counts if its reward changes the loss.
    found = {
        (row, step) for row in range(2) for step in range(5) if loss(row, step, 9.0) != loss(row, step, 1.0)
    }
    assert found == {(0, step) for step in counted} | {(1, step) for step in counted if step < 3}


def test_the_state_of_the_policy_ends_with_the_episode() -> None:
    example = runpy.run_path(str(EXAMPLE))
    policy = example["Policy"](example["RecurrentQ"](8))
    observation, begins, goes_on = torch.ones(2), torch.ones(1), torch.zeros(1)
    states = []
    with torch.no_grad():
        for is_init in (begins, goes_on, begins):
            policy(observation, is_init)
            states.append(policy.state)
    assert not torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_a_short_run(monkeypatch: Any, capsys: Any) -> None:
    out = run(monkeypatch, capsys, "--total-frames", "1200", "--updates-per-batch", "2")
    assert "not solved" in out and "after 1,200 frames" in out


def test_it_learns(monkeypatch: Any, capsys: Any) -> None:
    # Random actions last for 22 steps on average.
    out = run(monkeypatch, capsys, "--total-frames", "14000")
    assert float(out.split("mean return ")[1].split()[0]) > 35.0
