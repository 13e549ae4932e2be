"""A tensor storage checks the records of a state before anything changes."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from gleanrl._state.state import StateReader
from gleanrl.data import LazyMemmapStorage, LazyTensorStorage
from gleanrl.data.replay_buffers.storages.snapshots import StorageState, read_records
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import fill, fingerprint, ted


def test_a_sound_state_has_a_format_and_an_empty_one_none():
    storage = LazyTensorStorage(10)

    def read(state):
        reader = StateReader(state, "a storage")
        return read_records(reader, StorageState.read(reader))

    assert read(storage.state_dict()) is None
    fill(storage, ted(4))
    rows = read(storage.state_dict())
    assert rows.form.same_as(storage.format) and len(rows.columns) == 11


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("ndim", [1, 2])
def test_every_field_of_a_state_is_checked(ndim, fresh, tmp_path):
    def make():
        return LazyMemmapStorage(10, ndim=ndim, scratch_dir=tmp_path / "fresh")

    other = LazyTensorStorage(10, ndim=ndim)
    fill(other, ted(4, streams=2) if ndim == 2 else ted(4))
    good = other.state_dict()
    rows = len(other)
    broken = {
        "max_size": [2, 0, 10.0, None],
        "ndim": [3 - ndim, 0, "1"],
        "batch_shape": [3, [1, 1, 1], ["2"], None, [-2] * (ndim - 1) or [0]],
        "num_steps": [3, 4.0, -1, 11, True],
        "end": [5, -1, torch.arange(3), None],
        "rows_written": [None, rows - 1, 4.0],
        "ordered": [1, None],
        "version": [3, [1], [1, 2.0], "x"],
        "generations": [
            good["generations"][:-1],
            good["generations"].to(torch.int32),
            good["generations"] - 1,
            good["generations"][:, None],
            None,
            [1] * rows,
        ],
        "columns": [
            good["columns"][:-1],
            [column[:3] for column in good["columns"]],
            [column.double() for column in good["columns"]],
            [column.to_sparse() if column.is_floating_point() else column for column in good["columns"]],
            [None] * 11,
            torch.zeros(11, rows),
            None,
        ],
        "format": [
            {"kind": "tensordict"},
            None,
            {**good["format"], "paths": [[] for _ in good["format"]["paths"]]},
            {**good["format"], "dtypes": ["float32"] * 11},
        ],
    }
    assert broken.keys() == good.keys()
    storage = make() if fresh else other
    before = fingerprint(storage.state_dict())
    for name, values in broken.items():
        missing = {key: value for key, value in good.items() if key != name}
        for state in [missing, *({**good, name: value} for value in values)]:
            with pytest.raises(SchemaError, match="load_state_dict"):
                storage.load_state_dict(state)
    for value in (
        torch.zeros(1, dtype=torch.int64),
        torch.ones(2),
        torch.ones(2, 1, dtype=torch.int64),
        None,
    ):
        with pytest.raises(SchemaError, match="vacated"):
            storage.load_state_dict({**good, "vacated": value})
    for value in (1, None):
        with pytest.raises(SchemaError, match="overwritten"):
            storage.load_state_dict({**good, "overwritten": value})
    for state in ({}, torch.arange(3), None):
        with pytest.raises(SchemaError, match="load_state_dict"):
            storage.load_state_dict(state)
    assert fingerprint(storage.state_dict()) == before
    assert not fresh or not (tmp_path / "fresh").exists()
    storage.load_state_dict(good)
    storage.check_valid()


def test_parsing_changes_nothing():
    storage, other = LazyTensorStorage(10), LazyTensorStorage(10)
    fill(other, ted(4))
    value = storage.parse(other.state_dict())
    assert not storage.initialized and len(storage) == 0
    fill(storage, TensorDict({"x": torch.zeros(2)}, [2]))
    storage.load_state_dict(copy.deepcopy(LazyTensorStorage(10).state_dict()))
    fresh = LazyTensorStorage(10)
    fresh.adopt(value)
    assert (fresh.get(slice(None)) == ted(4)).all()
