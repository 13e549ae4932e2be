"""TensorDicts are packed to cross a pipe."""

from __future__ import annotations

import pickle

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from gleanrl.envs.vector.worker import Packed, pack, packed
from tests.envs.vector.makers import equal


def passed(batch):
    return pickle.loads(pickle.dumps(pack(batch)))


def test_plain_tensordicts_are_packed_as_arrays():
    batch = TensorDict(
        {
            "a": torch.arange(6.0).reshape(2, 3).t(),
            "half": torch.ones(3, 2, dtype=torch.bfloat16),
            "flag": torch.tensor([True, False, True]),
            "below": {"b": torch.arange(3), "empty": torch.zeros(3, 0)},
        },
        [3],
        device="cpu",
    )
    assert isinstance(pack(batch), Packed)
    assert equal(passed(batch), batch) and passed(batch).device == batch.device
    assert passed(batch)["below"].batch_size == batch.batch_size


def test_unpacked_tensors_are_writable():
    batch = passed(TensorDict({"a": torch.zeros(2)}, []))
    batch["a"].fill_(1)
    assert batch["a"].tolist() == [1, 1] and batch.device is None


def test_gradients_are_not_packed():
    assert not passed(TensorDict({"a": torch.zeros(2, requires_grad=True) * 2}, []))["a"].requires_grad


def test_other_tensordicts_are_pickled():
    deep = TensorDict({"agents": TensorDict({"a": torch.zeros(2, 3)}, [2])}, [])
    words = TensorDict({"text": NonTensorData("go")}, [])
    empty = TensorDict({"a": torch.zeros(1), "none": TensorDict({}, [])}, [])
    assert passed(deep)["agents"].batch_size == (2,)
    assert passed(words)["text"] == "go"
    assert "none" in passed(empty).keys() and passed(TensorDict({}, [4])).batch_size == (4,)
    assert passed(None) is None


def test_lazy_stacks_stay_lazy():
    parts = [TensorDict({"a": torch.zeros(2)}, []), TensorDict({"b": torch.ones(3)}, [])]
    found = passed(LazyStackedTensorDict.lazy_stack(parts, 0))
    assert isinstance(found, LazyStackedTensorDict) and found[1]["b"].tolist() == [1, 1, 1]
    mixed = TensorDict({"x": LazyStackedTensorDict.lazy_stack(parts, 0)}, [2])
    assert passed(mixed)["x"][0]["a"].tolist() == [0, 0]


def test_tuples_of_tensordicts_are_packed():
    batch = TensorDict({"a": torch.arange(3), "b": {"c": torch.zeros(3, dtype=torch.bfloat16)}}, [3])
    found, other = pickle.loads(pickle.dumps(packed("step", {1: (batch, "word")})))[1]
    assert equal(found, batch) and other == "word" and isinstance(found, TensorDict)
    assert isinstance(pack(batch), Packed) and pack(None) is None
