"""Exploration types are tensordict's interaction types under other names."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, set_interaction_type

from gleanrl.envs.exploration import (
    ExplorationType,
    exploration_from_string,
    exploration_mode,
    exploration_type,
    set_exploration_mode,
    set_exploration_type,
)
from gleanrl.errors import InvalidArgumentError


def test_exploration_and_interaction_type_are_one_setting() -> None:
    assert ExplorationType is InteractionType
    with set_exploration_type(ExplorationType.MODE), set_interaction_type(InteractionType.RANDOM):
        assert exploration_type() is ExplorationType.RANDOM


def test_tensordicts_modules_obey() -> None:
    module = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=torch.distributions.Normal
    )
    td = TensorDict({"loc": torch.zeros(2), "scale": torch.ones(2)}, [])
    with set_exploration_type(ExplorationType.MEAN):
        assert not module(td)["x"].any()
    with set_exploration_type(ExplorationType.RANDOM):
        assert module(td)["x"].all()


@pytest.mark.parametrize("kind", ExplorationType)
def test_older_names_are_accepted(kind: ExplorationType) -> None:
    for name in (kind.name, kind.name.lower(), kind.name.title()):
        assert exploration_from_string(name) is kind
    with set_exploration_mode(kind.name.lower()):
        assert exploration_type() is kind and exploration_mode() == kind.name.lower()


def test_none_can_be_set() -> None:
    with set_exploration_type(None):
        assert exploration_type() is None and exploration_mode() is None


def test_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="one of .*'random'.*, got 'wild'"):
        exploration_from_string("wild")


def test_set_exploration_type_decorates_functions() -> None:
    @set_exploration_type(ExplorationType.MEDIAN)
    def inside() -> object:
        return exploration_type()

    outer = exploration_type()
    assert inside() is ExplorationType.MEDIAN and exploration_type() is outer
