"""Compact storages find stacks of frames in the first records, or check the declared ones."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError
from tests.bits import bits_of
from tests.data.replay_buffers.storages.test_compact import chained, compact, right


def channels_last(data: TensorDict) -> TensorDict:
    for key in ("observation", ("next", "observation")):
        data[key] = data[key].transpose(-1, -2).contiguous()
    return data


def test_stacks_are_found_in_the_first_records() -> None:
    found = {
        "{'observation': 4}": [
            chained(20, width=16, frames=4),
            chained(1, 7, width=16, frames=4)[0],
            channels_last(chained(20, width=16, frames=4)),
            chained(20, width=16, odd=3, frames=4),
        ],
        "": [
            chained(20, width=32),
            chained(20, width=2, frames=4),  # frames of 16 bytes
            torch.zeros_like(chained(20, width=16, frames=4)),
        ],
    }
    for expected, batches in found.items():
        for data in batches:
            buffer = parts.ReplayBuffer(storage=compact(100))
            buffer.add(data) if not data.ndim else buffer.extend(data)
            assert ("stack=" + expected in repr(buffer.storage)) == bool(expected)
            assert bits_of(buffer[0]) == bits_of(data if not data.ndim else data[0])


def test_declared_stacks_are_checked() -> None:
    for stack, error in (
        ({"observation": 1}, InvalidArgumentError),
        ({"observation": "4"}, InvalidTypeError),
        ({"observation": (4, 0, 0)}, InvalidTypeError),
        (4, InvalidTypeError),
    ):
        with pytest.raises(error, match="stack: expected"):
            parts.Compact(stack=stack)
    with pytest.raises(InvalidTypeError, match="compact: expected True, False or a Compact, got 4"):
        parts.LazyTensorStorage(5, compact=4)
    for stack, reason in (
        ({"pixels": 4}, "got 'pixels'"),
        ({"t": 4}, "got 't'"),
        ({"observation": 5}, r"multiple of 5 frames, got the shape \(4, 16\)$"),
        ({"observation": (4, 2)}, "dimension 2"),
        ({"observation": (3, 1)}, "dimension 1"),
    ):
        storage = parts.LazyTensorStorage(50, compact=parts.Compact(stack=stack))
        with pytest.raises(SchemaError, match=reason):
            storage.set(range(20), chained(20, width=16, frames=4))
        assert not storage.initialized
    storage = parts.LazyTensorStorage(50, compact=parts.Compact(stack={}))
    storage.set(range(20), chained(20, width=16, frames=4))
    assert "stack" not in repr(storage)
    storage = parts.LazyTensorStorage(50, compact=parts.Compact(stack={"observation": 16}))
    storage.set(range(20), chained(20, width=16, frames=4))
    assert right(storage.get(slice(None))), "wrongly declared stacks only take more memory"
