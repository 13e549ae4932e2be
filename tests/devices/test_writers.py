"""Writers and buffer ensembles work over storages on a device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    WriterEnsemble,
)
from gleanrl.errors import NonFiniteError, UnsupportedError
from tests.devices.records import numbers, on, rows


def scored(scores: list[float], device: torch.device) -> TensorDict:
    return TensorDict({"score": torch.tensor(scores, device=device)}, [len(scores)])


class TestBest:
    def test_best_records_are_kept(self, device, source):
        writer = TensorDictMaxValueWriter(rank_key="score")
        rb = ReplayBuffer(storage=LazyTensorStorage(3, device=device), writer=writer)
        assert rb.extend(scored([1.0, 3.0, 2.0, 0.5, 2.5], source)).tolist() == [-1, 0, 1, -1, 2]
        assert rb["score"].tolist() == [3.0, 2.0, 2.5] and rb["score"].device == device
        assert int(rb.add(scored([2.0], source)[0])) == -1  # an equal score replaces no record
        assert int(rb.add(scored([2.25], source)[0])) == 1
        assert rb["score"].tolist() == [3.0, 2.25, 2.5]
        assert rb.extend(scored([9.0, 0.0, 8.0], source)).tolist() == [1, -1, 2]
        assert sorted(rb["score"].tolist()) == [3.0, 8.0, 9.0]

    def test_best_of_many_records_are_kept(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(20, device=device), writer=TensorDictMaxValueWriter(rank_key="score")
        )
        scores = torch.randperm(300, generator=torch.Generator().manual_seed(0))
        for part in scores.split(37):
            rb.extend(TensorDict({"score": part.to(source)}, [len(part)]))
        assert sorted(rb["score"].tolist()) == [*range(280, 300)]

    @pytest.mark.parametrize(
        "reduction, kept",
        [("sum", [0, 2]), ("mean", [0, 2]), ("max", [0, 1]), ("min", [1, 2]), ("median", [1, 2])],
    )
    def test_several_values_are_reduced_to_a_rank(self, device, source, reduction, kept):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(2, device=device),
            writer=TensorDictMaxValueWriter(rank_key=("next", "reward"), reduction=reduction),
        )
        reward = torch.tensor([[0.0, 0.0, 9.0], [1.0, 1.0, 4.0], [2.0, 2.5, 3.0]], device=source)
        rb.extend(TensorDict({"n": torch.arange(3, device=source), "next": {"reward": reward}}, [3]))
        assert sorted(rb["n"].tolist()) == kept

    def test_nan_rank_is_refused(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(3, device=device), writer=TensorDictMaxValueWriter(rank_key="score")
        )
        rb.extend(scored([1.0, 2.0], source))
        with pytest.raises(NonFiniteError, match="record 1"):
            rb.extend(scored([3.0, float("nan")], source))
        assert rb["score"].tolist() == [1.0, 2.0]

    def test_records_written_by_index_are_ranked(self, device, source):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(3, device=device), writer=TensorDictMaxValueWriter(rank_key="score")
        )
        rb.extend(scored([1.0, 2.0, 3.0], source))
        rb[1] = scored([0.5], source)[0]
        assert rb.extend(scored([0.75], source)).tolist() == [1]


class TestRingAndDataset:
    @pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
    def test_round_robin_writer_wraps_around(self, device, source, writer):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(4, device=device), writer=writer(), batch_size=16
        )
        rb.extend(rows(0, 3, source))
        assert rb.extend(rows(3, 6, source)).tolist() == [3, 0, 1]
        batch = rb.sample()
        assert numbers(batch) == torch.tensor([4, 5, 2, 3])[batch["index"].cpu()].tolist() and on(
            device, batch
        )

    def test_dataset_writer_refuses_writes(self, device):
        data = rows(0, 5, device)
        rb = ReplayBuffer(
            storage=TensorStorage(data, device=device), writer=ImmutableDatasetWriter(), batch_size=500
        )
        assert set(numbers(rb.sample())) == set(range(5)) and len(rb) == 5
        for write in (lambda: rb.extend(data), lambda: rb.add(data[0]), rb.empty):
            with pytest.raises(UnsupportedError):
                write()


class TestEnsembles:
    def test_ensemble_of_buffers_draws_by_its_probabilities(self, device, source):
        parts = [ReplayBuffer(storage=LazyTensorStorage(10, device=device)) for _ in range(2)]
        parts[0].extend(rows(0, 10, source))
        parts[1].extend(rows(10, 15, source))
        rb = ReplayBufferEnsemble(*parts, p=[0.25, 0.75], num_buffer_sampled=400, batch_size=4000)
        batch, info = rb.sample(return_info=True)
        assert batch.shape == (400, 10) and on(device, batch)
        member, place = info["index", "buffer_ids"].cpu(), info["index", "index"].cpu()
        assert numbers(batch) == (member * 10 + place).tolist()
        assert torch.equal(batch["index", "buffer_ids"].cpu(), member)
        assert torch.equal(batch["index", "index"].cpu(), place)
        assert torch.equal(member, member[:, :1].expand_as(member))
        counts = Counter(member[:, 0].tolist())
        assert 60 < counts[0] < 140
        rb[1].extend(rows(15, 16, source))
        assert numbers(parts[1][:]) == [*range(10, 16)]

    def test_ensembles_of_parts_form_a_buffer(self, device, source):
        storages = [LazyTensorStorage(10, device=device) for _ in range(2)]
        for number, storage in enumerate(storages):
            storage.set(range(5), rows(10 * number, 10 * number + 5, source))
        rb = ReplayBufferEnsemble(
            storages=StorageEnsemble(*storages),
            samplers=SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True),
            writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
            batch_size=100,
        )
        batch = rb.sample()
        assert set(numbers(batch[0])) == set(range(5)) and set(numbers(batch[1])) == set(range(10, 15))
        assert on(device, batch)

    def test_offline_to_online_buffer_mixes_records(self, device, source):
        dataset = ReplayBuffer(
            storage=TensorStorage(rows(0, 10, device), device=device), writer=ImmutableDatasetWriter()
        )
        rb = OfflineToOnlineReplayBuffer(
            dataset,
            online_storage=LazyTensorStorage(10, device=device),
            offline_fraction=0.25,
            batch_size=400,
        )
        rb.extend(rows(100, 103, source))
        found = numbers(rb.sample())
        assert sum(n < 10 for n in found) == 100 and set(found) - set(range(10)) == {100, 101, 102}
