"""Buffers and storages resume from checkpoints as if they had never been interrupted."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from gleanrl._checkpoint.folder import Folder
from gleanrl._os import fault_points
from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from gleanrl.errors import (
    CheckpointError,
    IncompatibleCheckpointError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)

SAMPLERS = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(40, 0.6, 0.4),
    "slices": lambda: SliceSampler(num_slices=2, traj_key="episode"),
}


def data(start: int, count: int) -> TensorDict:
    steps = torch.arange(start, start + count)
    return TensorDict(
        {"observation": steps.float(), "episode": steps // 7, "next": {"observation": steps + 1.0}}, [count]
    )


def buffer(sampler: str = "random", storage: Any = LazyTensorStorage, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=storage(40), sampler=SAMPLERS[sampler](), batch_size=8, **kwargs)


@pytest.mark.parametrize("form", [TensorStorageCheckpointer, FlatStorageCheckpointer])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_loaded_buffer_samples_as_the_saved_one(
    tmp_path: Path, sampler: str, storage: Any, form: Any
) -> None:
    first, other = buffer(sampler, storage, prefetch=2), buffer(sampler, storage, prefetch=2)
    first.storage.checkpointer = form()
    for round_ in range(3):
        first.extend(data(25 * round_, 25))
        first.sample()
        first.dumps(tmp_path)
        other.loads(tmp_path)
        assert (other[:] == first[:]).all()
        for _ in range(4):
            a, b = first.sample(return_info=True), other.sample(return_info=True)
            assert (a[0] == b[0]).all() and torch.equal(
                torch.as_tensor(a[1]["index"]), torch.as_tensor(b[1]["index"])
            )
        assert not other.verify().findings if hasattr(other.verify(), "findings") else other.verify()


def test_a_checkpoint_of_mapped_records_goes_into_memory_and_back(tmp_path: Path) -> None:
    mapped, plain = buffer(storage=LazyMemmapStorage), buffer()
    mapped.extend(data(0, 10))
    mapped.dumps(tmp_path / "a")
    plain.loads(tmp_path / "a")
    plain.extend(data(10, 5))
    plain.dumps(tmp_path / "b")
    mapped.loads(tmp_path / "b")
    assert (mapped[:] == plain[:]).all() and len(mapped) == 15


def test_lists_of_objects_are_restored(tmp_path: Path) -> None:
    made, other = (ReplayBuffer(storage=ListStorage(10), collate_fn=list) for _ in range(2))
    made.extend([torch.ones(2), {"a": [1, None, "x"]}, TensorDict({"b": torch.zeros(3)}, [3]), 2.5])
    made.dumps(tmp_path)
    other.loads(tmp_path)
    assert torch.equal(other[0], torch.ones(2)) and other[1] == {"a": [1, None, "x"]} and other[3] == 2.5
    made.add(object())
    with pytest.raises(CheckpointError, match=r"\['items'\]\[4\]: a object can't be saved"):
        made.dumps(tmp_path)
    other.loads(tmp_path)
    assert len(other) == 4


@pytest.mark.parametrize("checkpointer", [TensorStorageCheckpointer, H5StorageCheckpointer])
def test_non_tensor_data_in_a_list(tmp_path: Path, checkpointer: Any) -> None:
    def empty() -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(4), collate_fn=list, checkpointer=checkpointer())

    made, other = empty(), empty()
    stack = NonTensorStack("x", "y")
    record = TensorDict({"a": torch.ones(2), "text": ["t", "u"], "all": NonTensorData({"k": [1]}, [2])}, [2])
    made.extend([TensorDict({"below": record, "stack": stack}, [2]), TensorDict({"a": 1, "text": "t"})])
    made.dumps(tmp_path)
    other.loads(tmp_path)
    first, second = other[0], other[1]
    assert first["below", "text"] == ["t", "u"] and first["below"][1]["all"] == {"k": [1]}
    assert first["stack"] == ["x", "y"] and second["text"] == "t" and first["below"].batch_size == (2,)
    assert torch.equal(first["below", "a"], torch.ones(2))
    made.add(TensorDict({"text": NonTensorData(object())}))
    with pytest.raises(CheckpointError, match=r"\['items'\]\[2\]\['text'\]: a object can't be saved"):
        made.storage.checkpointer.dumps(made.storage, tmp_path / "other")


def test_background_dump_copies_the_objects_of_a_list(tmp_path: Path) -> None:
    made, leave = ReplayBuffer(storage=ListStorage(4), collate_fn=list), threading.Event()
    made.extend([torch.zeros(2), torch.ones(2)])
    kept = made.storage.checkpoint_dict()["items"].make()
    assert kept[0] is made[0] and kept[1] is made[1]
    with fault_points.inject({"fs.lock": leave.wait}):
        dump = made.dumps(tmp_path, wait=False)
        made[0].fill_(7)
        made.extend([torch.full((2,), 5.0)] * 4)
        leave.set()
        assert dump is not None and dump.wait()
    other = ReplayBuffer(storage=ListStorage(4), collate_fn=list)
    other.loads(tmp_path)
    assert torch.equal(other[0], torch.zeros(2)) and torch.equal(other[1], torch.ones(2)) and len(other) == 2


def test_load_of_a_mismatching_checkpoint_changes_nothing(tmp_path: Path) -> None:
    made = buffer()
    made.extend(data(0, 10))
    made.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    other.extend(TensorDict({"a": torch.zeros(4)}, [4]))
    before = other[:].clone()
    with pytest.raises(SchemaError, match="isn't this storage's"):
        other.loads(tmp_path)
    with pytest.raises(IncompatibleCheckpointError, match="expected a storage"):
        other.storage.checkpointer.loads(other.storage, tmp_path)
    Folder(tmp_path / "other").commit("something", {})
    with pytest.raises(IncompatibleCheckpointError, match="got one of a something"):
        other.loads(tmp_path / "other")
    assert (other[:] == before).all()


def test_storage_without_a_buffer_is_restored(tmp_path: Path) -> None:
    first, other = LazyTensorStorage(10), LazyTensorStorage(10)
    first.set(range(4), torch.arange(4))
    first.checkpointer.dumps(first, tmp_path)
    other.checkpointer.loads(other, tmp_path)
    assert torch.equal(other.get(range(4)), torch.arange(4))


def test_custom_form_saves_and_loads(tmp_path: Path) -> None:
    class Reversed(StorageCheckpointerBase):
        form = "reversed, for a test"

        def pack(self, state: Any) -> dict[str, Any]:
            return {**state, "columns": [column.flip(0) for column in state["columns"]]}

        @classmethod
        def unpack(cls, packed: Any) -> dict[str, Any]:
            return {**packed, "columns": [column.flip(0) for column in packed["columns"]]}

    made, other = buffer(checkpointer=Reversed()), buffer()
    made.extend(data(0, 10))
    made.dumps(tmp_path)
    other.loads(tmp_path)
    assert (other[:] == made[:]).all()
    StorageCheckpointerBase._forms.pop("reversed, for a test")
    with pytest.raises(IncompatibleCheckpointError, match="reversed, for a test"):
        other.loads(tmp_path)
    with pytest.raises(InvalidTypeError, match="checkpointer"):
        made.storage.checkpointer = "flat"  # type: ignore[assignment]


@pytest.mark.parametrize("form", ["of another library", None, ["flat"], {}])
def test_unknown_form_raises(form: Any) -> None:
    with pytest.raises(IncompatibleCheckpointError, match="isn't known here"):
        StorageCheckpointerBase.unpacked({"form": form, "packed": {}})


@pytest.mark.parametrize("name", ["dumps", "loads"])
def test_class_that_overrides_dumps_or_loads_raises(name: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"class Filed: .* don't call {name}\(\) .*pack\(\) and unpack"
    ):
        type("Filed", (TensorStorageCheckpointer,), {name: lambda *_: None})

    class Elsewhere(H5StorageCheckpointer):  # its own `dumps` belongs to the library
        pass

    assert Elsewhere().form == H5StorageCheckpointer.form


PEAKS = """
import sys, threading, torch
from pathlib import Path
from gleanrl.data import *
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))
buffer = ReplayBuffer(storage=LazyTensorStorage(3_000), batch_size=4)
rows = torch.zeros(100, 1 << 15, dtype=torch.uint8)
buffer.extend({"x": rows, "y": torch.zeros(100)})
forms = (TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer)
for form in forms:  # what the first dump loads is no memory of the second one
    buffer.storage.checkpointer = form()
    buffer.dumps(Path(sys.argv[1]) / "first")
for number in range(29):
    buffer.extend({"x": rows + number, "y": torch.zeros(100)})
for form in forms:
    buffer.storage.checkpointer = form()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    buffer.dumps(Path(sys.argv[1]) / form.__name__)
    print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's")
def test_no_form_takes_memory_for_all_records(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 4 and max(peaks) < 64, peaks  # MB, for a buffer of 94 MB
