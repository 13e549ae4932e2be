"""The saved state of a tensor storage, checked before anything is changed by it."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data import LazyTensorStorage
from gleanrl.data.replay_buffers.storages.saved import saved_format
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import ted


def test_a_sound_state_has_a_format_and_an_empty_one_none():
    storage = LazyTensorStorage(10)
    assert saved_format(storage.state_dict(), 10, 1) is None
    storage.set(0, ted(4))
    assert saved_format(storage.state_dict(), 10, 1).same_as(storage.format)


def test_a_state_that_does_not_fit_or_is_broken():
    storage = LazyTensorStorage(10)
    storage.set(0, ted(4))
    good = storage.state_dict()
    broken = [
        {},
        {**good, "generations": good["generations"][:-1]},
        {**good, "columns": good["columns"][:-1]},
        {**good, "columns": [column[:3] for column in good["columns"]]},
        {**good, "format": {"kind": "tensordict"}},
        {**good, "batch_shape": 3},
        {name: value for name, value in good.items() if name != "columns"},
        {name: value for name, value in good.items() if name != "rows_written"},
        {**good, "rows_written": None},
        {**good, "num_steps": 4.0},
        {**good, "end": torch.arange(3)},
        {**good, "format": {**good["format"], "paths": [[] for _ in good["format"]["paths"]]}},
        torch.arange(3),
    ]
    for state in broken:
        with pytest.raises(SchemaError, match="load_state_dict"):
            saved_format(state, 10, 1)
    for size, ndim in ((11, 1), (10, 2)):
        with pytest.raises(SchemaError, match="build it with the same ones"):
            saved_format(good, size, ndim)
