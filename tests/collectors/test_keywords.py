"""What keywords mean."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict.nn import InteractionType

from gleanrl.collectors.keywords import (
    WholeOptions,
    exploration_of,
    feed_of,
    options_of,
    require_resets,
    whole_or_not,
)
from gleanrl.collectors.whole import WholeTrajectories
from gleanrl.data import ListStorage, ReplayBuffer
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, UnsupportedError
from tests.collectors.helpers import collection
from tests.fakes_base import CountingEnv


def test_exploration() -> None:
    assert exploration_of("mode", None) is InteractionType.MODE and exploration_of(None, None) is None
    with pytest.warns(DeprecationWarning, match="exploration_mode"):
        assert exploration_of("mode", "random") is InteractionType.RANDOM


def test_options() -> None:
    assert options_of(None, None, "raise", False, False).max_steps is None
    assert options_of(-3, None, "raise", False, False).max_steps is None
    assert options_of(3, None, "mark", True, True).max_steps == 3
    with pytest.raises(InvalidArgumentError, match="max_frames_per_traj"):
        options_of(0.5, None, "raise", False, False)
    with pytest.raises(InvalidArgumentError, match="reset_when_done"):
        require_resets(False)


def test_buffers_and_whole_trajectories() -> None:
    assert feed_of(None, True, None, None) is None
    feed = feed_of(ReplayBuffer(storage=ListStorage(5)), True, None, None)
    assert feed is not None and not feed.copies
    with pytest.raises(UnsupportedError, match="extend_buffer=False"):
        feed_of(ReplayBuffer(storage=ListStorage(5)), False, print, None)
    source = collection(CountingEnv())
    assert whole_or_not(source, WholeOptions(), False, clash=True) is source
    assert isinstance(whole_or_not(source, WholeOptions(2), False, clash=False), WholeTrajectories)
    with pytest.raises(UnsupportedError, match="trajs_per_batch: not together with set_truncated"):
        whole_or_not(source, WholeOptions(2), False, set_truncated=True)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((0,), InvalidArgumentError, "trajs_per_batch"),
        ((2, "list"), InvalidArgumentError, "traj_format: expected 'padded' or 'cat', got 'list'"),
        ((2, None, 0), InvalidArgumentError, "trajs_per_write"),
        ((None, "cat"), MissingArgumentError, "traj_format: .* give trajs_per_batch, too"),
        ((None, None, 2), MissingArgumentError, "trajs_per_write: .* give trajs_per_batch, too"),
    ],
)
def test_words_about_whole_trajectories_need_each_other(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        WholeOptions(*given)
