"""Buffers and storages in checkpoints: every part goes on as if never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.checkpoint.folder import Folder
from gleanrl.data import (
    FlatStorageCheckpointer,
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
from gleanrl.errors import CheckpointError, IncompatibleCheckpointError, InvalidTypeError, SchemaError

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
def test_samples_go_on_as_if_never_interrupted(tmp_path: Path, sampler: str, storage: Any, form: Any) -> None:
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


def test_lists_of_objects(tmp_path: Path) -> None:
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


def test_what_doesnt_fit_changes_nothing(tmp_path: Path) -> None:
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
    with pytest.raises(IncompatibleCheckpointError, match="it's a something"):
        other.loads(tmp_path / "other")
    assert (other[:] == before).all()


def test_a_storage_alone(tmp_path: Path) -> None:
    first, other = LazyTensorStorage(10), LazyTensorStorage(10)
    first.set(range(4), torch.arange(4))
    first.checkpointer.dumps(first, tmp_path)
    other.checkpointer.loads(other, tmp_path)
    assert torch.equal(other.get(range(4)), torch.arange(4))


def test_a_form_of_ones_own(tmp_path: Path) -> None:
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
def test_a_form_that_nobody_knows_is_named(form: Any) -> None:
    with pytest.raises(IncompatibleCheckpointError, match="isn't known here"):
        StorageCheckpointerBase.unpacked({"form": form, "packed": {}})
