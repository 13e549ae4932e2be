"""Compressed list storages compress the tensors of their records."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tensordict import TensorDict, tensorclass

from gleanrl.data import (
    CompressedListStorage,
    LazyStackStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError


@tensorclass
class Pair:
    x: torch.Tensor
    text: str


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (TensorDict, Pair)):
        return bool((one == other).all()) and one.batch_size == other.batch_size
    return one == other


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
RECORDS = {
    "scalars": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "with a gradient": torch.ones(3, requires_grad=True),
    "turned": torch.arange(6).view(2, 3).T,
    **{str(dtype): torch.arange(24).reshape(2, 3, 4).to(dtype) for dtype in DTYPES},
    "nested": TensorDict(
        {
            "a": torch.randn(3, 4),
            "agents": TensorDict({"b": torch.arange(6).view(3, 2)}, [3, 2]),
            "s": "text",
        },
        [3],
    ),
    "a class": Pair(x=torch.randn(2, 3), text="words", batch_size=[2]),
    "a tree": {"a": (torch.ones(2), ["b", 3])},
    "no tensor": "text",
}


# tensordict before 0.11 warns of this method
@pytest.mark.filterwarnings("ignore:The method <bound method TensorDictBase.__deepcopy__:UserWarning")
@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("how", [lambda s: s, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_records_are_restored_exactly(name, how):
    record, storage = RECORDS[name], CompressedListStorage(4)
    storage.set([0, 1], [record, record])
    storage = how(storage)
    for read in (
        storage.get(0),
        storage.get([1])[0],
        storage.get(slice(1, 2))[0],
        storage[0],
        storage.fetch(torch.tensor([1]))[0],
    ):
        if isinstance(record, dict):
            assert torch.equal(read["a"][0], record["a"][0]) and read["a"][1] == ["b", 3]
        else:
            assert same(read, record)
    if isinstance(record, TensorDict):
        assert storage.get(0)["agents"].batch_size == (3, 2)


def test_images_take_less_memory():
    images = torch.zeros(10, 3, 84, 84, dtype=torch.uint8)
    images[:, :, 10:20, 30:40] = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1)
    buffer = TensorDictReplayBuffer(storage=CompressedListStorage(20), batch_size=6)
    buffer.extend(TensorDict({"pixels": images, "n": torch.arange(10)}, [10]))
    assert buffer.storage.bytes() < images.numel() / 50
    batch = buffer.sample()
    assert torch.equal(batch["pixels"], images[batch["n"]])
    best = CompressedListStorage(20, compression_level=22)
    best.set([*range(10)], TensorDict({"pixels": images, "n": torch.arange(10)}, [10]))
    assert best.bytes() < buffer.storage.bytes()


@pytest.mark.parametrize(
    "restore", [lambda packed: packed.view(torch.float32), lambda p, about: p.view(about["dtype"])]
)
def test_custom_compression_functions_are_used(restore):
    seen = []

    def compress(tensor):
        seen.append(tensor)
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    buffer = ReplayBuffer(
        storage=CompressedListStorage(5, compression_fn=compress, decompression_fn=restore), batch_size=4
    )
    data = torch.randn(5, 2, 3)
    buffer.extend(data)
    assert len(seen) == 5 and seen[0].shape == (2, 3)
    assert torch.equal(buffer[:], data)


def test_results_of_custom_functions_are_checked():
    def storage(compress, restore=lambda packed: packed):
        return CompressedListStorage(4, compression_fn=compress, decompression_fn=restore)

    for wrong in (lambda t: t, lambda t: b"abc", lambda t: torch.zeros(2, 2, dtype=torch.uint8)):
        broken = storage(wrong)
        with pytest.raises(InvalidTypeError, match="compression_fn: expected a tensor of bytes"):
            broken.set(0, torch.ones(2))
        assert len(broken) == 0
    short = storage(lambda t: torch.zeros(3, dtype=torch.uint8))
    short.set(0, torch.ones(2))
    with pytest.raises(SchemaError, match=r"decompression_fn: expected a tensor \(2,\) torch.float32"):
        short.get(0)
    with pytest.raises(InvalidArgumentError, match="give both or none"):
        CompressedListStorage(4, compression_fn=lambda t: t)
    for level in (0, 23):
        with pytest.raises(InvalidArgumentError, match="compression_level"):
            CompressedListStorage(4, compression_level=level)


def test_a_state_stays_compressed_and_goes_through_a_file():
    storage = CompressedListStorage(4)
    records = [TensorDict({"x": torch.full((100,), float(n))}) for n in range(3)]
    storage.set([0, 1, 2], records)
    file = io.BytesIO()
    torch.save(storage.state_dict(), file)
    assert storage.bytes() < 3 * 400 / 4
    restored = CompressedListStorage(4)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=False))
    assert all(same(restored.get(n), records[n]) for n in range(3))


@pytest.mark.parametrize("other", [ListStorage, LazyStackStorage])
def test_states_of_lists_that_are_not_compressed_are_refused(other):
    def filled(storage):
        buffer = ReplayBuffer(storage=storage, batch_size=2)
        buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
        return buffer

    plain, compressed = filled(other(10)), filled(CompressedListStorage(10))
    for buffer, state, match in (
        (plain, compressed.state_dict(), "are compressed"),
        (compressed, plain.state_dict(), "are plain"),
    ):
        with pytest.raises(SchemaError, match=match):
            buffer.load_state_dict(state)
        assert [int(buffer[i]["x"]) for i in range(4)] == [0, 1, 2, 3]
