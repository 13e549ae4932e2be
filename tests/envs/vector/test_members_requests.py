"""A member of a batch runs requests in the process or thread of its environment."""

from __future__ import annotations

import threading

import pytest
import torch

from gleanrl.envs import GymWrapper
from gleanrl.envs.vector.members import EnvMember
from gleanrl.errors import WorkerError
from tests.envs.vector.makers import SCRIPT, oracle
from tests.fakes import FakeFailure, RaisingEnv


def root(member, number=0):
    fresh = member.answer(number, "reset", (None, {}))
    return fresh.set("action", torch.zeros(2))


def test_repeated_request_number_gets_the_kept_answer():
    member = EnvMember(oracle)
    td = root(member)
    first = member.answer(1, "step", (td.clone(),))
    assert member.answer(1, "step", (td.clone(),)) is first
    assert member.answer(2, "attribute", ("steps_taken",)) == (False, 1)
    with pytest.raises(WorkerError, match="request 1 .step. came after request 2"):
        member.answer(1, "step", (td.clone(),))  # the kept answer belongs to another request
    assert member.answer(3, "attribute", ("steps_taken",)) == (False, 1)
    assert member.answer(4, "attribute", ("hello",)) == (True, None)
    assert member.answer(5, "call", ("hello", ("you",), {})) == "hello you from 0"
    member.close()


def test_repeated_request_number_raises_the_kept_exception():
    member = EnvMember(lambda: GymWrapper(RaisingEnv(1, script=SCRIPT)))
    td = root(member)
    for _ in range(2):
        with pytest.raises(FakeFailure):
            member.answer(1, "step", (td.clone(),))
    assert member.answer(2, "attribute", ("steps_taken",)) == (False, 1)
    member.close()


def test_the_environment_is_made_with_the_first_answer():
    made = []

    def make():
        made.append(1)
        if len(made) == 1:
            raise FakeFailure("the first time")
        return oracle()

    member = EnvMember(make)
    member.close()
    assert not made
    with pytest.raises(FakeFailure):
        member.answer(0, "construct", ())
    assert member.answer(1, "construct", ()) is None and len(made) == 2
    member.answer(2, "reset", (None, {}))
    member.close()
    member.close()
    assert member.answer(3, "attribute", ("closed",)) == (False, 1)


def test_two_threads_take_turns():
    entered, leave, seen = threading.Event(), threading.Event(), []

    class Slow(RaisingEnv):
        def step(self, action):
            entered.set()
            assert leave.wait(60)
            return super().step(action)

    member = EnvMember(lambda: GymWrapper(Slow(5, script=SCRIPT)))
    td = root(member)
    calls = [
        threading.Thread(target=lambda: seen.append(member.answer(1, "step", (td.clone(),))))
        for _ in range(2)
    ]
    calls[0].start()
    assert entered.wait(60)
    calls[1].start()
    leave.set()
    for call in calls:
        call.join(60)
    assert len(seen) == 2 and seen[0] is seen[1]
    member.close()


def test_state_and_seed_requests_reach_the_environment():
    member = EnvMember(oracle)
    member.answer(0, "set_seed", (5, True))
    state = member.answer(1, "state_dict", ())
    member.answer(2, "parse_state", (state, True))
    member.answer(3, "adopt_state", ())
    member.answer(4, "reset", (None, {"options": {"a": 1}}))
    assert member.answer(5, "attribute", ("resets",)) == (False, [(5, {"a": 1})])
    outcome, after = member.answer(7, "step_and_maybe_reset", (root(member, 6),))
    assert outcome["observation"].tolist() == after["observation"].tolist() == [0, 1, 1]
    member.close()
