"""Storages on a device store and return the same records for data and indices from any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gleanrl.errors import IndexRangeError, SchemaError, UnsupportedError
from tests.devices.records import CPU, numbers, on, rows


class TestWriting:
    def test_records_go_in_and_come_out(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(10, device=home), batch_size=64)
        index = rb.extend(rows(0, 4, source))
        assert index.tolist() == [0, 1, 2, 3]
        assert int(rb.add(rows(4, 5, source)[0])) == 4
        assert numbers(rb[:]) == [0, 1, 2, 3, 4] and on(home, rb[:])
        batch, info = rb.sample(return_info=True)
        assert on(home, batch) and batch.device == home
        assert numbers(batch) == info["index"].tolist() and set(info["index"].tolist()) <= set(range(5))

    def test_a_full_ring_goes_around(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(5, device=home))
        rb.extend(rows(0, 4, source))
        assert rb.extend(rows(4, 7, source)).tolist() == [4, 0, 1]
        assert numbers(rb[:]) == [5, 6, 2, 3, 4] and len(rb) == 5
        assert rb.extend(rows(10, 22, source)).tolist() == [-1] * 7 + [4, 0, 1, 2, 3]
        assert numbers(rb[:]) == [18, 19, 20, 21, 17]
        assert int(rb.add(rows(30, 31, source)[0])) == 4
        assert numbers(rb[:]) == [18, 19, 20, 21, 30]

    def test_data_may_come_from_different_devices(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(10, device=device))
        rb.extend(rows(0, 2))
        rb.extend(rows(2, 4, device))
        mixed = rows(4, 6)
        mixed["x"] = mixed["x"].to(device)
        rb.extend(mixed)
        assert numbers(rb[:]) == [*range(6)] and on(device, rb[:])

    def test_input_is_not_changed_and_not_shared(self, source, home):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10, device=home), batch_size=4)
        data = rows(0, 4, source)
        rb.extend(data)
        assert numbers(data) == [0, 1, 2, 3] and on(source, data)
        assert set(data.keys()) == {"x", "pixels", "next"}
        data.zero_()
        assert numbers(rb[:].select("x", "pixels", "next")) == [0, 1, 2, 3]

    def test_data_that_break_the_schema_change_nothing(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(10, device=home))
        rb.extend(rows(0, 3, source))
        wrong = rows(3, 5, source)
        wrong["x"] = wrong["x"].float()
        with pytest.raises(SchemaError, match="'x'.*float32"):
            rb.extend(wrong)
        assert numbers(rb[:]) == [0, 1, 2] and rb.extend(rows(3, 4, source)).tolist() == [3]

    def test_empty_forgets_the_records(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(5, device=home))
        rb.extend(rows(0, 5, source))
        rb.empty()
        assert len(rb) == 0
        assert rb.extend(rows(7, 9, source)).tolist() == [0, 1] and numbers(rb[:]) == [7, 8]

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_views_of_the_storage_itself_may_be_written(self, home, ahead):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, device=home))
        rb.extend(rows(0, 6, home))
        rb.extend(rb[1 + ahead : 5])  # writes to the first slots, so the views change while they are read
        assert numbers(rb[:]) == ([1, 2, 3, 4, 4, 5] if not ahead else [2, 3, 4, 3, 4, 5])

    def test_no_graph_is_kept(self, source, home):
        weight = torch.arange(3.0, device=source, requires_grad=True)
        rb = ReplayBuffer(storage=LazyTensorStorage(5, device=home), batch_size=8)
        rb.extend(TensorDict({"x": weight * 2}, [3]))
        rb.add(TensorDict({"x": weight[1] * 3}, []))
        assert not rb[:]["x"].requires_grad and not rb.sample()["x"].requires_grad
        assert rb[:]["x"].tolist() == [0.0, 2.0, 4.0, 3.0]

    def test_data_in_unusual_memory_are_stored(self, source, home):
        base = torch.arange(24, device=source).view(4, 6)
        rb = ReplayBuffer(storage=LazyTensorStorage(6, device=home))
        turned, same = base.t(), base[0, 2].expand(6)
        twisted = (torch.arange(6, device=source) + 1j * torch.ones(6, device=source)).conj()
        rb.extend(
            TensorDict({"turned": turned, "same": same, "twisted": twisted, "every": base[0][:, None]}, [6])
        )
        rb.extend(
            TensorDict(
                {
                    "turned": turned[::2],
                    "same": same[:3],
                    "twisted": twisted[3:],
                    "every": base[1, ::2, None],
                },
                [3],
            )
        )
        assert rb[:]["turned"].tolist() == [
            [0, 6, 12, 18],
            [2, 8, 14, 20],
            [4, 10, 16, 22],
            *base.t()[3:].tolist(),
        ]
        assert rb[:]["same"].tolist() == [2] * 6
        assert rb[:]["twisted"].tolist() == [3 - 1j, 4 - 1j, 5 - 1j, 3 - 1j, 4 - 1j, 5 - 1j]
        assert rb[:]["every"].flatten().tolist() == [6, 8, 10, 3, 4, 5]


class TestDevice:
    def test_storage_reports_its_device(self, device):
        storage = LazyTensorStorage(4, device=device)
        assert storage.device == device
        ReplayBuffer(storage=storage).extend(rows(0, 2))
        assert storage.device == device and on(device, storage.get(slice(None)))

    def test_device_without_an_index_is_completed(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=device.type), batch_size=3)
        rb.extend(rows(0, 2))
        assert rb.storage.device == device and on(device, rb.sample()) and rb.sample().device == device

    @pytest.mark.parametrize("kind", ["lazy", "given"])
    def test_auto_follows_the_data(self, source, kind):
        if kind == "lazy":
            storage = LazyTensorStorage(4, device="auto")
            ReplayBuffer(storage=storage).extend(rows(0, 4, source))
        else:
            storage = TensorStorage(rows(0, 4, source), device="auto")
        assert storage.device == source and on(source, storage.get([0, 3]))
        assert numbers(storage.get([0, 3])) == [0, 3]

    def test_given_data_on_the_device_are_not_copied(self, device):
        data = rows(0, 4, device)
        storage = TensorStorage(data, device=device)
        assert len(storage) == 4 and storage.device == device
        storage.set(range(1, 3), rows(7, 9))
        assert numbers(data) == [0, 7, 8, 3]
        data["x"][0] = 5
        assert storage.get([0])["x"].tolist() == [5]

    def test_given_data_on_another_device_are_copied(self, source, home):
        data = rows(0, 4, source)
        storage = TensorStorage(data, device=home)
        assert numbers(storage.get(slice(None))) == [0, 1, 2, 3] and on(home, storage.get(slice(None)))
        if source != home:
            storage.set(range(1, 3), rows(7, 9))
            assert numbers(data) == [0, 1, 2, 3]

    def test_memory_mapped_storage_moves_records_to_the_cpu(self, source, tmp_path):
        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "files"), batch_size=4)
        rb.extend(rows(0, 4, source))
        rb.add(rows(4, 5, source)[0])
        rb.extend(rows(5, 7, source))
        assert numbers(rb[:]) == [5, 6, 2, 3, 4] and on(CPU, rb[:]) and on(CPU, rb.sample())
        rb[[1, 2]] = rows(8, 10, source)
        assert numbers(rb[:]) == [5, 8, 9, 3, 4]

    def test_memory_mapped_storage_refuses_other_devices(self, device):
        if device.type == "cpu":
            LazyMemmapStorage(5, device=device)
        else:
            with pytest.raises(ValueError, match="device"):
                LazyMemmapStorage(5, device=device)

    def test_sharing_between_processes_needs_the_cpu(self, device):
        if device.type == "cpu":
            assert ReplayBuffer(storage=LazyTensorStorage(5, device=device), shared=True).shared
        else:
            with pytest.raises(UnsupportedError, match="on the CPU"):
                ReplayBuffer(storage=LazyTensorStorage(5, device=device), shared=True)


def indices(device: torch.device) -> dict[str, tuple[Any, list[int]]]:
    """Return indices of eight records, and the numbers of the records that each names."""
    mask = torch.tensor([True, False, False, True, False, False, False, True])
    return {
        "slice": (slice(1, 7, 2), [1, 3, 5]),
        "whole": (slice(None), [*range(8)]),
        "list": ([3, -1, 3], [3, 7, 3]),
        "range": (range(1, 6, 3), [1, 4]),
        "array": (np.array([6, 0]), [6, 0]),
        "tensor": (torch.tensor([2, 2, -8]), [2, 2, 0]),
        "tensor there": (torch.tensor([2, 2, -8], device=device), [2, 2, 0]),
        "int32 there": (torch.tensor([5, 1], dtype=torch.int32, device=device), [5, 1]),
        "mask": (mask, [0, 3, 7]),
        "mask there": (mask.to(device), [0, 3, 7]),
        "list mask": (mask.tolist(), [0, 3, 7]),
    }


@pytest.mark.parametrize("kind", [*indices(CPU)])
class TestIndices:
    def test_every_kind_of_index_reads_its_records(self, device, home, kind):
        rb = ReplayBuffer(storage=LazyTensorStorage(8, device=home))
        rb.extend(rows(0, 8))
        index, expected = indices(device)[kind]
        assert numbers(rb[index]) == expected == numbers(rb.storage.get(index)) and on(home, rb[index])

    def test_every_kind_of_index_writes_its_records(self, device, source, home, kind):
        rb = ReplayBuffer(storage=LazyTensorStorage(8, device=home))
        rb.extend(rows(0, 8))
        index, expected = indices(device)[kind]
        rb[index] = rows(20, 20 + len(expected), source)
        found = [*range(8)]
        for place, slot in enumerate(expected):
            found[slot] = 20 + place
        assert numbers(rb[:]) == found and rb.extend(rows(30, 31)).tolist() == [0]


class TestOneRecord:
    def test_integers_of_any_type_read_one_record(self, device, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home))
        rb.extend(rows(0, 4))
        for index in (2, -2, torch.tensor(2), torch.tensor(2, device=device), np.int64(2)):
            assert numbers(rb[index]) == 2 and rb[index].batch_size == () and on(home, rb[index])

    def test_one_record_is_replaced(self, device, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home))
        rb.extend(rows(0, 4))
        rb[1] = rows(7, 8, source)[0]
        rb[torch.tensor(3, device=device)] = rows(9, 10, source)[0]
        assert numbers(rb[:]) == [0, 7, 2, 9]

    def test_views_are_live(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=device))
        rb.extend(rows(0, 4))
        view, copy = rb[1:3], rb[[1, 2]]
        view["x"][0] = 40
        rb[2] = rows(9, 10)[0]
        assert rb[:]["x"].tolist() == [0, 40, 9, 3] == rb["x"].tolist()
        assert view["x"].tolist() == [40, 9] and numbers(copy) == [1, 2]

    def test_columns_are_read_and_replaced_by_key(self, source, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home))
        rb.extend(rows(0, 3, source))
        assert rb["next", "x"].tolist() == [1, 2, 3] and rb["x"].device == home
        rb["x"] = torch.tensor([5, 6, 7], device=source)
        assert rb["x"].tolist() == [5, 6, 7]
        assert rb.sample(6, return_info=True)[0].keys() == {"x", "pixels", "next"}
        assert rb.sample(3, keys=["x"])["x"].device == home

    def test_indices_out_of_range_are_refused(self, device, home):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home))
        rb.extend(rows(0, 3))
        for index in (3, [-4], torch.tensor([3], device=device)):
            with pytest.raises(IndexRangeError):
                rb[index]
        here = torch.tensor([0, 2, 3, -3, -4], device=device)
        assert rb.storage.contains(here).tolist() == [True, True, False, True, False]
        assert torch.tensor(2, device=device) in rb.storage
