"""All collectors share one set of config keywords."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict.nn import InteractionType

from gleanrl.collectors.config import Settings
from gleanrl.collectors.trajectory_batches import CompleteTrajectories
from gleanrl.data import ListStorage, ReplayBuffer
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingArgumentError, UnsupportedError
from tests.collectors.helpers import collection
from tests.fakes_base import CountingEnv


def of(**arguments: Any) -> Settings:
    common = {"exploration_type": None, "max_frames_per_traj": None, "track_policy_version": False}
    return Settings.of({**common, "another": 3, **arguments})


def test_exploration_type_is_parsed() -> None:
    assert of(exploration_type="mode").exploration_type is InteractionType.MODE
    assert of().exploration_type is None
    with pytest.warns(DeprecationWarning, match="exploration_mode"):
        settings = of(exploration_type="mode", exploration_mode="random")
    assert settings.exploration_type is InteractionType.RANDOM


def test_config_fills_the_collection_options() -> None:
    assert of().options().max_steps is of(max_frames_per_traj=-3).options().max_steps is None
    settings = of(max_frames_per_traj=3, nonfinite="mark", reset_at_each_iter=True, return_same_td=True)
    options = settings.options()
    assert (options.max_steps, options.nonfinite, options.reset_each, options.reuse_block) == (
        3,
        "mark",
        True,
        True,
    )
    with pytest.raises(InvalidArgumentError, match="max_frames_per_traj"):
        of(max_frames_per_traj=0.5)
    with pytest.raises(InvalidArgumentError, match="reset_when_done"):
        of(reset_when_done=False)
    with pytest.raises(InvalidTypeError, match="track_policy_version"):
        of(track_policy_version=1)
    with pytest.raises(InvalidArgumentError, match="nonfinite"):
        of(nonfinite="drop").options()


def test_config_makes_the_buffer_feed() -> None:
    buffer = ReplayBuffer(storage=ListStorage(5))
    assert of().sink is None
    sink = of(replay_buffer=buffer).sink
    assert sink is not None and sink.buffer is buffer and not sink.copies
    with pytest.raises(UnsupportedError, match="extend_buffer=False"):
        of(replay_buffer=buffer, extend_buffer=False, postproc=print)


def test_trajs_per_batch_wraps_the_source() -> None:
    source = collection(CountingEnv())
    assert of(nonfinite="mark").trajectory_source(source) is source
    assert isinstance(of(trajs_per_batch=2).trajectory_source(source), CompleteTrajectories)
    for name, value in (("set_truncated", True), ("preemptive_threshold", 0.5), ("nonfinite", "mark")):
        with pytest.raises(UnsupportedError, match=f"trajs_per_batch: it can't be combined with {name}"):
            of(trajs_per_batch=2, **{name: value}).trajectory_source(source)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"trajs_per_batch": 0}, InvalidArgumentError, "trajs_per_batch"),
        ({"trajs_per_batch": 2, "traj_format": "list"}, InvalidArgumentError, "expected 'padded' or 'cat'"),
        ({"trajs_per_batch": 2, "trajs_per_write": 0}, InvalidArgumentError, "trajs_per_write"),
        ({"traj_format": "cat"}, MissingArgumentError, "traj_format: .* pass trajs_per_batch, too"),
        ({"trajs_per_write": 2}, MissingArgumentError, "trajs_per_write: .* pass trajs_per_batch, too"),
        ({"pre_collect_hook": 3}, InvalidTypeError, "pre_collect_hook"),
    ],
)
def test_conflicting_keywords_are_refused(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        of(**given)
