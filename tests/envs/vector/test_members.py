"""Members of a batch step behind TensorDicts."""

from __future__ import annotations

import copy

import pytest
import torch

from gleanrl._rollout.errors import StepFault
from gleanrl.envs import GymWrapper
from gleanrl.envs.vector.members import MemberGroup, ResetRequest, close_all, member_states
from gleanrl.errors import MissingKeyError
from tests.envs.vector.makers import oracle
from tests.fakes import FakeFailure, RaisingEnv
from tests.fakes_base import CountingEnv


def group(count=3):
    return MemberGroup([oracle(stream) for stream in range(count)])


def test_steps_and_resets_each():
    members = group()
    first = members.reset({i: ResetRequest() for i in range(3)})
    assert [first[i]["observation"].tolist() for i in range(3)] == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    roots = [td.set("action", torch.zeros(2)) for td in first.values()]
    assert [td["observation"].tolist() for td in members.step(roots)] == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    again = members.reset({1: ResetRequest(None, {"seed": 3})})
    assert list(again) == [1] and again[1]["observation"].tolist() == [1, 1, 0]
    assert members.attribute("resets")[1] == [(None, None), (3, None)]


def test_a_fault_names_the_environment():
    place = [9]
    members = MemberGroup([oracle(), GymWrapper(RaisingEnv(2, "reset"))], place)
    members.reset({0: ResetRequest(), 1: ResetRequest()})
    with pytest.raises(StepFault) as caught:
        members.reset({0: ResetRequest(), 1: ResetRequest()})
    assert (caught.value.env, caught.value.during) == (1, "reset") and place == [1]
    assert isinstance(caught.value.cause, FakeFailure)


def test_attributes_and_methods_are_dispatched():
    members = group()
    assert members.attribute("stream") == [0, 1, 2]
    assert members.call("hello", ("you",), {}) == [f"hello you from {i}" for i in range(3)]
    members.seed([4, 5, 6], False)
    members.reset({i: ResetRequest() for i in range(3)})
    assert [env.resets[-1][0] for env in members.envs] == [4, 5, 6]
    assert len(members) == 3


def test_states_of_members_are_loaded_separately():
    class Counted(CountingEnv):
        def __init__(self, start):
            super().__init__()
            self.register_buffer("total", torch.tensor(start))

    members = MemberGroup([Counted(1), Counted(2)])
    states = copy.deepcopy(members.state_dicts())
    members.adopt_states(
        members.parse_states(member_states({"worker0": states[1], "worker1": states[0]}, 2), True)
    )
    assert [int(env.total) for env in members.envs] == [2, 1]
    assert member_states({"total": 1}, 2) == [{"total": 1}] * 2
    with pytest.raises(MissingKeyError, match="worker1"):
        member_states({"worker0": {}}, 2)


def test_all_members_are_closed_despite_exceptions():
    closed = []

    def failing():
        raise FakeFailure("first")

    with pytest.raises(FakeFailure, match="first"):
        close_all([lambda: closed.append(0), failing, lambda: closed.append(2)])
    assert closed == [0, 2]
    members = group()
    members.envs[1].close()
    members.close()
    assert all(env.is_closed for env in members.envs)
