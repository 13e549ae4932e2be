"""The SAC example computes the right log-probabilities, and its policy runs in the core."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

PATH = Path(__file__).resolve().parents[2] / "examples" / "sac_pendulum.py"


def test_log_probabilities_are_those_of_the_squashed_normal_distribution() -> None:
    example = runpy.run_path(str(PATH))
    torch.manual_seed(0)
    policy, observation = example["make_policy"](), torch.randn(50, 3)
    action, log_prob = example["act"](policy, observation)
    squashed = [TanhTransform(cache_size=1), AffineTransform(0.0, 2.0)]
    expected = TransformedDistribution(Normal(*policy[0].module(observation)), squashed)
    torch.testing.assert_close(log_prob, expected.log_prob(action), rtol=1e-3, atol=1e-3)
    assert action.abs().max() < 2


def test_it_learns_with_a_policy_in_the_core(monkeypatch: Any, capsys: Any) -> None:
    options = ("--policy-backend", "native", "--total-frames", "1200", "--updates-per-batch", "2")
    monkeypatch.setattr("sys.argv", [str(PATH), *options])
    threads = torch.get_num_threads()
    runpy.run_path(str(PATH), run_name="__main__")
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert out.startswith("mean return -") and "after 1,200 frames" in out
