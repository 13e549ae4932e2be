"""Records are drawn by the age of the policy that collected them."""

import copy

import pytest
import torch
from tensordict import TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from gleanrl.envs import GymEnv
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)

N = 40_000


def filled(sampler, versions=range(10), kind=TensorDictReplayBuffer, **options):
    buffer = kind(storage=LazyTensorStorage(20), sampler=sampler, batch_size=N, **options)
    buffer.extend(TensorDict({"policy_version": torch.tensor([*versions])}, [len(versions)]))
    return buffer


def shares(batch):
    return torch.bincount(batch["policy_version"].reshape(-1), minlength=10) / N


def test_newer_records_come_more_often():
    sampler = StalenessAwareSampler(seed=0)
    buffer = filled(sampler)
    sampler.consumer_version = 9
    batch, info = buffer.sample(return_info=True)
    weight = 1 / (9 - torch.arange(10.0) + 1)
    assert torch.allclose(shares(batch), weight / weight.sum(), atol=0.01)
    assert torch.equal(batch["staleness"], (9 - batch["policy_version"]).float())
    assert torch.equal(info["staleness"], batch["staleness"])
    sampler.consumer_version = -5
    assert torch.allclose(shares(buffer.sample()), torch.full((10,), 0.1), atol=0.01), "all are newer"


def test_stale_records_are_left_out():
    sampler = StalenessAwareSampler(max_staleness=3, seed=0)
    buffer = filled(sampler)
    sampler.consumer_version = 9
    assert buffer.sample()["policy_version"].unique().tolist() == [6, 7, 8, 9]
    sampler.increment_consumer_version()
    assert sampler.consumer_version == 10
    assert buffer.sample()["policy_version"].unique().tolist() == [7, 8, 9]
    sampler.max_staleness = 1
    assert buffer.sample()["policy_version"].unique().tolist() == [9]
    sampler.consumer_version = 100
    with pytest.raises(EmptyBufferError, match=r"consumer_version=100 .* the smallest staleness is 91"):
        buffer.sample()
    buffer.extend(TensorDict({"policy_version": torch.tensor([100, 99])}, [2]))
    assert buffer.sample()["policy_version"].unique().tolist() == [99, 100], "writes count at once"


def test_custom_weight_function_sets_the_shares():
    sampler = StalenessAwareSampler(staleness_weight_fn=lambda s: (s == 1) * 3.0 + (s == 2), seed=0)
    buffer = filled(sampler)
    sampler.consumer_version = 9
    assert torch.allclose(shares(buffer.sample())[6:], torch.tensor([0.0, 0.25, 0.75, 0.0]), atol=0.01)
    for wrong in (lambda s: s * float("nan"), lambda s: -1.0 * s, lambda s: torch.ones(2), lambda s: 1.0):
        buffer.set_sampler(StalenessAwareSampler(staleness_weight_fn=wrong))
        buffer.sampler.consumer_version = 9
        with pytest.raises(InvalidArgumentError, match="staleness_weight_fn: expected"):
            buffer.sample()


def test_single_record_with_a_weight_is_always_drawn():
    sampler = StalenessAwareSampler(staleness_weight_fn=lambda s: (s == 5).double(), seed=0)
    buffer = filled(sampler)
    sampler.consumer_version = 9
    assert buffer.sample()["policy_version"].unique().tolist() == [4]


def test_state_and_copies_have_the_version_of_the_learner():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=StalenessAwareSampler(max_staleness=2, seed=0), batch_size=8
    )
    buffer.extend(TensorDict({"policy_version": torch.arange(10)[:, None]}, [10]))
    buffer.sampler.consumer_version = 9
    copied = copy.deepcopy(buffer)
    restored = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=StalenessAwareSampler(max_staleness=2), batch_size=8
    )
    restored.load_state_dict(buffer.state_dict())
    for _ in range(3):
        batch = buffer.sample()
        for other in (copied, restored):
            assert torch.equal(other.sample()["index"], batch["index"])
    with pytest.raises(SchemaError, match="consumer_version"):
        buffer.sampler.load_state_dict({**buffer.sampler.state_dict(), "running": None})


def test_batches_drawn_ahead_can_be_taken_back():
    sampler = StalenessAwareSampler(max_staleness=3, seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4, prefetch=2)
    buffer.extend(TensorDict({"policy_version": torch.arange(10)}, [10]))
    buffer.sample()
    sampler.consumer_version = 9
    buffer.set_seed(3)  # undoes the prefetched draws
    assert sampler.consumer_version == 9
    assert buffer.sample()["policy_version"].min() >= 6


def test_collectors_stamp_versions():
    collector = SyncDataCollector(
        GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=40, track_policy_version=True
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=StalenessAwareSampler(max_staleness=0), batch_size=10
    )
    for batch in collector:
        buffer.extend(batch)
        buffer.sampler.consumer_version = int(batch["policy_version"].max())
        assert (buffer.sample()["policy_version"] == batch["policy_version"].max()).all()
        collector.update_policy_weights_()
    collector.shutdown()


def test_missing_or_invalid_versions_raise():
    with pytest.raises(MissingKeyError, match=r"version_key: 'v' isn't stored.*'policy_version'"):
        filled(StalenessAwareSampler(version_key="v")).sample()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), sampler=StalenessAwareSampler(), batch_size=2
    )
    buffer.extend(TensorDict({"policy_version": torch.ones(4)}, [4]))
    with pytest.raises(SchemaError, match="one integer"):
        buffer.sample()
    with pytest.raises(UnsupportedError, match="use LazyTensorStorage"):
        ReplayBuffer(storage=ListStorage(4), sampler=StalenessAwareSampler())
    with pytest.raises(InvalidArgumentError, match="max_staleness"):
        StalenessAwareSampler(-2)
    with pytest.raises(InvalidArgumentError, match="consumer_version"):
        StalenessAwareSampler().consumer_version = "a"
