"""The repr of a buffer's component shows its arguments."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SliceSampler,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    WriterEnsemble,
)


class Own(Sampler):
    """A sampler as users may derive it."""

    def __init__(self, first: int, *rest: int, rule=None, **more: object) -> None:
        super().__init__()

    def sample(self, storage, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64), {}


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (RandomSampler(), "RandomSampler()"),
        (SliceSampler(slice_len=4, traj_key=("a", "b")), "SliceSampler(slice_len=4, traj_key=('a', 'b'))"),
        (SliceSampler(num_slices=2, trajectory_key="e"), "SliceSampler(num_slices=2, trajectory_key='e')"),
        (
            PrioritizedSampler(9, 0.5, beta=1.0, dtype=torch.float64),
            "PrioritizedSampler(max_capacity=9, alpha=0.5, beta=1.0, dtype=torch.float64)",
        ),
        (TensorDictMaxValueWriter(rank_key="x"), "TensorDictMaxValueWriter(rank_key='x')"),
        (
            Own(1, 2, rule=len, x=object(), y=[(3,), None], z=Path("f")),
            f"Own(first=1, 2, rule=len, x=<object>, y=[(3,), None], z={Path('f')!r})",
        ),
        (
            SamplerEnsemble(RandomSampler(), SliceSampler(num_slices=2), p=[0.5, 0.5]),
            "SamplerEnsemble(RandomSampler(), SliceSampler(num_slices=2), p=[0.5, 0.5])",
        ),
        (StorageEnsemble(LazyTensorStorage(3)), "StorageEnsemble(LazyTensorStorage(max_size=3))"),
        (WriterEnsemble(RoundRobinWriter()), "WriterEnsemble(RoundRobinWriter())"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repr_of_a_part_shows_its_arguments(part, shown):
    assert repr(part) == shown


def test_a_buffer_shows_its_parts_and_so_do_copies():
    buffer = ReplayBuffer(sampler=SliceSampler(slice_len=4), storage=LazyTensorStorage(9), batch_size=8)
    shown = repr(buffer)
    assert (
        "sampler=SliceSampler(slice_len=4),\n    writer=RoundRobinWriter()" in shown and " at 0x" not in shown
    )
    assert repr(pickle.loads(pickle.dumps(buffer.sampler))) == repr(copy.deepcopy(buffer.sampler))
    assert repr(copy.deepcopy(buffer.sampler)) == "SliceSampler(slice_len=4)"


def test_parts_keep_no_reference_to_their_arguments(tmp_path):
    rows = [[0.0] * 1000]
    storage = LazyMemmapStorage(3, scratch_dir=tmp_path)
    assert all(rows is not value for value in vars(Own(1, rule=rows)).values()) and "of 3 rows" in repr(
        storage
    )
