"""Samplers and writers over a device's storage draw by their rules, for indices and priorities from any device."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.errors import EmptyBufferError
from tests.devices.records import CPU, PLACES, at, numbers, on, rows


def weights(priority: torch.Tensor, slots: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """Return the importance weights by their formula."""
    p = (priority.double() + 1e-8) ** alpha
    return ((p[slots] / p.min()) ** -beta).float()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """The device of indices and priorities."""
    return at(request.param, device)


class TestUniform:
    def test_random_sampler_draws_uniformly(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(10, device=device), sampler=RandomSampler(), seed=0)
        rb.extend(rows(0, 10))
        rb.extend(rows(10, 13))
        batch, info = rb.sample(4000, return_info=True)
        stored = torch.tensor([10, 11, 12, *range(3, 10)])
        assert numbers(batch) == stored[info["index"].cpu()].tolist() and on(device, batch)
        assert info["generation"].tolist() == [2 if slot < 3 else 1 for slot in info["index"].tolist()]
        counts = Counter(numbers(batch))
        assert set(counts) == set(stored.tolist()) and all(300 < count < 500 for count in counts.values())

    def test_draws_equal_the_cpu(self, device):
        drawn = []
        for home in (CPU, device):
            rb = ReplayBuffer(storage=LazyTensorStorage(10, device=home), batch_size=32, seed=3)
            rb.extend(rows(0, 10, home))
            drawn.append([numbers(rb.sample()) for _ in range(3)])
        assert drawn[0] == drawn[1]

    def test_user_generator_is_used(self, device, place):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device),
            generator=torch.Generator(place).manual_seed(4),
            batch_size=32,
        )
        rb.extend(rows(0, 10))
        first, state = [numbers(rb.sample()) for _ in range(2)], rb.state_dict()
        following = numbers(rb.sample())
        rb.set_rng(torch.Generator(place).manual_seed(4))
        assert [numbers(rb.sample()) for _ in range(2)] == first
        rb.sample()
        rb.load_state_dict(state)
        assert numbers(rb.sample()) == following

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_an_epoch_has_each_row_once(self, device, shuffle):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(10, device=device),
            sampler=SamplerWithoutReplacement(shuffle=shuffle),
            batch_size=4,
        )
        rb.extend(rows(0, 12))
        for _ in range(2):
            found = [numbers(batch) for batch in rb]
            assert [len(part) for part in found] == [4, 4, 2]
            drawn = list(itertools.chain(*found))
            assert sorted(drawn) == [*range(2, 12)]
            assert shuffle or drawn == [10, 11, *range(2, 10)]

    def test_drop_last_omits_the_short_batch(self, device):
        sampler = SamplerWithoutReplacement(drop_last=True)
        rb = ReplayBuffer(storage=LazyTensorStorage(10, device=device), sampler=sampler, batch_size=4)
        rb.extend(rows(0, 10))
        found = list(itertools.chain(*(numbers(batch) for batch in rb)))
        assert len(found) == len(set(found)) == 8

    def test_consuming_sampler_uses_each_record_once(self, device):
        sampler = ConsumingSampler(max_sample_count=2)
        rb = ReplayBuffer(storage=LazyTensorStorage(6, device=device), sampler=sampler)
        rb.extend(rows(0, 6, device))
        counts = Counter(numbers(rb.sample(6)) + numbers(rb.sample(6)))
        assert counts == dict.fromkeys(range(6), 2)
        with pytest.raises(EmptyBufferError):
            rb.sample(1)
        rb.extend(rows(6, 8, device))
        assert Counter(numbers(rb.sample(2)) + numbers(rb.sample(2))) == {6: 2, 7: 2}

    def test_staleness_sampler_prefers_newer_policies(self, device):
        sampler = StalenessAwareSampler(max_staleness=2)
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10, device=device), sampler=sampler, batch_size=3000
        )
        rb.extend(TensorDict({"policy_version": torch.arange(6, device=device)}, [6]))
        sampler.consumer_version = 5
        batch = rb.sample()
        counts = Counter(batch["policy_version"].tolist())
        assert torch.equal(batch["staleness"].cpu(), 5.0 - batch["policy_version"].cpu())
        assert set(counts) == {3, 4, 5}  # in proportion to 1/3, 1/2 and 1
        assert abs(counts[5] / 3000 - 6 / 11) < 0.05 and abs(counts[3] / 3000 - 2 / 11) < 0.05

    def test_samples_do_not_change_with_later_writes(self, device):
        rb = ReplayBuffer(storage=LazyTensorStorage(6, device=device), batch_size=8)
        rb.extend(rows(0, 6, device))
        batch, some = rb.sample(), rb.sample(keys=["x"])
        before, few, picked = numbers(batch), some["x"].tolist(), rb[[0, 5]]
        rb.extend(rows(20, 26, device))
        assert numbers(batch) == before and some["x"].tolist() == few and numbers(picked) == [0, 5]
        batch.zero_()
        assert numbers(rb[:]) == [*range(20, 26)]


PRIORITY = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25, 0.0])


class TestPriorities:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
    def test_weights_and_frequencies_follow_the_formula(self, device, place, dtype):
        rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(6, device=device))
        rb.set_seed(0)
        index = rb.extend(rows(0, 6, device))
        priority = torch.tensor([1.0, 2.0, 1.0, 4.0, 3.0, 8.0])
        rb.update_priority(index.to(place), priority.to(place, dtype))
        batch, info = rb.sample(20_000, return_info=True)
        slots = info["index"].cpu()
        torch.testing.assert_close(info["_weight"].cpu(), weights(priority, slots, 0.7, 0.5))
        assert torch.equal(info["_weight"].cpu(), info["priority_weight"].cpu())
        expected = (priority + 1e-8) ** 0.7
        share = torch.bincount(slots, minlength=6) / 20_000
        torch.testing.assert_close(share, expected / expected.sum(), atol=0.02, rtol=0)
        assert numbers(batch) == slots.tolist() and on(device, batch)

    def test_zero_priority_is_never_drawn_and_numbers_are_accepted(self, device, place):
        rb = PrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(6, device=device)
        )
        rb.extend(rows(0, 6, device))
        rb.update_priority(torch.arange(6, device=place), 0.0)
        rb.update_priority(
            torch.tensor([4, -1, 1], device=place), torch.tensor([1.0, 9.0, 3.0], device=place)
        )
        counts = Counter(numbers(rb.sample(4000)))
        assert set(counts) == {1, 4} and 2800 < counts[1] < 3200
        rb.mark_update(torch.tensor([1, 4], device=place))

    def test_batches_update_priorities_by_their_errors(self, device, place):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=LazyTensorStorage(6, device=device), batch_size=64, seed=0
        )
        rb.extend(rows(0, 6, device))
        batch = rb.sample()
        assert on(device, batch) and batch["_weight"].tolist() == [1.0] * 64
        assert set(batch["index"].tolist()) == set(range(6))
        assert numbers(rb[batch["index"]]) == numbers(batch) == batch["index"].tolist()
        batch["td_error"] = PRIORITY.to(device)[batch["x"]]
        rb.update_tensordict_priority(batch.to(place))
        again = rb.sample()
        expected = weights(PRIORITY, again["index"].cpu(), 0.6, 0.4)
        torch.testing.assert_close(again["_weight"].cpu(), expected)
        assert rb.stats().priorities_dropped == 0

    def test_late_errors_are_dropped(self, device, place):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(4, device=device), batch_size=64, seed=0
        )
        rb.extend(rows(0, 4, device))
        batch = rb.sample()
        batch["td_error"] = torch.full((64,), 5.0, device=device)
        rb.extend(rows(4, 6, device))  # writes to slots 0 and 1
        rb.update_tensordict_priority(batch.to(place))
        assert rb.stats().priorities_dropped == int((batch["index"] < 2).sum())

    def test_errors_of_several_values_are_reduced(self, device, place):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            reduction="max",
            storage=LazyTensorStorage(3, device=device),
            batch_size=32,
            seed=0,
        )
        rb.extend(rows(0, 3, device))
        batch = rb.sample()
        batch["td_error"] = torch.stack([batch["x"] + 1.0, torch.zeros_like(batch["x"])], -1)
        rb.update_tensordict_priority(batch.to(place))
        again = rb.sample()
        expected = weights(torch.tensor([1.0, 2.0, 3.0]), again["index"].cpu(), 1.0, 1.0)
        torch.testing.assert_close(again["_weight"].cpu(), expected)

    def test_priorities_may_come_with_records(self, device, place):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(4, device=device), batch_size=32, seed=0
        )
        rb.extend(rows(0, 2, place).set("td_error", torch.tensor([2.0, 4.0], device=place)))
        rb.add(rows(2, 3, place)[0].set("td_error", torch.tensor(8.0, device=place)))
        batch = rb.sample()
        expected = weights(torch.tensor([2.0, 4.0, 8.0]), batch["index"].cpu(), 1.0, 1.0)
        torch.testing.assert_close(batch["_weight"].cpu(), expected)

    def test_priorities_of_two_dimensional_storages_are_updated(self, device, place):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(6, device=device, ndim=2),
            sampler=PrioritizedSampler(6, alpha=1.0, beta=1.0),
            batch_size=64,
        )
        index = rb.extend(rows(0, 6, device).view(2, 3))
        priority = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
        rb.update_priority(index.to(place), priority.to(place))
        batch = rb.sample()
        time, stream = batch["index"].cpu().unbind(-1)
        assert numbers(batch) == (stream * 3 + time).tolist()
        expected = weights(priority, time * 2 + stream, 1.0, 1.0)
        torch.testing.assert_close(batch["_weight"].cpu(), expected)
        batch["td_error"] = torch.ones(64, device=device)
        rb.update_tensordict_priority(batch.to(place))

    def test_invalid_priorities_are_refused(self, device, place):
        rb = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4, device=device))
        index = rb.extend(rows(0, 2, device))
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="position 1"):
                rb.update_priority(index, torch.tensor([1.0, bad], device=place))
