"""Type checkers know the result of `sample`: mypy checks this file, and the test runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import assert_type

from gleanrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    RayReplayBuffer,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

Info = dict[Any, Any]


def filled(buffer: ReplayBuffer) -> ReplayBuffer:
    buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
    return buffer


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_samples_of_buffers_have_the_declared_types(kind: type[ReplayBuffer]) -> None:
    buffer = filled(kind(storage=LazyTensorStorage(4), batch_size=2))
    batch = assert_type(buffer.sample(), TensorDictBase)
    assert isinstance(batch, TensorDictBase)
    assert isinstance(assert_type(buffer.sample(2, keys=["x"]), TensorDictBase), TensorDictBase)
    found = assert_type(buffer.sample(return_info=True), tuple[TensorDictBase, Info])
    assert isinstance(found[0], TensorDictBase) and isinstance(found[1], dict)
    assert len(assert_type(buffer.sample(2, True), tuple[TensorDictBase, Info])) == 2
    with_info: bool = len(buffer) > 0  # a bool that only the program knows
    assert len(assert_type(buffer.sample(return_info=with_info), Any)) == 2


def test_samples_of_ensembles_have_the_declared_types() -> None:
    members = [filled(TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=4)
    assert isinstance(assert_type(ensemble.sample(), TensorDictBase), TensorDictBase)
    batch, info = assert_type(ensemble.sample(return_info=True), tuple[TensorDictBase, TensorDictBase])
    assert isinstance(batch, TensorDictBase) and isinstance(info, TensorDictBase)


def only_typed(
    prioritized: TensorDictPrioritizedReplayBuffer,
    hindsight: HERReplayBuffer,
    on_ray: RayReplayBuffer,
    remote: RemoteTensorDictReplayBuffer,
) -> None:
    """Check more classes; mypy reads this function, and nothing calls it."""
    assert_type(prioritized.sample(return_info=True), tuple[TensorDictBase, Info])
    assert_type(hindsight.sample(), TensorDictBase)
    assert_type(on_ray.sample(8), TensorDictBase)
    assert_type(remote.sample(8, return_info=True), tuple[TensorDictBase, Any])
