"""States and checkpoints of buffers on a device load on every other device, bit for bit."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gleanrl.data import (
    ConsumingSampler,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from gleanrl.envs.transforms import MultiStepTransform, VecNorm
from tests.data.replay_buffers.oracle import clock, ted
from tests.devices.records import CPU, PLACES, at, bits, numbers, on, plain, rows

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64"]
SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(40, alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized slices": lambda: PrioritizedSliceSampler(40, alpha=0.7, beta=0.5, slice_len=2),
    "consuming": lambda: ConsumingSampler(max_sample_count=9),
    "staleness": lambda: StalenessAwareSampler(version_key=("collector", "traj_ids")),
}


@pytest.fixture(params=PLACES)
def other(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """The device of the buffer that loads."""
    return at(request.param, device)


@pytest.fixture(params=["state", "dump", "file"])
def carried(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """Copy the state of one buffer to another."""

    def carry(one: Any, another: Any) -> None:
        if request.param == "dump":
            one.dumps(tmp_path / "dump")
            another.loads(tmp_path / "dump")
        elif request.param == "state":
            another.load_state_dict(one.state_dict())
        else:
            file = io.BytesIO()
            torch.save(one.state_dict(), file)
            file.seek(0)
            another.load_state_dict(torch.load(file, weights_only=True))

    return carry


def on_cpu(batch: Any) -> Any:
    return batch.to("cpu") if batch.device is not None else batch.cpu()


@pytest.mark.parametrize("name", [*SAMPLERS])
def test_loaded_buffer_draws_the_same_samples(home, other, carried, name):
    one, another = (
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(30, device=place), sampler=SAMPLERS[name](), batch_size=4, seed=5
        )
        for place in (home, other)
    )
    another.set_seed(8)
    one.extend(ted(28).to(home))
    one.extend(ted(7, start=28).to(home))
    if "prior" in name:
        one.update_priority(torch.arange(30), torch.arange(1.0, 31.0, device=home))
    one.sample()
    carried(one, another)
    assert another.storage.device == other and len(another) == 30
    for _ in range(4):
        mine, its = one.sample(), another.sample()
        assert plain(mine) == plain(its) and on(other, its)
        if "slices" not in name:  # slices mark ends
            clock(on_cpu(its))
    one.extend(ted(2, start=35))
    another.extend(ted(2, start=35))
    assert plain(one[:]) == plain(another[:]) and clock(on_cpu(another[:])).tolist()[3:8] == [
        33,
        34,
        35,
        36,
        7,
    ]


def test_every_dtype_is_restored_bit_for_bit(home, other, carried):
    generator, data = torch.Generator().manual_seed(0), {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        wide = torch.randint(
            0,
            2 if name == "bool" else 256,
            (5, 2, 2 * dtype.itemsize),
            dtype=torch.uint8,
            generator=generator,
        )
        data[name] = wide.view(dtype)
    one, another = (ReplayBuffer(storage=LazyTensorStorage(8, device=place)) for place in (home, other))
    one.extend(TensorDict(data, [5]))
    carried(one, another)
    assert plain(another[:]) == plain(TensorDict(data, [5])) and on(other, another[:])


def test_a_state_is_a_copy(device):
    rb = ReplayBuffer(storage=LazyTensorStorage(4, device=device))
    rb.extend(rows(0, 4, device))
    state = rb.state_dict()
    rb.extend(rows(10, 14, device))
    rb.load_state_dict(state)
    assert numbers(rb[:]) == [0, 1, 2, 3]
    rb.extend(rows(20, 22, device))
    rb.load_state_dict(state)
    assert numbers(rb[:]) == [0, 1, 2, 3]


def test_a_filled_buffer_is_loaded_over(home, other, carried):
    one, another = (ReplayBuffer(storage=LazyTensorStorage(4, device=place)) for place in (home, other))
    one.extend(rows(0, 4))
    one.extend(rows(4, 6))
    another.extend(rows(90, 93))
    carried(one, another)
    assert numbers(another[:]) == [4, 5, 2, 3] and another.extend(rows(6, 7)).tolist() == [2]


def test_storage_of_another_size_loads_the_newest_records(home, other, tmp_path):
    one, large = ReplayBuffer(storage=LazyTensorStorage(4, device=home)), LazyTensorStorage(6, device=other)
    one.extend(rows(0, 4))
    one.extend(rows(4, 6))
    one.dumps(tmp_path)
    another = ReplayBuffer(storage=large)
    another.loads(tmp_path)
    assert numbers(another[:]) == [2, 3, 4, 5] and another.extend(rows(6, 9)).tolist() == [4, 5, 0]


def test_memory_mapped_and_device_buffers_load_each_other(device, tmp_path):
    one = ReplayBuffer(storage=LazyTensorStorage(6, device=device))
    files = ReplayBuffer(storage=LazyMemmapStorage(6))
    back = ReplayBuffer(storage=LazyTensorStorage(6, device=device))
    one.extend(rows(0, 5, device))
    one.dumps(tmp_path / "one")
    files.loads(tmp_path / "one")
    files.dumps(tmp_path / "files")
    back.loads(tmp_path / "files")
    assert numbers(files[:]) == numbers(back[:]) == [*range(5)] and on(CPU, files[:]) and on(device, back[:])


@pytest.mark.parametrize(
    "form",
    [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer],
)
@pytest.mark.parametrize("streams", [None, 3])
def test_storage_checkpointers_restore_records(home, other, tmp_path, form, streams):
    if form is H5StorageCheckpointer:
        pytest.importorskip("h5py")
    ndim = 1 if streams is None else 2
    one, another = (
        ReplayBuffer(storage=LazyTensorStorage(30, device=place, ndim=ndim)) for place in (home, other)
    )
    one.storage.checkpointer = form()
    count = 25 if streams is None else 8
    one.extend(ted(count, 0, streams).to(home))
    one.extend(ted(count, count, streams).to(home))
    one.dumps(tmp_path)
    another.loads(tmp_path)
    assert plain(one[:]) == plain(another[:]) and on(other, another[:])
    clock(on_cpu(another[:]))


def test_background_dump_holds_the_moment_of_the_call(device, tmp_path):
    one, another = (ReplayBuffer(storage=LazyTensorStorage(4000, device=device)) for _ in range(2))
    one.extend(rows(0, 4000, device))
    dump = one.dumps(tmp_path, wait=False)
    for start in range(4000, 12000, 500):
        one.extend(rows(start, start + 500, device).apply(lambda leaf: leaf + 1))
        one[[3, 77]] = rows(1, 3, device)
    dump.wait(60)
    another.loads(tmp_path)
    assert another[:]["x"].tolist() == [*range(4000)]
    assert torch.equal(another[:]["next", "reward"].cpu()[:, 0], torch.arange(4000) / 2)


def test_dump_rewrites_changed_rows_only(device, tmp_path):
    one, another = (ReplayBuffer(storage=LazyTensorStorage(5000, device=device)) for _ in range(2))
    one.extend(TensorDict({"x": torch.arange(5000)}, [5000]))
    one.dumps(tmp_path)
    expected = torch.arange(5000)
    for slot in (17, 4999, 2500):
        one[slot] = TensorDict({"x": torch.tensor(-slot, device=device)}, [])
        expected[slot] = -slot
        one.dumps(tmp_path)
        another.loads(tmp_path)
        assert torch.equal(another[:]["x"].cpu(), expected)
    view = one[:10]  # the buffer isn't informed of writes through a live view
    view["x"][4] = 77
    expected[4] = 77
    one.dumps(tmp_path)
    another.loads(tmp_path)
    assert torch.equal(another[:]["x"].cpu(), expected)


def test_trees_and_single_tensors_are_restored(home, other, carried):
    for data in (torch.arange(4.0), {"a": torch.arange(4), "b": (torch.arange(4.0)[:, None],)}):
        one, another = (ReplayBuffer(storage=LazyTensorStorage(6, device=place)) for place in (home, other))
        one.extend(data)
        carried(one, another)
        found = another[:]
        leaves = [found] if isinstance(found, torch.Tensor) else [found["a"], found["b"][0]]
        assert all(leaf.device == other and leaf.flatten().tolist() == [0, 1, 2, 3] for leaf in leaves)


def test_non_tensor_entries_are_restored(home, other, carried):
    one, another = (ReplayBuffer(storage=LazyTensorStorage(6, device=place)) for place in (home, other))
    data = {"n": torch.arange(3, device=home), "text": NonTensorStack("zero", "one", "two")}
    one.extend(TensorDict(data, [3]))
    carried(one, another)
    assert list(another[:]["text"]) == ["zero", "one", "two"] and another[:]["n"].tolist() == [0, 1, 2]
    assert another[:]["n"].device == other


def test_list_storages_are_restored(device, carried):
    one, another = (ReplayBuffer(storage=ListStorage(6), batch_size=4, seed=0) for _ in range(2))
    one.extend(rows(0, 4, device))
    carried(one, another)
    assert [numbers(another[i]) for i in range(4)] == [0, 1, 2, 3]
    assert numbers(one.sample()) == numbers(another.sample())


def test_max_value_writers_are_restored(home, other, carried):
    one, another = (
        ReplayBuffer(
            storage=LazyTensorStorage(3, device=place), writer=TensorDictMaxValueWriter(rank_key="score")
        )
        for place in (home, other)
    )
    one.extend(TensorDict({"score": torch.tensor([1.0, 3.0, 2.0, 2.0], device=home)}, [4]))
    carried(one, another)
    for rb in (one, another):  # of equal scores the latest record is dropped
        assert rb.extend(TensorDict({"score": torch.tensor([2.5, 1.5])}, [2])).tolist() == [
            2,
            -1,
        ]  # of equal scores the latest record is dropped
    assert one["score"].tolist() == another["score"].tolist() == [3.0, 2.0, 2.5]


def test_ensembles_are_restored(home, other, tmp_path):
    def make(place: torch.device) -> Any:
        parts = [ReplayBuffer(storage=LazyTensorStorage(10, device=place), seed=n) for n in range(2)]
        return ReplayBufferEnsemble(*parts, batch_size=8)

    one, another = make(home), make(other)
    one[0].extend(rows(0, 10))
    one[1].extend(rows(10, 14))
    one.sample()
    one.dumps(tmp_path)
    another.loads(tmp_path)
    for _ in range(3):
        mine, its = one.sample(), another.sample()
        assert numbers(mine) == numbers(its) and on(other, its)


def test_held_back_steps_are_restored(home, other, carried):
    one, another = (
        ReplayBuffer(
            storage=LazyTensorStorage(30, device=place), transform=MultiStepTransform(n_steps=2, gamma=0.5)
        )
        for place in (home, other)
    )
    one.extend(ted(5).to(home))
    carried(one, another)
    one.extend(ted(6, 5).to(home))
    another.extend(ted(6, 5).to(other))
    assert len(one) == len(another) == 9 and plain(one[:]) == plain(another[:])


def test_statistics_of_a_transform_are_restored(home, other, carried):
    one, another = (
        ReplayBuffer(
            storage=LazyTensorStorage(30, device=place),
            transform=VecNorm(in_keys=["observation"]),
            batch_size=8,
            seed=1,
        )
        for place in (home, other)
    )
    one.extend(ted(20).to(home))
    one.sample()
    carried(one, another)
    torch.testing.assert_close(one.sample()["observation"].cpu(), another.sample()["observation"].cpu())


def test_copies_are_independent(device):
    one = ReplayBuffer(storage=LazyTensorStorage(6, device=device), batch_size=4, seed=2)
    one.extend(rows(0, 5, device))
    one.sample()
    another = copy.deepcopy(one)
    assert numbers(another[:]) == [*range(5)] and on(device, another[:])
    another.extend(rows(50, 52))
    assert numbers(one[:]) == [*range(5)] and numbers(another[:]) == [51, 1, 2, 3, 4, 50]


def test_generator_on_the_device_is_restored(device, carried):
    one, another = (
        ReplayBuffer(
            storage=LazyTensorStorage(9, device=device),
            sampler=SamplerWithoutReplacement(),
            generator=torch.Generator(device).manual_seed(seed),
            batch_size=4,
        )
        for seed in (0, 1)
    )
    one.extend(rows(0, 9, device))
    one.sample()
    carried(one, another)
    mine, its = (list(itertools.islice(rb, 3)) for rb in (one, another))
    assert [numbers(batch) for batch in mine] == [numbers(batch) for batch in its]
    assert bits(one.sample()["x"]) == bits(another.sample()["x"])
