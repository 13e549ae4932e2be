"""Storages on a device hold all dtypes, single tensors, trees, tensorclasses, lists and two dimensions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

from gleanrl.data import CompressedListStorage, LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from tests.devices.records import bits, numbers, on, rows

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "uint8", "int8", "bool"]
RARE = ["uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]


class TestForms:
    @pytest.mark.parametrize("name", DTYPES + RARE)
    def test_dtypes_keep_every_bit(self, source, home, name):
        dtype = getattr(torch, name)
        wide = torch.randint(0, 2 if name == "bool" else 256, (6, 3 * dtype.itemsize), dtype=torch.uint8)
        data, picked = wide.view(dtype).to(source), wide[[0, 3]].view(dtype).to(source)
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home), batch_size=5)
        rb.extend(data[:3])
        rb.extend(data[3:])
        rb[[0, 3]] = picked
        rb.add(data[1])
        assert rb[:].dtype == dtype and rb[:].device == home
        assert bits(rb[:]) == bits(torch.stack([data[i].view(torch.uint8) for i in (0, 5, 1, 3)]))
        batch, info = rb.sample(return_info=True)
        expected = [bits(data[[0, 5, 1, 3][slot]]) for slot in info["index"].tolist()]
        assert [bits(row.view(torch.uint8)) for row in batch.view(torch.uint8)] == expected

    def test_single_tensors_are_stored(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home), batch_size=9)
        rb.extend(torch.arange(6.0, device=source))
        assert rb[:].tolist() == [4.0, 5.0, 2.0, 3.0] and rb.sample().device == home
        assert set(rb.sample().tolist()) <= {2.0, 3.0, 4.0, 5.0}

    def test_trees_are_stored(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home), batch_size=9)
        n = torch.arange(3, device=source)
        rb.extend({"a": n, "b": (n[:, None] + 10, [n.double() / 4])})
        rb.extend({"a": np.array([3]), "b": (np.array([[13]]), [np.array([0.75])])})
        batch = rb.sample()
        a, (b, [c]) = batch["a"], batch["b"]
        assert a.device == b.device == c.device == home
        assert torch.equal(b.cpu()[:, 0], a.cpu() + 10) and torch.equal(c.cpu(), a.cpu().double() / 4)
        assert rb[:]["a"].tolist() == [0, 1, 2, 3] and rb[1:3]["b"][0].tolist() == [[11], [12]]

    def test_tensorclasses_are_stored(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home), batch_size=9)
        rb.extend(
            Pair(n=torch.arange(3, device=source), halved=torch.arange(3, device=source) / 2, batch_size=[3])
        )
        rb.add(Pair(n=torch.tensor(3, device=source), halved=torch.tensor(1.5, device=source), batch_size=[]))
        batch = rb.sample()
        assert isinstance(batch, Pair) and batch.n.device == batch.halved.device == home
        assert torch.equal(batch.halved.cpu(), batch.n.cpu() / 2) and rb[:].n.tolist() == [0, 1, 2, 3]

    def test_values_without_a_column_are_stored(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home), batch_size=6)
        n = torch.arange(3, device=source)
        rb.extend(TensorDict({"n": n, "text": NonTensorStack("zero", "one", "two")}, [3]))
        batch, words = rb.sample(), ("zero", "one", "two")
        assert list(batch["text"]) == [words[i] for i in batch["n"].tolist()] and batch["n"].device == home

    def test_tensors_of_different_shapes_are_stored(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home), batch_size=6)
        parts = [TensorDict({"w": torch.full((n,), n, device=source)}) for n in (3, 1, 4)]
        rb.extend(LazyStackedTensorDict.lazy_stack(parts))
        for record in rb.sample().unbind(0):
            assert record["w"].device == home and record["w"].tolist() == [len(record["w"])] * len(
                record["w"]
            )

    def test_two_dimensional_storage_is_indexed(self, source, home, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(12, device=home, ndim=2), batch_size=20)
        index = rb.extend(rows(0, 12, source).view(3, 4))
        assert index.shape == (12, 2) and index.tolist()[:4] == [[0, 0], [0, 1], [0, 2], [1, 0]]
        batch, info = rb.sample(return_info=True)
        time, stream = (part.cpu() for part in info["index"])
        assert numbers(batch) == (stream * 4 + time).tolist() and on(home, batch)
        assert numbers(rb[info["index"]]) == numbers(batch)
        assert numbers(rb[tuple(part.to(device) for part in info["index"])]) == numbers(batch)
        rb.extend(rows(20, 26, source).view(3, 2))
        assert numbers(rb[:]) == [[20, 21, 2, 3], [22, 23, 6, 7], [24, 25, 10, 11]] and len(rb) == 12
        assert numbers(rb[1, 2:]) == [6, 7] and numbers(rb[torch.tensor([2, 0], device=device)])[0] == [
            24,
            25,
            10,
            11,
        ]

    def test_contains_checks_two_dimensional_indices(self, home, device):
        storage = LazyTensorStorage(12, device=home, ndim=2)
        ReplayBuffer(storage=storage).extend(rows(0, 9).view(3, 3))
        inside = torch.tensor([[2, 2], [3, 0], [0, 3], [-1, -3]], device=device)
        assert storage.contains(inside).tolist() == [True, False, False, True]
        assert storage.contains(tuple(inside.unbind(-1))).tolist() == [True, False, False, True]


@tensorclass
class Pair:
    n: torch.Tensor
    halved: torch.Tensor


class TestLists:
    @pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage, CompressedListStorage])
    def test_records_move_to_the_storage(self, source, home, kind):
        rb = ReplayBuffer(storage=kind(5, device=home), batch_size=6)
        assert rb.extend(rows(0, 4, source)).tolist() == [0, 1, 2, 3]
        rb.add(rows(4, 5, source)[0])
        rb.extend([rows(5, 6, source)[0], rows(6, 7)[0]])
        assert [numbers(rb[i]) for i in range(5)] == [5, 6, 2, 3, 4]
        batch, info = rb.sample(return_info=True)
        assert numbers(batch) == [[5, 6, 2, 3, 4][i] for i in info["index"].tolist()] and on(home, batch)

    @pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
    def test_records_stay_on_their_device_without_a_storage_device(self, source, kind):
        rb = ReplayBuffer(storage=kind(5), batch_size=6)
        rb.extend([rows(n, n + 1, source)[0] for n in range(3)])
        assert on(source, rb[1]) and numbers(rb[1]) == 1
        assert on(source, rb.sample()) and set(numbers(rb.sample())) <= {0, 1, 2}

    def test_indices_from_any_device_are_accepted(self, device):
        rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
        rb.extend([torch.tensor(n, device=device) for n in range(4)])
        for index in (torch.tensor([3, 1]), torch.tensor([3, 1], device=device), [3, 1]):
            assert [int(item) for item in rb[index]] == [3, 1]
        rb[torch.tensor([0, 2], device=device)] = [torch.tensor(8, device=device), torch.tensor(9)]
        assert [int(item) for item in rb[:]] == [8, 1, 9, 3]

    def test_different_records_are_stacked_lazily(self, source, home):
        rb = ReplayBuffer(storage=LazyStackStorage(5, device=home), batch_size=6)
        rb.extend([TensorDict({"w": torch.full((n,), n, device=source)}) for n in (3, 1, 4)])
        for record in rb.sample().unbind(0):
            assert record["w"].device == home and record["w"].tolist() == [len(record["w"])] * len(
                record["w"]
            )
