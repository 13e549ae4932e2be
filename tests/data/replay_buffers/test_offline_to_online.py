"""A data set and a growing buffer are sampled in a fixed proportion."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from gleanrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)


def rows(value, count=5):
    return TensorDict({"x": torch.full((count,), float(value))}, [count])


def dataset(kind=ReplayBuffer, **options):
    buffer = kind(storage=LazyTensorStorage(50), **options)
    buffer.extend(rows(0, 50))
    return buffer


def test_every_batch_has_its_part_of_the_data_set():
    buffer = OfflineToOnlineReplayBuffer(
        dataset(batch_size=8), online_capacity=20, offline_fraction=0.3, batch_size=10
    )
    assert (buffer.sample()["x"] == 0).all(), "nothing is online yet"
    buffer.extend(rows(1))
    assert len(buffer) == 55 and len(buffer.online_buffer) == 5 and len(buffer.offline_buffer) == 50
    for size, zeros in ((None, 3), (10, 3), (7, 2), (1, 0)):
        assert buffer.sample(size)["x"].tolist() == [0.0] * zeros + [1.0] * ((size or 10) - zeros)
    for step, fraction, ones in ((0, 0.3, 7), (5, 0.15, 8), (10, 0.0, 10), (12, 0.0, 10), (0, 0.3, 7)):
        buffer.anneal(step, 10)
        assert buffer.offline_fraction == pytest.approx(fraction)
        assert buffer.sample()["x"].sum() == ones


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_both_carry_the_same_entries(kind):
    buffer = OfflineToOnlineReplayBuffer(
        dataset(kind),
        online_storage=LazyTensorStorage(9),
        batch_size=4,
        transform=lambda td: td.set("y", td["x"] + 1),
    )
    buffer.extend(rows(1))
    batch = buffer.sample()
    assert batch["y"].tolist() == [1, 1, 2, 2]
    assert ("index" in batch.keys()) == (kind is TensorDictReplayBuffer)
    assert type(buffer.online_buffer) is kind


def test_records_that_are_tensors_or_trees():
    offline = ReplayBuffer(storage=ListStorage(5))
    offline.extend((torch.zeros(5), torch.zeros(5, 2)))
    buffer = OfflineToOnlineReplayBuffer(offline, online_storage=ListStorage(5), batch_size=4)
    buffer.extend((torch.ones(5), torch.ones(5, 2)))
    one, two = buffer.sample()
    assert one.tolist() == [0, 0, 1, 1] and two.shape == (4, 2)


def test_compact_buffers_serve_the_batches_of_plain_ones():
    def steps(first, count):
        t = torch.arange(first, first + count)
        done = (t % 7 == 6)[:, None]
        root = t[:, None].float().expand(count, 4)
        after = {"x": torch.where(done, -root, root + 1), "done": done}
        return TensorDict({"x": root.clone(), "next": after}, [count])

    def made(compact):
        storages = [LazyTensorStorage(size, compact=compact) for size in (50, 20)]
        offline = ReplayBuffer(storage=storages[0], seed=1)
        offline.extend(steps(1000, 50))
        buffer = OfflineToOnlineReplayBuffer(offline, online_storage=storages[1], batch_size=16)
        buffer.online_buffer.set_seed(2)
        return buffer, storages

    (plain, _), (compact, storages) = made(False), made(True)
    for first in range(0, 60, 6):
        for buffer in (plain, compact):
            buffer.extend(steps(first, 6))
        for _ in range(3):
            batch = plain.sample()
            again = compact.sample()
            assert torch.equal(batch["x"], again["x"]) and torch.equal(batch["next", "x"], again["next", "x"])
            assert (batch["x"][:8] >= 1000).all() and (batch["x"][8:] < 1000).all()
    assert "8 of 50 outcomes stored apart" in repr(storages[0])
    assert "4 of 20 outcomes stored apart" in repr(storages[1])


def test_a_data_set_of_another_library():
    class Rows:
        def __len__(self):
            return 3

        def sample(self, batch_size):
            return rows(2, batch_size)

    buffer = OfflineToOnlineReplayBuffer(Rows(), online_capacity=4)
    buffer.extend(rows(1, 2))
    assert buffer.sample(4)["x"].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("method", ["stats", "describe", "episodes", "verify"])
def test_both_buffers_are_inspected_in_order(method):
    steps = TensorDict({"next": {"done": torch.tensor([[False], [True]])}}, [2])
    offline = ReplayBuffer(storage=LazyTensorStorage(4))
    offline.extend(steps)
    buffer = OfflineToOnlineReplayBuffer(offline, online_capacity=6)
    buffer.extend(torch.cat([steps, steps]))
    found = getattr(buffer, method)()
    assert [repr(one) for one in found] == [
        repr(getattr(one, method)()) for one in (offline, buffer.online_buffer)
    ]
    assert repr(found[0]) != repr(found[1])


@pytest.mark.parametrize("method", ["stats", "describe", "episodes", "verify"])
def test_a_data_set_without_the_method_is_named(method):
    class Rows:
        __len__ = sample = dataset().sample

    buffer = OfflineToOnlineReplayBuffer(Rows(), online_capacity=4)
    with pytest.raises(UnsupportedError, match=rf"^{method}: .* got a Rows; .*online_buffer.{method}\(\)"):
        getattr(buffer, method)()


OTHER = TensorDict({"y": torch.ones(2)}, [2])


def test_other_keys_are_reported_when_the_buffer_is_made():
    storage = LazyTensorStorage(4)
    ReplayBuffer(storage=storage).extend(OTHER)
    with pytest.raises(SchemaError, match=r"offline_dataset: .* have \['x'\], and only .* have \['y'\]"):
        OfflineToOnlineReplayBuffer(dataset(), online_storage=storage)


def test_a_data_set_with_priorities_serves_batches_until_online_rows_have_no_weights():
    offline = dataset(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    buffer = OfflineToOnlineReplayBuffer(offline, online_capacity=4)
    assert buffer.sample(4)["x"].tolist() == [0, 0, 0, 0]
    buffer.extend(rows(1, 2))
    with pytest.raises(SchemaError, match="sample: only the data set's records have .*_weight"):
        buffer.sample(4)


def test_records_of_different_sizes_are_served():
    def records(value):
        return lazy_stack([TensorDict({"x": torch.full((size,), float(value))}, []) for size in (1, 2, 3)])

    offline = ReplayBuffer(storage=LazyStackStorage(5))
    offline.extend(records(0))
    buffer = OfflineToOnlineReplayBuffer(offline, online_storage=LazyStackStorage(5))
    buffer.extend(records(1))
    assert [float(row["x"][0]) for row in buffer.sample(6)] == [0, 0, 0, 1, 1, 1]


def test_other_keys_are_reported_at_the_first_write_and_nothing_is_written():
    buffer = OfflineToOnlineReplayBuffer(dataset(TensorDictReplayBuffer), online_capacity=4)
    with pytest.raises(SchemaError, match=r"extend: .* have \['x'\], and only .* have \['y'\]"):
        buffer.extend(OTHER)
    assert not len(buffer.online_buffer)
    buffer.extend(buffer.sample(2))
    assert len(buffer.online_buffer) == 2, "a batch may be written again, with the entries of batches"


def test_records_that_differ_are_reported_at_the_latest_by_a_sample():
    drop = dataset(transform=lambda batch: batch.rename_key_("x", "y"))
    buffer = OfflineToOnlineReplayBuffer(drop, online_capacity=4)
    buffer.extend(OTHER)
    assert buffer.sample(4)["y"].tolist() == [0, 0, 1, 1], "transforms may make the keys equal"
    for data, message in (
        (
            [(torch.ones(1),)],
            r"differ: a TensorDict with the keys \['x'\] and a tuple of \(a tensor \(2, 1\)\)",
        ),
        (TensorDict({"x": torch.ones(2, 3)}, [2]), r"'x' has shape \(\) .*, and \(3,\) in the online"),
    ):
        listed = isinstance(data, list)
        online = ListStorage(4) if listed else LazyTensorStorage(4)
        buffer = OfflineToOnlineReplayBuffer(dataset(), online_storage=online)
        buffer.extend(data)
        with pytest.raises(SchemaError, match=message) as caught:
            buffer.sample(4)
        assert caught.value.__cause__ is None and "fields={" not in str(caught.value)


def test_invalid_options_are_refused():
    offline = dataset()
    for fraction in (0.0, 1.0, -1, 2):
        with pytest.raises(InvalidArgumentError, match="offline_fraction"):
            OfflineToOnlineReplayBuffer(offline, online_capacity=4, offline_fraction=fraction)
    for options in ({}, {"online_capacity": 4, "online_storage": LazyTensorStorage(4)}):
        with pytest.raises(InvalidArgumentError, match="expected one of them, got"):
            OfflineToOnlineReplayBuffer(offline, **options)
    with pytest.raises(UnsupportedError, match="got the name"):
        OfflineToOnlineReplayBuffer("minari:door/human-v2", online_capacity=4, batch_size=2)
    with pytest.raises(InvalidTypeError, match=r"unexpected arguments \['root'\]"):
        OfflineToOnlineReplayBuffer(offline, online_capacity=4, root="x")
    with pytest.raises(InvalidTypeError, match="expected a buffer"):
        OfflineToOnlineReplayBuffer([1, 2], online_capacity=4)
    buffer = OfflineToOnlineReplayBuffer(offline, online_capacity=4)
    with pytest.raises(UnsupportedError, match="no batch_size"):
        buffer.sample()
    for wrong in ((-1, 10), (0, 0)):
        with pytest.raises(InvalidArgumentError):
            buffer.anneal(*wrong)
    with pytest.raises(EmptyBufferError):
        OfflineToOnlineReplayBuffer(ReplayBuffer(), online_capacity=4).sample(2)
