"""Tickets are draws that wait for their records: they fetch, detect overwritten records, and save their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl._arrays.results import Draw
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage
from gleanrl.data.replay_buffers.prefetch import PendingSample, PendingState
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import fill


def ticket(storage: Any, *slots: int) -> PendingSample:
    index = torch.tensor(slots)
    return PendingSample(Draw(index, {}, storage.generation(index)), storage, storage.version, False)


def test_fetch_of_cleared_records_returns_none_or_raises():
    storage = ListStorage(10)
    fill(storage, ["a", "b"])
    good = ticket(storage, 1)
    assert good.fetch().records == ["b"]
    storage.clear()
    assert good.fetch().records is None
    with pytest.raises(IndexError):
        ticket(storage, 1).fetch()


def read(state: Any) -> PendingState:
    return PendingState.read(StateReader(state, "a draw"), 4, lambda place: place)


def test_ticket_fetches_chosen_columns_and_separate_flags():
    storage = LazyTensorStorage(4)
    fill(storage, TensorDict({"x": torch.arange(4), "y": torch.arange(4) * 2, "z": torch.zeros(4)}, [4]))
    records, flags = ticket(storage, 3, 1).fetch((("x",),), (("y",),))
    assert set(records.keys()) == {"x"} and records["x"].tolist() == [3, 1]
    assert set(flags.keys()) == {"y"} and flags["y"].tolist() == [6, 2]
    assert ticket(storage, 3).fetch().flags is None and ticket(storage, 3).fetch((("x",),), ()).flags is None


def test_state_marks_rows_overwritten_since_the_draw():
    storage, other = LazyTensorStorage(4), LazyTensorStorage(4)
    fill(storage, torch.arange(4))
    drawn = ticket(storage, 0, 3)
    fill(storage, torch.tensor([9]), 3)
    state = drawn.value().plain({})
    assert state["fresh"].tolist() == [True, False]
    other.load_state_dict(storage.state_dict())
    again = read(state).ticket(other)
    assert again.drawn.slots.tolist() == [0, 3] and again.version != other.version
    now = other.generation(again.drawn.slots)
    assert (now == again.drawn.generation).tolist() == [True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": torch.tensor([0, 4])},
        {"slots": torch.tensor([0.0, 1.0])},
        {"slots": None},
        {"fresh": torch.tensor([True])},
        {"fresh": torch.tensor([1, 1])},
        {"last": torch.tensor([1, 1])},
        {"asked": 2.0},
        {"ran_out": 1},
        {"extras": [("a", torch.zeros(3))]},
        {"origin": torch.tensor([-1])},
    ],
    ids=str,
)
def test_wrong_states_raise(wrong):
    storage = LazyTensorStorage(4)
    fill(storage, torch.arange(4))
    state = ticket(storage, 0, 3).value().plain({})
    assert read(state).slots.tolist() == [0, 3]
    with pytest.raises(SchemaError, match=next(iter(wrong))):
        read({**state, **wrong})
