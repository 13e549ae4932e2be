"""Preset buffers have the documented components, priorities and added keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from gleanrl.data.replay_buffers.presets import copies_at_once
from gleanrl.errors import (
    GleanError,
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
)

ADDED = {"index", "_weight", "priority_weight", "_generation"}


def rows(count: int, **more: Any) -> TensorDict:
    return TensorDict({"x": torch.arange(count), **more}, [count])


def prioritized(capacity: int = 10, ndim: int = 1, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    given = {"alpha": 1.0, "beta": 1.0, "eps": 0.0, "batch_size": 8, "seed": 0, **options}
    return TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim), **given)


def raw(buffer: Any) -> list[float]:
    buffer.sampler._priorities.sync(buffer.storage)
    return buffer.sampler._priorities.state_dict()["raw"].tolist()


@pytest.mark.parametrize("make", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_prioritized_presets_pass_their_options_on(make):
    buffer = make(
        alpha=0.7, beta=0.3, eps=0.5, dtype=torch.float64, storage=LazyTensorStorage(17), batch_size=3, seed=5
    )
    sampler = buffer.sampler
    assert type(sampler) is PrioritizedSampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.7, 0.3, 0.5)
    assert sampler._priorities.dtype == torch.float64 and sampler.max_size == 17
    buffer.extend(rows(5))
    twin = make(alpha=0.7, beta=0.3, storage=LazyTensorStorage(17), batch_size=3, seed=5)
    twin.extend(rows(5))
    assert torch.equal(buffer.sample()["x"], twin.sample()["x"])
    assert isinstance(make(alpha=1.0, beta=1.0).storage, ListStorage)


def test_presets_refuse_invalid_options():
    for make in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        with pytest.raises(GleanError, match="storage"):
            make(alpha=1.0, beta=1.0, storage=5)
        with pytest.raises(InvalidArgumentError, match="alpha"):
            make(alpha=-1.0, beta=1.0)
    with pytest.raises(InvalidArgumentError, match="creates its own PrioritizedSampler"):
        prioritized(sampler=RandomSampler())
    with pytest.raises(InvalidArgumentError, match="reduction"):
        prioritized(reduction="avg")


def test_default_writer_of_tensordict_buffers_is_the_tensordict_ring():
    assert type(TensorDictReplayBuffer().writer) is TensorDictRoundRobinWriter
    given = RoundRobinWriter()
    assert TensorDictReplayBuffer(writer=given).writer is given


@pytest.mark.parametrize("data", [torch.zeros(3), {"x": torch.zeros(3)}, [1, 2], [rows(1)[0], 2], None])
def test_values_other_than_tensordicts_raise(data):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    for call in (buffer.add, buffer.extend):
        with pytest.raises(GleanError, match="expected a TensorDict"):
            call(data)
    assert len(buffer) == 0 and not buffer.storage.initialized


def test_lists_of_tensordicts_are_written():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    assert buffer.extend([rows(2)[1], rows(2)[0]]).tolist() == [0, 1] and buffer["x"].tolist() == [1, 0]


def test_batches_carry_index_generation_and_weights():
    buffer = prioritized()
    written = rows(6)
    buffer.extend(written)
    batch, info = buffer.sample(return_info=True)
    assert set(batch.keys()) == {"x", *ADDED} and set(written.keys()) == {"x"}
    assert torch.equal(batch["index"], info["index"]) and torch.equal(batch["x"], batch["index"])
    assert (
        torch.equal(batch["_generation"], info["generation"]) and batch["_weight"] is batch["priority_weight"]
    )
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
    plain.extend(rows(3))
    assert set(plain.sample().keys()) == {"x", "index"}


def test_index_holds_coordinates_of_several_dimensions():
    buffer = prioritized(12, ndim=2)
    buffer.extend(TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]))
    batch = buffer.sample()
    assert batch["index"].shape == (8, 2)
    assert torch.equal(batch["x"], batch["index"][:, 1] * 4 + batch["index"][:, 0])
    batch["td_error"] = 2.0 + batch["x"]
    buffer.update_tensordict_priority(batch)
    found = torch.tensor(raw(buffer)).view(4, 3).T.reshape(-1)
    assert all(found[x] == 2.0 + x for x in batch["x"].tolist())


@pytest.mark.parametrize("agents", [1, 2, 3])
def test_coordinates_of_records_with_additional_batch_dimensions(agents):
    buffer = prioritized(12, ndim=2)
    x = torch.arange(12).view(3, 4, 1).expand(3, 4, agents)
    buffer.extend(TensorDict({"x": x}, [3, 4, agents]))
    batch = buffer.sample()
    assert batch["index"].shape == (8, agents, 2) and batch["_weight"].shape == (8, agents)
    assert torch.equal(batch["x"], batch["index"][..., 1] * 4 + batch["index"][..., 0])


@pytest.mark.parametrize("ndim", [1, 2])
def test_add_takes_the_priority_that_a_record_brings(ndim):
    buffer = prioritized(12, ndim=ndim, priority_key=("deep", "p"))
    record = rows(1)[0] if ndim == 1 else rows(3)
    for value in (3.0, 5.0):
        record["deep"] = TensorDict({"p": torch.full((*record.batch_size, 1), value)}, record.batch_size)
        buffer.add(record)
    buffer.extend(buffer[:])
    count = 1 if ndim == 1 else 3
    assert raw(buffer) == ([3.0] * count + [5.0] * count) * 2, "extend takes them, too"


def test_a_refused_priority_of_a_record_that_is_added():
    buffer = prioritized()
    with pytest.raises(InvalidArgumentError):
        buffer.add(TensorDict({"x": torch.tensor(1), "td_error": torch.tensor(-1.0)}, []))
    assert TensorDictReplayBuffer(storage=LazyTensorStorage(3)).add(rows(1, td_error=torch.ones(1))[0]) == 0


@pytest.mark.parametrize(
    ("reduction", "expected"), [("max", 4.0), ("min", 1.0), ("sum", 7.0), ("median", 2.0), ("mean", 7 / 3)]
)
def test_several_priorities_of_a_record_are_reduced(reduction, expected):
    buffer = prioritized(dtype=torch.float64, reduction=reduction)
    buffer.extend(rows(2))
    batch = buffer.sample()
    batch["td_error"] = torch.tensor([1.0, 4.0, 2.0]).expand(8, 3)
    buffer.update_tensordict_priority(batch)
    assert raw(buffer) == pytest.approx([expected] * 2)


def test_without_the_entry_records_get_the_priority_of_new_ones():
    buffer = prioritized()
    buffer.extend(rows(4))
    buffer.update_priority(range(4), [1.0, 2.0, 0.0, 0.0])
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch[batch["x"] == 0])
    assert raw(buffer) == [2.0, 2.0, 0.0, 0.0]


def test_late_updates_go_by_the_generation_that_a_batch_carries():
    buffer = prioritized(4)
    buffer.extend(rows(4))
    batch = buffer.sample()
    buffer.extend(rows(2))
    buffer.sample()  # the new records are drawn now, and updates of the old batch are still late
    batch["td_error"] = torch.full((8,), 9.0)
    late = int((batch["index"] < 2).sum())
    buffer.update_tensordict_priority(batch)
    assert buffer.stats().priorities_dropped == late > 0
    timely = {slot for slot in batch["index"].tolist() if slot > 1}
    assert raw(buffer) == [9.0 if slot in timely else 1.0 for slot in range(4)] and timely


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"index": None}, MissingKeyError),
        ({"td_error": torch.full((8,), -1.0)}, InvalidArgumentError),
        ({"td_error": torch.full((8,), float("nan"))}, InvalidArgumentError),
        ({"td_error": torch.ones(8, dtype=torch.bool)}, (SchemaError, InvalidTypeError)),
    ],
)
def test_a_refused_update_changes_nothing(change, error):
    buffer = prioritized()
    buffer.extend(rows(4))
    buffer.update_priority(range(4), [1.0, 2.0, 3.0, 4.0])
    batch = buffer.sample()
    for key, value in change.items():
        batch = batch.exclude(key) if value is None else batch.set(key, value)
    with pytest.raises(error):
        buffer.update_tensordict_priority(batch)
    assert raw(buffer) == [1.0, 2.0, 3.0, 4.0]


def test_without_priorities_there_is_nothing_to_update():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.extend(rows(4))
    buffer.update_tensordict_priority(buffer.sample())
    buffer.update_tensordict_priority(rows(2))


def test_flags_of_slices_are_entries():
    sampler = SliceSampler(slice_len=2, traj_key="episode", seed=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
    buffer.extend(rows(6, episode=torch.tensor([0, 0, 0, 1, 1, 1])))
    batch = buffer.sample()
    assert batch["next", "truncated"].tolist() == [[False], [True]] * 2
    assert batch["next", "done"].tolist() == [[False], [True]] * 2 and not batch["next", "terminated"].any()
    buffer.extend(buffer[:])
    with pytest.raises(SchemaError, match="unexpected"):
        buffer.extend(batch)


def test_transform_sees_added_keys_and_may_drop_them():
    seen: list[set[str]] = []

    def drop(batch: TensorDict) -> TensorDict:
        seen.append(set(batch.keys()))
        return batch.exclude("index")

    buffer = prioritized(transform=drop)
    buffer.extend(rows(4))
    assert set(buffer.sample().keys()) == {"x", *ADDED} - {"index"} and seen == [{"x", *ADDED}]


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), 1e39])
def test_a_record_with_an_impossible_priority_isnt_added(value):
    buffer = prioritized()
    record = TensorDict({"x": torch.tensor(1), "td_error": torch.tensor(2.0, dtype=torch.float64)})
    buffer.add(record)
    with pytest.raises(InvalidArgumentError, match="expected finite priorities"):
        buffer.add(record.clone().fill_("td_error", value))
    assert len(buffer) == 1 and buffer.writer.cursor == 1 and raw(buffer) == [2.0]


def test_record_with_a_priority_of_another_size_is_not_added():
    buffer = prioritized(ndim=2)
    with pytest.raises(SchemaError, match="expected values for 2 records, got shape"):
        buffer.add(TensorDict({"x": torch.zeros(2), "td_error": torch.zeros(2, 0)}, [2]))
    assert len(buffer) == 0


def test_a_record_that_the_writer_left_out_needs_no_priority():
    writer = TensorDictMaxValueWriter(rank_key="x")
    buffer = prioritized(2, writer=writer)
    for x, error in ((5, 1.0), (6, 2.0), (1, 3.0)):
        index = buffer.add(TensorDict({"x": torch.tensor(x), "td_error": torch.tensor(error)}))
    assert index == -1 and raw(buffer) == [1.0, 2.0]


def test_update_of_no_records_changes_nothing():
    buffer = prioritized()
    buffer.extend(rows(3))
    none = buffer.sample()[:0]
    buffer.update_tensordict_priority(none.set("td_error", torch.zeros(0)))
    buffer.update_tensordict_priority(none.set("td_error", torch.zeros(0, 2)))
    batch = buffer.sample()
    with pytest.raises(SchemaError, match="expected values for 8 records, got shape"):
        buffer.update_tensordict_priority(batch.set("td_error", torch.zeros(8, 0)))
    assert raw(buffer) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("ndim", [1, 2])
def test_updates_for_records_that_were_forgotten_are_dropped(ndim):
    batch = (3,) * (ndim - 1)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(30, ndim=ndim), batch_size=8, seed=0
    )
    buffer.extend(TensorDict({"x": torch.zeros(*batch, 10)}, [*batch, 10]))
    late = buffer.sample()
    buffer.empty()
    buffer.extend(TensorDict({"x": torch.zeros(*batch, 2)}, [*batch, 2]))
    late["td_error"] = torch.full((8,), 9.0)
    buffer.update_tensordict_priority(late)
    assert buffer.stats().priorities_dropped == 8
    assert buffer.sampler.default_priority == 1.0
    with pytest.raises(IndexRangeError):
        buffer.update_priority(late["index"] + 100, torch.ones(8), late["_generation"])


def test_whether_extend_copies_at_once():
    class Own(ReplayBuffer):
        def extend(self, data, **options):
            return super().extend(data, **options)

    storage = {"storage": LazyTensorStorage(5)}
    assert copies_at_once(ReplayBuffer(storage=LazyTensorStorage(5)))
    assert copies_at_once(TensorDictReplayBuffer(**storage))
    assert not copies_at_once(ReplayBuffer())
    assert not copies_at_once(Own(storage=LazyTensorStorage(5)))
    assert not copies_at_once(ReplayBuffer(storage=LazyTensorStorage(5), transform=lambda batch: batch))
