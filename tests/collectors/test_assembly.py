"""A recipe, an environment and a policy become a collection."""

from __future__ import annotations

import pytest

from gleanrl.collectors.assembly import Recipe, assemble
from gleanrl.collectors.budget import Grant
from gleanrl.collectors.options import CollectionOptions
from gleanrl.collectors.tracking import Numbering
from gleanrl.errors import UnsupportedError
from tests.collectors.helpers import SCRIPT, collect
from tests.fakes_base import CountingEnv


def test_ids_begin_where_they_are_told_to() -> None:
    made = assemble(
        CountingEnv(SCRIPT), None, Recipe(CollectionOptions()), numbering=Numbering(2, 4), first_id=7
    )
    ids = collect(made.collection)["collector", "traj_ids"]
    assert ids.min() == 7 * 4 + 2 and (ids % 4 == 2).all()


def test_a_limit_needs_a_flag_and_gets_one() -> None:
    env = CountingEnv(SCRIPT, flags=("done", "terminated"))
    with pytest.raises(UnsupportedError, match="set_truncated"):
        assemble(env, None, Recipe(CollectionOptions(), set_truncated=True))
    made = assemble(env, None, Recipe(CollectionOptions(max_steps=2)))
    assert "truncated" in made.collection.collect(Grant(3)).batch["next"].keys()


def test_the_environment_is_shown_before_it_is_used() -> None:
    seen: list[object] = []
    env = CountingEnv(SCRIPT)
    assemble(env, None, Recipe(CollectionOptions()), prepared=seen.append)
    assert seen == [env]
