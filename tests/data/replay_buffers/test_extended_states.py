"""Derived components extend the state in `state_dict` and `load_state_dict` through ``super()``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)

PARTS: dict[str, tuple[type[Any], tuple[Any, ...], dict[str, Any]]] = {
    "storage": (LazyTensorStorage, (10,), {}),
    "mapped": (LazyMemmapStorage, (10,), {}),
    "list": (ListStorage, (10,), {}),
    "stack": (LazyStackStorage, (10,), {}),
    "writer": (RoundRobinWriter, (), {}),
    "dict_writer": (TensorDictRoundRobinWriter, (), {}),
    "best": (TensorDictMaxValueWriter, ("rank",), {}),
    "sampler": (RandomSampler, (), {}),
    "epochs": (SamplerWithoutReplacement, (), {}),
    "priorities": (PrioritizedSampler, (10, 0.7, 0.5), {}),
    "slices": (SliceSampler, (), {"num_slices": 2, "traj_key": "rank"}),
}
ROLES = {
    "storage": ("storage", "mapped", "list", "stack"),
    "writer": ("writer", "dict_writer", "best"),
    "sampler": ("sampler", "epochs", "priorities", "slices"),
}


def noted(name: str) -> Any:
    cls, arguments, options = PARTS[name]

    class Noted(cls):  # type: ignore[valid-type, misc]
        note = ""

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "note": self.note}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state = dict(state)
            note = state.pop("note")
            super().load_state_dict(state)
            self.note = note

    return Noted(*arguments, **options)


def made(name: str, count: int = 0) -> tuple[ReplayBuffer, Any]:
    role = next(role for role, names in ROLES.items() if name in names)
    part = noted(name)
    buffer: ReplayBuffer = ReplayBuffer(**{"storage": LazyTensorStorage(10), role: part}, batch_size=2)
    if count:
        buffer.extend(TensorDict({"rank": torch.arange(float(count))}, [count]))
    return buffer, part


@pytest.mark.parametrize("count", [6, 14])
@pytest.mark.parametrize("held", [0, 3, 10])
@pytest.mark.parametrize("way", ["dumps", "state_dict"])
@pytest.mark.parametrize("name", PARTS)
def test_part_with_an_extended_state_continues_in_any_buffer(
    tmp_path: Path, name: str, way: str, held: int, count: int
) -> None:
    first, part = made(name, count)
    part.note = "a word"
    second, other = made(name, held)
    if way == "dumps":
        first.dumps(tmp_path)
        second.loads(tmp_path)
    else:
        second.load_state_dict(first.state_dict())
    assert other.note == "a word" and len(second) == len(first)
    for buffer in (first, second):
        buffer.extend(TensorDict({"rank": torch.tensor([20.0, 21.0])}, [2]))
    ranks = [[float(buffer[i]["rank"]) for i in range(len(buffer))] for buffer in (first, second)]
    assert ranks[0] == ranks[1]


def test_a_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    first, _ = made("writer", 6)
    second, other = made("writer", 3)
    other.note = "before"
    state = first.state_dict()
    state["_writer"]["state"]["cursor"] = 2
    with pytest.raises(Exception, match="cursor"):
        second.load_state_dict(state)
    assert other.note == "before" and second[:]["rank"].tolist() == [0, 1, 2]
    assert second.extend(TensorDict({"rank": torch.zeros(1)}, [1])).tolist() == [3]
