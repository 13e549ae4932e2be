"""Missing flags and rewards are completed, and a missing last dimension is added."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs.env_specs import EnvSpecs
from gleanrl.envs.outcomes import check_not_done, check_outcome, complete_outcome, complete_root
from gleanrl.errors import EnvironmentContractError, SpecError

SIZE = (2,)


@pytest.fixture
def specs():
    found = EnvSpecs(SIZE)
    found.set("observation", Composite(x=Categorical(3, (*SIZE,)), shape=SIZE))
    return found


@pytest.mark.parametrize("lead", [(), (5,)], ids=["its batch size", "more"])
def test_missing_entries_have_the_shape_of_the_data(specs, lead):
    size = torch.Size((*lead, *SIZE))
    ended = torch.zeros(size, dtype=torch.bool)
    out = complete_outcome(TensorDict({"reward": torch.ones(size).double(), "done": ended}, size), specs)
    assert out["reward"].shape == out["done"].shape == out["terminated"].shape == (*size, 1)
    assert out["reward"].dtype is torch.float32
    assert complete_root(TensorDict({}, size), specs)["terminated"].shape == (*size, 1)


def test_missing_reward_raises_unless_none_is_declared(specs):
    with pytest.raises(
        EnvironmentContractError, match=r"_step returned no 'reward'.*reward_spec = Composite\(\)"
    ):
        complete_outcome(TensorDict({}, SIZE), specs)
    specs.set("reward", Composite(shape=SIZE))
    assert "reward" not in complete_outcome(TensorDict({}, SIZE), specs).keys()


@pytest.mark.parametrize("lead", [(), (5,)], ids=["its batch size", "more"])
def test_check_outcome_refuses_values_outside_their_spec(specs, lead):
    size = torch.Size((*lead, *SIZE))
    good = {"x": torch.zeros(size, dtype=torch.int64), "reward": torch.zeros(size)}
    out = complete_outcome(TensorDict(good, size), specs)
    check_outcome(out, specs)
    with pytest.raises(SpecError):
        check_outcome(out.set("x", out["x"] + 3), specs)


def test_done_counts_where_a_row_was_reset(specs):
    specs.set("reward", Unbounded((*SIZE, 1)))
    done = torch.tensor([[True], [False]])
    root = complete_root(TensorDict({"done": done}, SIZE), specs)
    check_not_done(root, {(): ~done}, specs, "Name")
    for masks in ({}, {(): done}):
        with pytest.raises(EnvironmentContractError, match="reset of Name returned done"):
            check_not_done(root, masks, specs, "Name")
