"""The builder makes a source from a config, an environment and a policy."""

from __future__ import annotations

from typing import Any

import pytest

from gleanrl.collectors.build import CollectorConfig, assemble
from gleanrl.collectors.frame_accounting import Numbering
from gleanrl.collectors.source import CollectionOptions, Grant
from gleanrl.envs import ParallelEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import InitTracker, RewardSum
from gleanrl.errors import UnsupportedError
from tests.collectors.helpers import SCRIPT, collect
from tests.fakes_base import CountingEnv


def test_first_id_and_numbering_determine_the_ids() -> None:
    made = assemble(
        CountingEnv(SCRIPT), None, CollectorConfig(CollectionOptions()), numbering=Numbering(2, 4), first_id=7
    )
    ids = collect(made.collection)["collector", "traj_ids"]
    assert ids.min() == 7 * 4 + 2 and (ids % 4 == 2).all()


def test_step_limit_adds_the_truncated_flag() -> None:
    env = CountingEnv(SCRIPT, flags=("done", "terminated"))
    with pytest.raises(UnsupportedError, match="set_truncated"):
        assemble(env, None, CollectorConfig(CollectionOptions(), set_truncated=True))
    made = assemble(env, None, CollectorConfig(CollectionOptions(max_steps=2)))
    assert "truncated" in made.collection.collect(Grant(3)).batch["next"].keys()


@pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize("wrap", [None, RewardSum])
def test_step_limit_adds_the_flag_to_members_of_a_batch(batch: Any, wrap: Any) -> None:
    def member() -> CountingEnv:
        return CountingEnv(SCRIPT, flags=("done", "terminated"))

    def env() -> Any:
        made = batch(2, member if wrap is None else lambda: TransformedEnv(member(), wrap()))
        return made if wrap is None else TransformedEnv(made, InitTracker())

    inside = env()
    made = assemble(inside, None, CollectorConfig(CollectionOptions(max_steps=2)))
    found = made.collection.collect(Grant(8)).batch
    assert (found["next", "done"] == found["next", "truncated"] | found["next", "terminated"]).all()
    assert found["next", "truncated"].any() and found["next", "done"][:, 1::2].all()
    made.collection.close()


@pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
def test_existing_members_get_no_flag(batch: Any) -> None:
    env = batch(2, lambda: CountingEnv(SCRIPT, flags=("done", "terminated")))
    env.reset()
    with pytest.raises(
        UnsupportedError, match="add_truncated_keys: .* call it on the environment inside create_env"
    ):
        assemble(env, None, CollectorConfig(CollectionOptions(max_steps=2)))
    env.close()


def test_the_environment_is_shown_before_it_is_used() -> None:
    seen: list[object] = []
    env = CountingEnv(SCRIPT)
    assemble(env, None, CollectorConfig(CollectionOptions()), prepared=seen.append)
    assert seen == [env]
