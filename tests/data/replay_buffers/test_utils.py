"""Samples are stacked, and states of several parts load completely or not at all."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, tensorclass

from gleanrl._state.state import Stateful
from gleanrl.data.replay_buffers.utils import (
    InPlaceSampler,
    load_all,
    stack_samples,
    stack_tensors,
    states_in,
)
from gleanrl.errors import InvalidArgumentError, SchemaError


@tensorclass
class Point:
    x: torch.Tensor


def batch(**changes: object) -> TensorDict:
    entries = {"x": torch.ones(2, 3), "next": TensorDict({"r": torch.zeros(2)}, [2]), **changes}
    return TensorDict({k: v for k, v in entries.items() if v is not None}, [2])


def test_tensors_are_stacked_place_by_place():
    rows = ((torch.full((3,), float(i)), torch.tensor(i)) for i in range(4))
    first, second = stack_tensors(rows)
    assert first[:, 0].tolist() == [0, 1, 2, 3] == second.tolist() and first.shape == (4, 3)
    assert stack_tensors([]) == ()
    with pytest.raises(InvalidArgumentError, match=r"lengths \[1, 2\]"):
        stack_tensors([[torch.ones(1)], [torch.ones(1), torch.ones(1)]])


def test_in_place_sampler_reuses_memory():
    collate = InPlaceSampler("cpu")
    records = [TensorDict({"x": torch.tensor([float(i)])}, []) for i in range(3)]
    first = collate(records)
    assert first["x"].tolist() == [[0], [1], [2]] and first.device == torch.device("cpu")
    memory = first["x"].data_ptr()
    again = collate(records[::-1])
    assert again is first and first["x"].tolist() == [[2], [1], [0]] and first["x"].data_ptr() == memory
    other = collate(records[:2])
    assert other is not first and other["x"].tolist() == [[0], [1]] and len(first) == 3
    assert records[0]["x"].tolist() == [0]


def test_samples_of_one_structure_are_stacked():
    assert stack_samples([batch(), batch()], "ab").batch_size == (2, 2)
    assert stack_samples([batch(), batch()], "ab")["next"].batch_size == (2, 2)
    assert type(stack_samples([Point(x=torch.ones(2), batch_size=[2])] * 3, "abc")) is Point
    assert stack_samples([torch.ones(2), torch.ones(2)], "ab").shape == (2, 2)
    tree = stack_samples([{"a": (torch.ones(2),)}] * 2, "ab")
    assert list(tree) == ["a"] and tree["a"][0].shape == (2, 2)
    texts = [TensorDict({"x": torch.ones(2), "s": "text"}, [2])] * 2
    assert stack_samples(texts, "ab")["s"] is not None


@pytest.mark.parametrize(
    "other, message",
    [
        (batch(x=torch.ones(2, 4)), "'x' is \\(2, 3\\) torch.float32 on cpu and \\(2, 4\\)"),
        (batch(x=torch.ones(2, 4), more=torch.ones(2)), "stacked: 'x' is \\(2, 3\\)"),
        (batch(x=torch.ones(2, 3).double()), "torch.float32 on cpu and .* torch.float64"),
        (batch(next=TensorDict({"r": torch.zeros(2, 1)}, [2])), "\\('next', 'r'\\) is \\(2,\\)"),
        (batch()[:1], "TensorDict \\(2,\\) and a TensorDict \\(1,\\)"),
        (Point(x=torch.ones(2, 3), batch_size=[2]), "only the first has \\['next', \\('next', 'r'\\)\\]"),
        (torch.ones(2), "first has"),
        ({"x": torch.ones(2, 3)}, "can't be stacked"),
    ],
)
def test_samples_that_differ_are_named(other, message):
    with pytest.raises(SchemaError, match=message):
        stack_samples([batch(), batch(), other], ["a", "a", "b"])


def test_samples_without_tensors_cannot_be_stacked():
    with pytest.raises(SchemaError, match="samples of str can't be stacked"):
        stack_samples(["one", "two"], "ab")


class Number(Stateful[int]):
    """A part with a state."""

    def __init__(self, value: int) -> None:
        self.value = value

    def snapshot(self) -> int:
        return self.value

    def parse(self, state: int) -> int:
        if state < 0:
            raise SchemaError("negative")
        return state

    def adopt(self, value: int) -> None:
        self.value = value


def test_all_are_loaded_or_none():
    parts = [Number(1), Number(2), Number(3)]
    load_all(parts, [4, 5, 6])
    assert [part.value for part in parts] == [4, 5, 6]
    with pytest.raises(SchemaError):
        load_all(parts, [7, 8, -9])
    assert [part.value for part in parts] == [4, 5, 6]


def test_states_in_returns_the_states_of_members():
    assert states_in({"a": [1, 2]}, "a", 2) == [1, 2]
    for broken in ({}, {"a": [1]}, {"a": 3}, None):
        with pytest.raises(SchemaError, match="2 members under 'a'"):
            states_in(broken, "a", 2)
