"""Trees of tensors and NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
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
    steps["obs"][...] = -1  # nothing of it was kept
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


@pytest.mark.parametrize("wrong", ["text", np.array(["a"]), np.array([object()]), 1.0])
def test_what_isnt_numbers_is_refused_with_its_place(wrong):
    with pytest.raises(InvalidTypeError, match=r"got (str|float|ndarray of .*) at \['x'\]\[1\]; ListStorage"):
        fill(LazyTensorStorage(8), {"x": (torch.zeros(1), wrong)})
