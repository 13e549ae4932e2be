"""The oracle of the drills accepts right rows and detects each planted mistake."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import SerialEnv
from gleanrl.errors import EnvironmentContractError
from tests.chaos.faults import Fault
from tests.chaos.oracle import LIFE, MIX, STEP, Record, Tally, makers, mixed, oracle
from tests.fakes import FakeFailure


def recorded(env=None, frames: int = 200, size: int = 50) -> Record:
    record = Record()
    for batch in SyncDataCollector(env or oracle, None, frames_per_batch=size, total_frames=frames):
        record.add(batch)
    return record


def test_check_accepts_right_rows(tmp_path):
    tally = Tally(tmp_path / "tally", 3)
    record = recorded(SerialEnv(3, makers(3, tally=tally.path)), 300, 60)
    record.check()
    assert record.frames == tally.steps == 300 and record.lives == 3


def lose(part):
    return {name: np.delete(column, 20, 0) for name, column in part.items()}


def repeat(part):
    return {name: np.concatenate([column, column[-1:]]) for name, column in part.items()}


def tear(part):
    part["root"][3, LIFE + 1 :] = part["root"][4, LIFE + 1 :]
    return part


def cross(part):
    part["next"][[3, 4]] = part["next"][[4, 3]]
    return part


def swap(part):
    return {name: np.concatenate([column[:5], column[6:4:-1], column[7:]]) for name, column in part.items()}


def invent_an_end(part):
    part["done"][np.flatnonzero(~part["done"])[0]] = True
    return part


def take_another_action(part):
    part["action"][7] += 1
    return part


def share_an_id(part):
    part["id"][:] = 0
    return part


def change_an_id(part):
    part["id"][-1] += 1000
    return part


def shift(part):
    for name in ("root", "next"):
        part[name][:, STEP] += 1
        part[name][:, MIX] = mixed(part[name])
    return part


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose, "missing or out of order"),
        (repeat, "delivered twice"),
        (tear, "torn"),
        (cross, "don't belong together"),
        (swap, "missing or out of order"),
        (invent_an_end, "flags"),
        (take_another_action, "don't belong together"),
        (share_an_id, "one id names two"),
        (change_an_id, "one trajectory has two ids"),
        (shift, "flags"),
    ],
)
def test_check_detects_wrong_rows(spoil, words):
    record = recorded()
    record.check()
    record.parts[1] = spoil(record.parts[1])
    with pytest.raises(AssertionError, match=words):
        record.check()


@pytest.mark.parametrize("kind", ["raise", "memory", "data"])
@pytest.mark.parametrize("moment", ["construction", "first reset", "first step", "last step", "later reset"])
def test_faults_happen_once(kind, moment, tmp_path):
    fault = Fault(kind, moment, tmp_path / "token", owner=0, steps=10)
    errors = {"raise": FakeFailure, "memory": MemoryError, "data": EnvironmentContractError}
    with pytest.raises(errors[kind]):
        recorded(lambda: oracle(fault=fault))
    recorded(lambda: oracle(fault=fault)).check()


def test_faults_leave_their_owner_alone(tmp_path):
    fault = Fault("kill", "first step", tmp_path / "token", os.getpid(), 10)
    recorded(lambda: oracle(fault=fault)).check()
    assert not fault.token.exists()
