"""The library calls a user's override of each hook of each public class.

The test fails if a new fast path, or a method that moved to another class, skips an override.
"""

from __future__ import annotations

import os

import pytest

from gleanrl import data, envs
from gleanrl.envs.transforms import Transform
from tests.golden.cases import Drift
from tests.golden.objects import MADE, NOT_MADE
from tests.hooks import EXERCISES, LEFT_OUT, TOGETHER, called_of, documented, listed, methods

HOOKS = listed()
ALL = float(os.environ.get("GLEANRL_CHAOS", 0)) >= 1
"""Whether hooks that no page mentions are tried, too."""
FIRST = (
    Drift,
    Transform,
    data.LazyTensorStorage,
    data.RandomSampler,
    data.RoundRobinWriter,
    data.ReplayBuffer,
)
"""Classes that fast test runs exercise, too."""


def marked(kind):
    return kind if kind in FIRST else pytest.param(kind, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", [*map(marked, EXERCISES)], ids=lambda kind: kind.__name__)
def test_each_overridden_hook_is_called(kind):
    skipped = set()
    for use in EXERCISES[kind][0]:
        hooks = HOOKS[kind.__name__, use.__name__]
        gone = sorted(set(hooks) - set(methods(kind)))
        assert gone == [], (
            f"hooks.txt: {kind.__name__} has no such methods; strike them if no user overrides them"
        )
        chosen = hooks if ALL else [name for name in hooks if name in documented()]
        for names in [chosen] if kind in TOGETHER else [[name] for name in chosen]:
            skipped |= {f"{use.__name__}: {name}" for name in set(names) - called_of(kind, use, *names)}
    assert skipped == set()


def test_each_public_class_is_exercised_or_left_out_for_a_reason():
    assert set(HOOKS) == {(k.__name__, use.__name__) for k, (uses, _) in EXERCISES.items() for use in uses}
    left_out = {kind for kinds in LEFT_OUT.values() for kind in kinds}
    known = {*EXERCISES, *left_out, envs.EnvBase, *(kind for kinds in NOT_MADE.values() for kind in kinds)}
    assert sorted(kind.__name__ for kind in set(MADE) - known) == []
    assert not left_out & set(EXERCISES)


def test_an_override_that_is_skipped_is_noticed(monkeypatch):
    monkeypatch.setattr(data.RoundRobinWriter, "takes_nothing", lambda self: None, raising=False)
    assert "takes_nothing" in methods(data.RoundRobinWriter)
    use = EXERCISES[data.RoundRobinWriter][0][0]
    assert called_of(data.RoundRobinWriter, use, "takes_nothing", "place") == {"place"}
