"""`show` prints summaries of stored records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.data.datasets.show import show
from gleanrl.errors import CheckpointError, GleanError


def steps(lengths: list[int], reward: Any = None, **more: Any) -> TensorDict:
    """Return episodes of given lengths, each with an id and a terminated end. Rewards are 0, 1, 2, ..."""
    count = sum(lengths)
    ended = torch.zeros(count, 1, dtype=torch.bool)
    ended[torch.tensor(lengths).cumsum(0) - 1] = True
    observed = torch.arange(count + len(lengths)).float()
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    t = torch.arange(count) + ids
    following = {
        "observation": observed[t + 1],
        "reward": torch.arange(count).float()[:, None] if reward is None else reward,
        "terminated": ended,
        "truncated": torch.zeros_like(ended),
        "done": ended,
    }
    action = torch.arange(count) % 3
    given = {"observation": observed[t], "action": action, "collector": {"traj_ids": ids}, "next": following}
    return TensorDict({**given, **more}, [count])


def saved(folder: Path, data: Any, size: int | None = None, **options: Any) -> Path:
    buffer = ReplayBuffer(storage=LazyTensorStorage(size or len(data), **options))
    buffer.extend(data)
    buffer.dumps(folder / "saved")
    return folder / "saved"


def lines(text: str) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


def test_summary_has_columns_statistics_and_ends(tmp_path: Path):
    found = lines(show(saved(tmp_path, steps([3, 1, 2]))))
    assert found[0] == ["6", "transitions", "in", "3", "episodes,", "0.000186", "MB"]
    assert ["action", "int64", "()", "4.8e-05", "0", "1", "2", "0", "no"] in found
    assert ["length", "1", "2", "2", "3", "0"] in found and ["return", "3", "5", "3", "9", "0"] in found
    assert ["3", "complete,", "3", "terminated,", "0", "truncated"] in found
    assert found[-2:] == [["problems:", "none"], ["warnings:", "none"]]


def test_summary_names_episode_and_step_of_a_problem(tmp_path: Path):
    data = steps([3, 4, 2])
    data["next", "observation"][4] = 99.0
    data["next", "reward"][7] = torch.nan
    found = show(saved(tmp_path, data))
    assert ["next", "observation", "1", "4", "1", "1"] in [line[:6] for line in lines(found)]
    assert ["not", "finite", "1", "7", "2", "0"] in [line[:6] for line in lines(found)]
    assert ["return", "3", "10.5", "10.5", "18", "1"] in lines(
        found
    )  # the episode with the NaN isn't counted


def test_summary_of_several_streams_in_a_full_ring_finds_rows(tmp_path: Path):
    ended = torch.tensor([[0, 0], [1, 0], [0, 1], [0, 0], [1, 0]]).bool()
    reward = torch.ones(5, 2)
    reward[3, 1] = torch.inf
    data = TensorDict({"x": torch.arange(10.0).view(5, 2), "next": {"reward": reward, "done": ended}}, [5, 2])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), dim_extend=0)
    buffer.extend(data)  # step 4 overwrites step 0
    buffer.dumps(tmp_path / "saved")
    found = lines(show(tmp_path / "saved"))
    # Stream 0 has the steps 1 | 2 3 4, stream 1 the steps 1 2 | 3 4. So the row of the infinity begins an episode.
    assert ["not", "finite", "1", "7", "3", "0"] in [line[:6] for line in found]
    assert ["length", "1", "2", "2", "3", "0"] in found


@pytest.mark.parametrize("kind", ["one row", "integers", "two rewards", "groups", "no flags", "plain tensor"])
def test_summary_of_unusual_records(tmp_path: Path, kind: str):
    if kind == "one row":
        assert show(saved(tmp_path, steps([1]))).startswith("1 transition in 1 episode, ")
    elif kind == "integers":
        made = saved(tmp_path, steps([2, 2], torch.tensor([[1], [2], [3], [2**40]])))
        assert ["return", "3", "5.49756e+11", "5.49756e+11", "1.09951e+12", "0"] in lines(show(made))
    elif kind == "two rewards":
        found = show(saved(tmp_path, steps([2], torch.tensor([[1.0, -2.0], [1.0, -2.0]]))))
        assert ["return.0", "2", "2", "2", "2", "0"] in lines(found)
        assert ["return.1", "-4", "-4", "-4", "-4", "0"] in lines(found)
    elif kind == "groups":
        data = steps([2, 2])
        data["next", "agents"] = TensorDict({"reward": torch.ones(4, 3, 1)}, [4])
        assert "return of agents.reward.2" in show(saved(tmp_path, data))
    elif kind == "no flags":
        data = TensorDict({"observation": torch.arange(4)}, [4])
        found = show(saved(tmp_path, data))
        assert "4 transitions, " in found and "no episodes: " in found and "problems: none" in found
    else:
        assert ["tensor", "float32", "()", "1.2e-05", "0", "1", "2", "0", "no"] in lines(
            show(saved(tmp_path, torch.arange(3.0)))
        )


def test_summary_of_an_empty_buffer(tmp_path: Path):
    ReplayBuffer(storage=LazyTensorStorage(5)).dumps(tmp_path / "empty")
    assert show(tmp_path / "empty").startswith("0 transitions")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    made = saved(tmp_path, steps([3]))
    next(made.rglob("manifest.json")).write_text("{")
    with pytest.raises(CheckpointError):
        show(made)
    with pytest.raises(GleanError):
        show(tmp_path)
