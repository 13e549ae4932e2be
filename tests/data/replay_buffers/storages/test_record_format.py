"""All record formats check records and reject tensors that columns can't hold."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from gleanrl.data.replay_buffers.storages.record_formats import find_format
from gleanrl.errors import SchemaError
from tests.data.replay_buffers.oracle import fill, fingerprint

LAZY = [LazyTensorStorage, LazyMemmapStorage]


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


UNSTORABLE = {
    "meta": (lambda: torch.zeros(2, 3, device="meta"), "a meta tensor"),
    "sparse": (lambda: torch.eye(3)[:2].to_sparse(), "a sparse_coo tensor"),
    "csr": (lambda: torch.eye(3)[:2].to_sparse_csr(), "a sparse_csr tensor"),
    "jagged": (jagged, "a nested tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8), "a quantized"),
}


@pytest.mark.filterwarnings("ignore")  # torch warns about prototype features
@pytest.mark.parametrize("call", ["extend", "add", "extend a tree", "set"])
@pytest.mark.parametrize("leaf", UNSTORABLE)
@pytest.mark.parametrize("kind", LAZY)
def test_tensors_that_columns_cant_hold(kind, leaf, call, tmp_path):
    files = tmp_path / "columns"
    storage = kind(8) if kind is LazyTensorStorage else kind(8, scratch_dir=files)
    rb = ReplayBuffer(storage=storage, seed=0)
    before = fingerprint(rb.state_dict())
    make, message = UNSTORABLE[leaf]
    bad = {"x": torch.ones(2), "z": make()}
    if call != "extend a tree":
        bad = TensorDict({"x": torch.ones(2), "deep": TensorDict({"z": bad["z"]}, [2])}, [2])
    name = r"'z'" if call == "extend a tree" else r"\('deep', 'z'\)"
    where = {"add": "add", "set": "set"}.get(call, "extend")

    def write() -> None:
        if call == "add":
            rb.add(TensorDict(dict(bad.items()), []))
        elif call == "set":
            fill(storage, bad)
        else:
            rb.extend(bad)

    with pytest.raises(SchemaError, match=f"{where}: key {name} expected a dense tensor, got {message}"):
        write()
    assert not storage.initialized and not files.exists()
    assert fingerprint(rb.state_dict()) == before
    rb.extend(TensorDict({"deep": {"z": torch.ones(2, 3)}, "x": torch.ones(2)}, [2]))
    before = fingerprint(rb.state_dict())
    if call == "extend":
        with pytest.raises(SchemaError, match="extend: key"):
            rb.extend(bad)
        with pytest.raises(SchemaError, match="__setitem__: key"):
            rb[:] = bad
    assert fingerprint(rb.state_dict()) == before


def test_many_batch_sizes_are_forgotten_again():
    form = find_format(torch.zeros(4, 2), 1, "test")
    for count in range(1, 500):
        form.schema.check([torch.zeros(count, 2)], torch.Size([count]), "test")
    with pytest.raises(SchemaError):
        form.schema.check([torch.zeros(3, 1)], torch.Size([3]), "test")
    assert len(form.schema._shapes) <= 64
