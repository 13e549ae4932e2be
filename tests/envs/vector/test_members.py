"""Members of a batch step behind TensorDicts."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from gleanrl._rollout.errors import StepFault
from gleanrl.envs import GymWrapper
from gleanrl.envs.vector.factories import factories
from gleanrl.envs.vector.members import MemberGroup, close_all, member_states
from gleanrl.errors import MissingKeyError
from tests.envs.vector.makers import oracle
from tests.fakes import FakeFailure, RaisingEnv
from tests.fakes_base import CountingEnv


def group(count=3):
    return started([partial(oracle, stream) for stream in range(count)])


def started(makers, position=None):
    made = MemberGroup(factories(len(makers), makers, None), position)
    made.start()
    return made


def everyone(count, *arguments):
    return dict.fromkeys(range(count), arguments)


def test_steps_and_resets_each():
    members = group()
    first = members.ask("reset", everyone(3, None, {}))
    assert [first[i]["observation"].tolist() for i in range(3)] == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    roots = [td.set("action", torch.zeros(2)) for td in first.values()]
    outcomes = members.ask("step", {i: (root,) for i, root in enumerate(roots)}).values()
    assert [td["observation"].tolist() for td in outcomes] == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    again = members.ask("reset", {1: (None, {"seed": 3})})
    assert list(again) == [1] and again[1]["observation"].tolist() == [1, 1, 0]
    assert members.ask("attribute", {1: ("resets",)}) == {1: (False, [(None, None), (3, None)])}


def test_a_fault_names_the_environment():
    place = [9]
    members = started([oracle, lambda: GymWrapper(RaisingEnv(2, "reset"))], place)
    members.ask("reset", everyone(2, None, {}))
    with pytest.raises(StepFault) as caught:
        members.ask("reset", everyone(2, None, {}))
    assert (caught.value.env, caught.value.during) == (1, "reset") and place == [1]
    assert isinstance(caught.value.cause, FakeFailure)


def test_attributes_and_methods_are_dispatched():
    members = group()
    assert members.ask("attribute", everyone(3, "stream")) == {i: (False, i) for i in range(3)}
    greetings = members.ask("call", everyone(3, "hello", ("you",), {}))
    assert list(greetings.values()) == [f"hello you from {i}" for i in range(3)]
    members.ask("set_seed", {0: (4, False), 1: (5, False), 2: (6, False)})
    members.ask("reset", everyone(3, None, {}))
    assert [env.resets[-1][0] for env in members.envs] == [4, 5, 6]
    assert len(members) == 3


def test_states_of_members_are_loaded_separately():
    class Counted(CountingEnv):
        def __init__(self, start):
            super().__init__()
            self.register_buffer("total", torch.tensor(start))

    members = started([partial(Counted, 1), partial(Counted, 2)])
    states = copy.deepcopy(members.ask("state_dict", everyone(2)))
    swapped = member_states({"worker0": states[1], "worker1": states[0]}, 2)
    members.ask("parse_state", {i: (state, True) for i, state in enumerate(swapped)})
    members.ask("adopt_state", everyone(2))
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
