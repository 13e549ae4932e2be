"""An ensemble of storages reads several storages as one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, ListStorage, StorageEnsemble, TensorStorage
from gleanrl.errors import IndexRangeError, InvalidArgumentError, SchemaError, UnsupportedError
from tests.data.replay_buffers.oracle import clock, ted


def pair() -> tuple[LazyTensorStorage, ListStorage]:
    first, second = LazyTensorStorage(10), ListStorage(5)
    first.set(range(6), ted(6))
    second.set(range(4), ted(4, start=50))
    return first, second


def test_records_come_with_the_number_of_their_storage():
    storages = StorageEnsemble(*pair())
    index = TensorDict(
        {"buffer_ids": torch.tensor([1, 0, 1]), "index": torch.tensor([[3, 0], [5, 1], [2, 2]])}, [3]
    )
    found = storages.get(index)
    assert [number for number, _ in found] == [1, 0, 1]
    assert [clock(rows).tolist() for _, rows in found] == [[53, 50], [5, 1], [52, 52]]
    with pytest.raises(IndexRangeError):
        storages.get({"buffer_ids": [0], "index": [[6]]})


def test_each_storage_has_its_transform():
    class Double(torch.nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return batch * 2

    storages = StorageEnsemble(
        TensorStorage(torch.arange(4)), TensorStorage(torch.arange(4)), transforms=[Double(), None]
    )
    index = {"buffer_ids": [0, 1], "index": [[1, 2], [1, 2]]}
    assert [rows.tolist() for _, rows in storages.get(index)] == [[2, 4], [1, 2]]
    assert [rows.tolist() for _, rows in storages[[1, 0]].get(index)] == [[1, 2], [2, 4]]
    with pytest.raises(TypeError, match="transforms: expected 2, .* got 1"):
        StorageEnsemble(*pair(), transforms=[None])


def test_storages_with_several_batch_dimensions_are_read_by_coordinates():
    grid = LazyTensorStorage(12, ndim=2)
    grid.set(0, torch.arange(12).view(4, 3))
    index = {"buffer_ids": [0], "index": torch.tensor([[[3, 2], [1, 0]]])}
    assert StorageEnsemble(grid).get(index)[0][1].tolist() == [11, 3]


def test_index_selects_members():
    first, second = pair()
    storages = StorageEnsemble(first, second)
    assert storages[0] is first and list(storages[1:]) == [second] and list(storages) == [first, second]
    assert storages.storages == (first, second) and len(storages) == 10
    assert storages.transforms == (None, None)


def test_writes_are_refused():
    with pytest.raises(UnsupportedError, match="set: "):
        StorageEnsemble(*pair()).set(0, ted(1))
    with pytest.raises(InvalidArgumentError, match="at least one"):
        StorageEnsemble()
    with pytest.raises(InvalidArgumentError, match="expected Storages"):
        StorageEnsemble(LazyTensorStorage(3), None)


def test_states_go_to_all_or_to_none():
    storages = StorageEnsemble(*pair())
    fresh = LazyTensorStorage(10), ListStorage(5)
    others = StorageEnsemble(*fresh)
    state = storages.state_dict()
    with pytest.raises(SchemaError):
        others.load_state_dict({"storages": [state["storages"][0], {"items": 3}]})
    assert len(others) == 0
    with pytest.raises(SchemaError, match="2 members"):
        others.load_state_dict({"storages": state["storages"][:1]})
    others.load_state_dict(state)
    assert clock(fresh[0].get([0, 5])).tolist() == [0, 5] and len(fresh[1]) == 4
