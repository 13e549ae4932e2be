"""Buffers of TensorDicts add entries to samples, exclude entries from writes, and read priorities by key."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import GleanError
from tests.contract.buffers.priorities import Oracle, close
from tests.contract.buffers.tape import ADDED, Tape, chi_square

TAPE = Tape((5, 3))


def make(
    kind: str = "TensorDictPrioritizedReplayBuffer", ndim: int = 1, size: int = 12, **kwargs: Any
) -> Any:
    if "Prioritized" in kind:
        kwargs = {"alpha": 0.6, "beta": 0.4, **kwargs}
    return getattr(parts, kind)(
        storage=parts.LazyTensorStorage(size, ndim=ndim), **{"batch_size": 64, "seed": 0, **kwargs}
    )


def rows(count: int = 8, **columns: torch.Tensor) -> TensorDict:
    return TAPE.rows(0, count).update(columns)


def check(buffer: Any, oracle: Oracle, batches: int = 60) -> None:
    """Check draws by chi-square, and check the weights in the samples."""
    counts: Counter[int] = Counter()
    for _ in range(batches):
        batch = buffer.sample()
        slots = batch["index"].reshape(-1).tolist()
        close(batch["_weight"].reshape(-1), oracle.weights(slots))
        counts.update(slots)
    chi_square([counts[slot] for slot in oracle.raw], [oracle.probability(slot) for slot in oracle.raw])


def test_sample_carries_index_generation_and_weights() -> None:
    buffer = make()
    buffer.extend(rows())
    batch = buffer.sample()
    assert set(batch.keys()) == {*rows().keys(), *ADDED}
    assert batch["index"].dtype == batch["_generation"].dtype == torch.int64
    assert batch["_weight"].dtype == torch.float32
    assert {batch[key].shape[0] for key in ADDED} == {64}
    assert batch["_weight"].data_ptr() == batch["priority_weight"].data_ptr()
    assert batch["index"].tolist() == TAPE.check(batch)[1].tolist()


def test_without_priorities_only_the_index_is_needed() -> None:
    buffer = make("TensorDictReplayBuffer")
    buffer.extend(rows())
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["index"], info["index"])
    assert "_weight" not in batch.keys() and "priority_weight" not in batch.keys()


def test_plain_buffers_add_nothing() -> None:
    for sampler in (None, parts.PrioritizedSampler(max_capacity=12, alpha=0.6, beta=0.4)):
        buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(12), sampler=sampler, batch_size=4)
        buffer.extend(rows())
        batch, info = buffer.sample(return_info=True)
        assert set(batch.keys()) == set(rows().keys())
        assert {"index", "generation"} <= set(info)


def test_prioritized_preset_samples_by_priority() -> None:
    buffer = parts.PrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=parts.LazyTensorStorage(12), batch_size=32
    )
    buffer.extend(rows())
    buffer.update_priority(torch.arange(8), torch.arange(1.0, 9.0))
    oracle = Oracle(0.7, 0.9)
    oracle.write(list(range(8)))
    oracle.update(list(range(8)), [float(i) for i in range(1, 9)])
    for _ in range(5):
        batch, info = buffer.sample(return_info=True)
        assert set(batch.keys()) == set(rows().keys())
        close(info["_weight"], oracle.weights(info["index"].tolist()))


@pytest.mark.parametrize("kind", ["TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer"])
def test_keys_added_to_samples_are_left_out_of_writes(kind: str) -> None:
    buffer = make(kind)
    buffer.extend(rows())
    batch = buffer.sample()
    before = set(batch.keys(True))
    buffer.extend(batch[:3])
    assert set(batch.keys(True)) == before
    other = make(kind)
    other.extend(batch[:3])
    for one in (buffer, other):
        again = one.sample()
        TAPE.check(again)
        assert set(again.keys()) == set(batch.keys())


def test_extend_does_not_write_into_its_input() -> None:
    buffer, data = make(), rows()
    before = data.clone()
    buffer.extend(data)
    buffer.add(data[0])
    assert set(data.keys(True)) == set(before.keys(True)) and (data == before).all()


@pytest.mark.parametrize("data", [torch.zeros(3), {"a": torch.zeros(3)}, (torch.zeros(3),), 5])
def test_values_other_than_tensordicts_raise(data: Any) -> None:
    buffer = make()
    with pytest.raises(ValueError):
        buffer.extend(data)
    assert len(buffer) == 0


class TestPriorityKey:
    """`update_tensordict_priority` reads `priority_key` from a sample."""

    def test_update_sets_the_priorities_of_a_sample(self) -> None:
        buffer, oracle = make(), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        for _ in range(20):
            batch = buffer.sample()
            values = 0.1 + (batch["index"] * 7 % 5).float()
            batch["td_error"] = values
            buffer.update_tensordict_priority(batch)
            oracle.update(batch["index"].tolist(), values.tolist())
        check(buffer, oracle)

    def test_update_reads_another_priority_key(self) -> None:
        buffer, oracle = make(priority_key=("loss", "error")), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        batch = buffer.sample()
        batch["loss", "error"] = 1.0 + batch["index"].float()
        buffer.update_tensordict_priority(batch)
        oracle.update(batch["index"].tolist(), (1.0 + batch["index"].float()).tolist())
        check(buffer, oracle)

    @pytest.mark.parametrize(
        ("reduction", "value"), [("max", 6.0), ("min", 1.0), ("mean", 3.0), ("median", 2.0)]
    )
    @pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
    def test_several_values_of_a_record_are_reduced(
        self, reduction: str, value: float, shape: tuple[int, ...]
    ) -> None:
        buffer, oracle = make(reduction=reduction), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        batch = buffer.sample()
        batch["td_error"] = torch.tensor([2.0, 6.0, 1.0]).reshape(shape).expand(64, *shape).clone()
        batch["td_error"][batch["index"] == 3] = 1.5
        buffer.update_tensordict_priority(batch)
        slots = batch["index"].tolist()
        oracle.update(slots, [1.5 if slot == 3 else value for slot in slots])
        check(buffer, oracle)

    def test_update_accepts_a_column_of_values(self) -> None:
        buffer, oracle = make(), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        batch = buffer.sample()
        batch["td_error"] = (1.0 + batch["index"].float())[:, None]
        buffer.update_tensordict_priority(batch)
        oracle.update(batch["index"].tolist(), (1.0 + batch["index"].float()).tolist())
        check(buffer, oracle)

    def test_a_missing_key_means_the_default(self) -> None:
        buffer, oracle = make(), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        buffer.update_priority(torch.arange(8), torch.tensor([5.0, 1, 1, 1, 1, 1, 1, 1]))
        oracle.update(list(range(8)), [5.0, 1, 1, 1, 1, 1, 1, 1])
        batch = buffer.sample()
        buffer.update_tensordict_priority(batch)
        oracle.update(batch["index"].tolist(), [5.0] * 64)
        check(buffer, oracle)

    def test_a_late_update_is_dropped(self) -> None:
        buffer, oracle = make(size=8), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        batch = buffer.sample()
        buffer.extend(TAPE.rows(8, 10))
        buffer.sample()
        batch["td_error"] = torch.full((64,), 3.0)
        buffer.update_tensordict_priority(batch)
        late = batch["index"] < 2
        fresh = batch["index"][~late].tolist()
        oracle.update(fresh, [3.0] * len(fresh))
        assert int(late.sum()) and buffer.stats().priorities_dropped == int(late.sum())
        check(buffer, oracle)

    def test_update_accepts_a_part_of_a_batch(self) -> None:
        buffer, oracle = make(), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        part = buffer.sample()[10:20]
        part["td_error"] = torch.full((10,), 3.0)
        buffer.update_tensordict_priority(part)
        oracle.update(part["index"].tolist(), [3.0] * 10)
        check(buffer, oracle)

    def test_update_without_priorities_does_nothing(self) -> None:
        buffer = make("TensorDictReplayBuffer")
        buffer.extend(rows())
        batch = buffer.sample()
        batch["td_error"] = torch.ones(64)
        buffer.update_tensordict_priority(batch)

    def test_add_takes_the_priority_of_its_record(self) -> None:
        buffer, oracle = make(), Oracle()
        for place, value in enumerate([1.0, 4.0, 0.5]):
            buffer.add(rows(1, td_error=torch.tensor([value]))[0])
            oracle.write([place])
            oracle.update([place], [value])
        check(buffer, oracle)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
    def test_bad_values_raise_and_change_nothing(self, bad: float) -> None:
        buffer, oracle = make(), Oracle()
        buffer.extend(rows())
        oracle.write(list(range(8)))
        batch = buffer.sample()
        batch["td_error"] = torch.ones(64)
        batch["td_error"][7] = bad
        with pytest.raises(ValueError) as caught:
            buffer.update_tensordict_priority(batch)
        assert isinstance(caught.value, GleanError)
        check(buffer, oracle)

    def test_batch_without_an_index_raises(self) -> None:
        buffer = make()
        buffer.extend(rows())
        batch = buffer.sample().exclude("index")
        batch["td_error"] = torch.ones(64)
        with pytest.raises(KeyError, match="index"):
            buffer.update_tensordict_priority(batch)


def test_update_accepts_coordinates_of_two_dimensions() -> None:
    tape = Tape((5, 3), (3,))
    buffer, oracle = make(ndim=2, size=15), Oracle()
    buffer.extend(tape.rows(0, 5))
    oracle.write(list(range(15)))
    batch = buffer.sample()
    assert batch["index"].shape == (64, 2)
    slots = batch["index"][:, 0] * 3 + batch["index"][:, 1]
    batch["td_error"] = 1.0 + slots.float()
    buffer.update_tensordict_priority(batch)
    oracle.update(slots.tolist(), (1.0 + slots.float()).tolist())
    counts: Counter[int] = Counter()
    for _ in range(60):
        batch = buffer.sample()
        stream, t = tape.check(batch)
        slots = (batch["index"][:, 0] * 3 + batch["index"][:, 1]).tolist()
        assert slots == (t * 3 + stream).tolist()
        close(batch["_weight"].reshape(-1), oracle.weights(slots))
        counts.update(slots)
    chi_square([counts[slot] for slot in oracle.raw], [oracle.probability(slot) for slot in oracle.raw])


def test_a_transform_that_reshapes_the_batch() -> None:
    buffer = make("TensorDictReplayBuffer", transform=lambda batch: batch.reshape(8, 8))
    buffer.extend(rows())
    try:
        batch = buffer.sample()
    except RuntimeError as error:
        assert isinstance(error, GleanError)
    else:
        assert batch["index"].shape == (8, 8)


def test_prioritized_slices_are_updated_by_key() -> None:
    sampler = parts.PrioritizedSliceSampler(max_capacity=30, alpha=0.6, beta=0.4, slice_len=3)
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(30), sampler=sampler, batch_size=300, seed=0
    )
    tape = Tape((10,))
    buffer.extend(tape.rows(0, 30))
    buffer.update_priority(torch.arange(30), torch.where(torch.arange(30) == 14, 1.0, 1e-12))
    batch = buffer.sample()
    assert set(batch["index"].tolist()) == {14, 15, 16}
    weight = batch["_weight"].view(-1, 3)
    assert (weight == weight[:, :1]).all()
