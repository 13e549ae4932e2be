"""The plots draw the records that a buffer or a checkpoint stores."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl import plot
from gleanrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from gleanrl.errors import (
    DatasetError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    MissingLibraryError,
    UnsupportedError,
)

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
pytest.importorskip("matplotlib.pyplot")  # each test can run alone


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    matplotlib.pyplot.close("all")


def steps(reward: Any, ended: Any) -> TensorDict:
    reward, ended = torch.tensor(reward), torch.tensor(ended).bool()
    return TensorDict({"next": {"reward": reward, "done": ended}}, ended.shape)


def stored(data: TensorDict, size: int = 8, ndim: int = 1) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), dim_extend=0)
    buffer.extend(data)
    return buffer


def points(ax: Any, line: int = 0) -> list[tuple[float, float]]:
    drawn = ax.lines[line]
    return [*zip(drawn.get_xdata().tolist(), drawn.get_ydata().tolist(), strict=True)]


def test_returns_are_at_the_ends_of_episodes_in_the_order_of_time():
    reward = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]
    buffer = stored(steps(reward, [[0, 1], [1, 0], [0, 0], [0, 1]]), ndim=2)
    ax = plot.returns(buffer, window=2)
    assert points(ax) == [(1, 10), (2, 3), (4, 7), (4, 90)]  # the second stream ends first
    assert points(ax, 1) == [(2, 6.5), (4, 5), (4, 48.5)]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time step", "return")


def test_means_leave_out_returns_that_are_not_finite():
    buffer = stored(steps([1.0, torch.nan, 3.0, 5.0], [1, 1, 1, 1]))
    ax = plot.returns(buffer, window=2)
    assert points(ax, 1) == [(3, 2), (4, 4)] and np.isnan(points(ax)[1][1])


def test_rewards_with_several_values_give_several_series():
    ax = plot.returns(stored(steps([[1.0, 5.0], [2.0, 6.0]], [0, 1])), window=1)
    assert [points(ax), points(ax, 1)] == [[(2, 3)], [(2, 11)]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["return.0", "return.1"]


def test_lengths_are_drawn_on_given_axes_from_a_path(tmp_path: Path):
    stored(steps([1.0] * 10, [0, 0, 1] * 3 + [0])).dumps(tmp_path / "saved")  # the ring has the last 8 steps
    _, mine = matplotlib.pyplot.subplots()
    assert plot.lengths(tmp_path / "saved", ax=mine) is mine
    assert points(mine) == [(1, 1), (4, 3), (7, 3), (8, 1)]


def test_occupancy_shows_the_episode_of_each_slot():
    image = plot.occupancy(stored(steps([1.0] * 5, [0, 1, 0, 0, 1]))).images[0].get_array()
    assert image.filled(-1).tolist() == [[0, 0, 1, 1, 1, -1, -1, -1]]
    ax = plot.occupancy(stored(steps([1.0] * 10, [0, 0, 1] * 3 + [0])))
    # The slots are 8 9 | 2 | 3 4 5 | 6 7, and the step 8 ends an episode.
    assert ax.images[0].get_array().tolist() == [[3, 0, 1, 2, 2, 2, 3, 3]]
    assert ax.lines[0].get_xdata() == [2, 2] and ax.get_title() == "8 of 8 rows"


def test_priorities_are_counted():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(5))
    buffer.extend(steps([1.0] * 4, [0, 0, 0, 1]))
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 1.0, 1.0, 9.0]))
    bars = plot.priorities(buffer).patches
    assert [(bar.get_x(), bar.get_height()) for bar in bars if bar.get_height()] == [
        (1, 3),
        (pytest.approx(8.84), 1),
    ]


def test_empty_buffers_give_empty_plots():
    empty = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(5))
    assert [len(draw(empty).patches) for draw in (plot.returns, plot.lengths, plot.occupancy)] == [0, 0, 0]
    assert not any(bar.get_height() for bar in plot.priorities(empty).patches)


def test_errors_name_the_given_and_the_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    buffer = stored(steps([1.0], [1]))
    with pytest.raises(InvalidTypeError, match="data: expected a buffer or a path, got list"):
        plot.returns([1])
    with pytest.raises(DatasetError):
        plot.lengths(tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match="window: expected an integer of 1 or more, got 0"):
        plot.returns(buffer, window=0)
    with pytest.raises(
        UnsupportedError, match="priorities: expected a prioritized sampler, got RandomSampler"
    ):
        plot.priorities(buffer)
    with pytest.raises(MissingKeyError, match="returns: expected a reward"):
        plot.returns(stored(TensorDict({"next": {"done": torch.ones(2).bool()}}, [2])))
    with pytest.raises(UnsupportedError):
        plot.occupancy(ReplayBuffer(storage=ListStorage(3)))
    assert matplotlib.pyplot.get_fignums() == []
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'gleanrl\[plot\]'"):
        plot.returns(buffer)
