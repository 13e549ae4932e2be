"""Tables serve views and copies of records."""

from __future__ import annotations

import torch

from gleanrl.data.replay_buffers import LazyTensorStorage
from gleanrl.data.replay_buffers.storages.allocators import HeapAllocator
from gleanrl.data.replay_buffers.storages.record_formats import find_format
from gleanrl.data.replay_buffers.storages.table import Table
from tests.data.replay_buffers.oracle import fill, fingerprint, ted


def test_records_are_fetched_as_a_grid():
    data = ted(6)
    table = Table(find_format(data, 1, "test"), 6, HeapAllocator(torch.device("cpu")))
    table.columns.write(0, 6, table.ready(table.form.read(data, 1, "test")[1]))
    grid = torch.tensor([[0, 5], [3, 3]])
    assert (table.fetch(grid.view(-1), grid.shape) == data[grid]).all()
    some = table.fetch(grid.view(-1), torch.Size([4]), (("next", "reward"),))
    assert list(some.keys(True, True)) == [("next", "reward")]


def test_every_leaf_of_a_fetch_has_private_memory():
    storage = LazyTensorStorage(50)
    fill(storage, ted(20))
    before = fingerprint(storage.state_dict())
    first = storage.fetch(torch.arange(20))
    leaves = list(first.values(True, True))
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)
    for leaf in leaves:
        assert leaf.untyped_storage().nbytes() == leaf.nbytes
        leaf.zero_()
    assert fingerprint(storage.state_dict()) == before


def test_view_covers_all_slots():
    storage = LazyTensorStorage(10)
    fill(storage, ted(4))
    assert storage._storage.batch_size == (10,)
    assert storage._storage["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]
