"""Records may be trees of tensors and NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage, ReplayBuffer
from gleanrl.errors import InvalidTypeError, SchemaError
from tests.data.replay_buffers.oracle import fill


@pytest.mark.parametrize("ndim", [1, 2])
def test_numpy_arrays_in_dictionaries_and_tuples_are_converted(ndim):
    storage = LazyTensorStorage(16, ndim=ndim)
    rb = ReplayBuffer(storage=storage, batch_size=2)
    lead = (2,) * (ndim - 1)
    steps = {
        "obs": np.arange(4 * 2**ndim, dtype=np.float64).reshape(*lead, 4, 2, order="F")[..., ::-1],
        "done": (np.zeros((*lead, 4), bool), np.broadcast_to(np.float32(2), (*lead, 4))),
        "big": np.ones((*lead, 4), ">i4"),
        "n": torch.zeros(*lead, 4),
    }
    rb.extend(steps)
    got = rb[:]
    assert got["obs"].dtype is torch.float64 and got["done"][0].dtype is torch.bool
    assert got["big"].dtype is torch.int32 and got["big"].unique().tolist() == [1]
    assert got["obs"].tolist() == steps["obs"].tolist() and got["done"][1].unique().tolist() == [2.0]
    steps["obs"][...] = -1  # the storage kept no reference
    assert got["obs"].tolist() != steps["obs"].tolist()
    one = {
        "obs": np.ones((*lead, 2)),
        "done": (np.ones(lead, bool), np.float32(1) if ndim == 1 else np.ones(lead, np.float32)),
        "big": torch.tensor(1, dtype=torch.int32).expand(lead),
        "n": torch.zeros(lead),
    }
    rb.add(one)
    rb.extend([one, one])
    assert storage.num_steps == 7 and storage[6]["obs"].unique().tolist() == [1.0]
    with pytest.raises(SchemaError, match="expected shape .* got"):
        rb.add({**one, "obs": np.ones(lead)})


@pytest.mark.parametrize("wrong", ["text", np.array(["a"]), np.array([object()]), 2**70])
def test_leaves_that_are_no_numbers_are_refused_with_their_place(wrong):
    with pytest.raises(InvalidTypeError, match=r"got (str|int|ndarray of .*) at \['x'\]\[1\]; ListStorage"):
        fill(LazyTensorStorage(8), {"x": (torch.zeros(1), wrong)})


@pytest.mark.parametrize(
    "number, dtype",
    [
        (1, torch.int64),
        (True, torch.bool),
        (1.5, torch.float32),
        (2j, torch.complex64),
        (np.int8(3), torch.int8),
    ],
)
def test_numbers_in_single_records_become_columns(number, dtype):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    record = {"obs": np.zeros(3), "act": number, "more": [{"n": number}]}
    buffer.extend([record] * 5)
    buffer.add(record)
    buffer.add(
        {
            "obs": torch.zeros(3, dtype=torch.float64),
            "act": torch.tensor(number, dtype=dtype),
            "more": [{"n": number}],
        }
    )
    buffer[2] = record
    for column in (buffer[:]["act"], buffer[:]["more"][0]["n"]):
        assert column.dtype is dtype and column.tolist() == [number] * 7
    with pytest.raises(SchemaError, match="act"):
        buffer.add({**record, "act": "text"})
    with pytest.raises(SchemaError, match="act"):
        buffer.extend({"obs": np.zeros((2, 3)), "act": number, "more": [{"n": np.array([number] * 2)}]})
    assert len(buffer) == 7


@pytest.mark.parametrize(
    "other, error, match",
    [
        ({"obs": np.zeros(3), "act": 1.5}, SchemaError, "differ at 'act'.*float32.*int64"),
        ({"obs": np.zeros(2), "act": 1}, SchemaError, "differ at 'obs'.*2.*3"),
        ({"obs": np.zeros(3), "act": "x"}, InvalidTypeError, "got str at .'act'"),
        ({"obs": np.zeros(3)}, SchemaError, "these differ"),
    ],
)
def test_error_about_unlike_records_names_where_they_differ(other, error, match):
    with pytest.raises(error, match=match):
        ReplayBuffer(storage=LazyTensorStorage(20)).extend([{"obs": np.zeros(3), "act": 1}, other])


@pytest.mark.parametrize("numbers", [[1, 2, 3], [True, 0.5], [[1, 2]]])
def test_a_list_of_numbers_is_no_record(numbers):
    """`add([1, 2, 3])` once stored one record of three columns, so a later `extend` failed at their structure."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(
        InvalidTypeError, match=r"add: expected a record of tensors, got a list of \d numbers.*extend"
    ):
        buffer.add(numbers)
    assert len(buffer) == 0
    buffer.extend([4, 5])
    assert buffer[:].tolist() == [4, 5]
    listed = ReplayBuffer(storage=ListStorage(10))
    listed.add(numbers)
    assert listed.storage.get(0) == numbers


@pytest.mark.parametrize("record", [(1, 2.5), {"a": 1}, [torch.zeros(2), 1]])
def test_numbers_in_other_records_become_tensors(record):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.add(record)
    buffer.add(record)
    assert len(buffer) == 2 and type(buffer[0]) is type(record)
