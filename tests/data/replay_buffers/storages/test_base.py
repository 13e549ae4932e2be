"""Lengths, generations and the log of changes, seen on tensor and list storages."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gleanrl.data.replay_buffers import LazyTensorStorage, ListStorage, RoundRobinWriter, Storage
from gleanrl.data.replay_buffers.versions import Version, touched
from gleanrl.errors import IndexRangeError, InvalidArgumentError, SchemaError

CAPACITY = 7


class RingMachine(RuleBasedStateMachine):
    """A storage and a ring writer against plain lists of values and write counts."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = self.make()
        self.writer = RoundRobinWriter()
        self.writer.register_storage(self.storage)
        self.values: list[int] = []
        self.counts = [0] * CAPACITY
        self.cursor = 0
        self.clock = 0
        self.seen: list[tuple[Version, list[int]]] = [(self.storage.version, list(self.counts))]

    def make(self) -> Storage:
        return LazyTensorStorage(CAPACITY)

    def fresh(self, count: int) -> list[int]:
        self.clock += count
        return list(range(self.clock - count, self.clock))

    def batch(self, values: list[int]) -> object:
        return torch.tensor(values, dtype=torch.int64)

    @rule(count=st.integers(1, 2 * CAPACITY + 1))
    def write(self, count: int) -> None:
        values = self.fresh(count)
        prepared = self.storage.prepare(self.batch(values), single=False, dim_extend=0, where="test")
        placement = self.writer.place(prepared)
        self.storage.write(prepared, placement)
        skipped = max(count - CAPACITY, 0)
        for position, value in enumerate(values):
            if self.cursor == len(self.values):
                self.values.append(value)
            else:
                self.values[self.cursor] = value
            # Of a write longer than the ring only the part that stays is copied, and counted.
            self.counts[self.cursor] += position >= skipped
            self.cursor = (self.cursor + 1) % CAPACITY

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, len(self.values) - 1), min_size=1, max_size=9))
        values = self.fresh(len(slots))
        prepared = self.storage.prepare_selection(self.batch(values), torch.Size([len(slots)]), "test")
        self.storage.write_slots(prepared, torch.tensor(slots))
        for slot, value in zip(slots, values, strict=True):
            self.values[slot] = value
            self.counts[slot] += 1

    @rule(data=st.data(), count=st.integers(1, CAPACITY))
    def set(self, data: st.DataObject, count: int) -> None:
        """Write past the writer: appended steps move the cursor, corrections don't."""
        start = data.draw(st.integers(0, min(len(self.values), CAPACITY - count)))
        values = self.fresh(count)
        before = len(self.values)
        self.storage.set(start, self.batch(values))
        self.values[start : start + count] = values
        for slot in range(start, start + count):
            self.counts[slot] += 1
        if len(self.values) > before:
            self.cursor = len(self.values) % CAPACITY

    @rule()
    def clear(self) -> None:
        self.storage.clear()
        for slot in range(len(self.values)):
            self.counts[slot] += 1
        self.values, self.cursor = [], 0

    @rule()
    def remember(self) -> None:
        self.seen.append((self.storage.version, list(self.counts)))

    @rule()
    def reload(self) -> None:
        state = self.storage.state_dict()
        if not self.values:
            return
        before = list(self.counts)
        self.storage.load_state_dict(state)
        generations = self.storage.generation(torch.arange(len(self.values))).tolist()
        assert all(new > old for new, old in zip(generations, before, strict=False)), (
            "a generation came again"
        )
        self.counts[: len(generations)] = generations

    @invariant()
    def contents_and_counts_agree(self) -> None:
        assert len(self.storage) == len(self.values)
        assert self.writer.cursor == self.storage.end == self.cursor
        assert self.storage.generation(torch.arange(CAPACITY)).tolist() == self.counts
        slots = torch.arange(len(self.values))
        if self.values:
            assert torch.as_tensor(self.storage.fetch(slots)).tolist() == self.values
        for version, counts in self.seen:
            changed = torch.tensor([new != old for new, old in zip(self.counts, counts, strict=True)])
            stale = touched(torch.arange(CAPACITY), self.storage.changed_since(version))
            assert not bool((changed & ~stale).any()), "a change went unnoticed"
        self.storage.check_valid()
        self.writer.check_valid()


class ListMachine(RingMachine):
    def make(self) -> Storage:
        return ListStorage(CAPACITY)

    def batch(self, values: list[int]) -> object:
        return values


TestTensorRing = RingMachine.TestCase
TestListRing = ListMachine.TestCase
TestTensorRing.settings = TestListRing.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)


def test_staleness_is_exact_for_recent_ring_writes():
    storage = LazyTensorStorage(10)
    storage.set(0, torch.arange(10))
    since = storage.version

    def stale(slots, since):
        return touched(slots, storage.changed_since(since))

    slots = torch.tensor([9, 3, 4, 4])
    assert stale(slots, since).tolist() == [False] * 4
    storage.set(3, torch.arange(1))
    assert stale(slots, since).tolist() == [False, True, False, False]
    storage.set(8, torch.arange(2))
    assert stale(slots, since).tolist() == [True, True, False, False]
    for _ in range(1100):
        storage.set(0, torch.arange(1))
    assert stale(slots, since).tolist() == [True] * 4, "too long ago to know"


def test_set_leaves_no_gap_and_stays_inside():
    storage = LazyTensorStorage(5)
    storage.set(0, torch.arange(3))
    for start, count in [(4, 1), (-1, 1), (3, 3)]:
        with pytest.raises(IndexRangeError, match="set: steps"):
            storage.set(start, torch.arange(count))
    assert storage.get(slice(None)).tolist() == [0, 1, 2]
    storage.set(1, torch.arange(10, 14))
    assert storage.get(slice(None)).tolist() == [0, 10, 11, 12, 13]


@pytest.mark.parametrize("size", [0, -3, 1.5, None, True])
def test_bad_sizes_are_refused(size):
    with pytest.raises(InvalidArgumentError, match="max_size: expected an integer of 1 or more"):
        LazyTensorStorage(size)
    with pytest.raises(InvalidArgumentError, match="ndim"):
        LazyTensorStorage(3, ndim=size)


def test_generations_cost_eight_bytes_a_row_and_only_where_used():
    storage = ListStorage(10_000_000)
    storage.set(0, [1])
    assert storage.generation(torch.tensor([0, 9_999_999])).tolist() == [1, 0]


@pytest.mark.parametrize("state", [{}, {"max_size": 3}, None])
def test_the_size_of_a_broken_state(state):
    with pytest.raises(SchemaError, match="load_state_dict"):
        Storage.steps_in(state)


def test_the_size_of_a_state():
    state = {"max_size": 100, "batch_shape": [3], "num_steps": 4, "end": 4, "rows_written": 12}
    assert Storage.steps_in(state) == (4, 34)
    for change in ({"end": 3}, {"end": -1}, {"end": 34, "num_steps": 34}, {"end": "x"}):
        with pytest.raises(SchemaError, match="load_state_dict"):
            Storage.steps_in({**state, **change})


def test_the_end_leaves_no_gap():
    storage = LazyTensorStorage(5)
    for step in (1, -1, 5):
        with pytest.raises(IndexRangeError, match="end: expected a step"):
            storage.end = step
    storage.set(0, torch.arange(5))
    storage.end = 3
    assert storage.end == 3


def test_each_content_is_another_that_knows_what_it_is_a_copy_of():
    storage = ListStorage(5)
    first = storage.version
    storage.set(0, [1, 2])
    assert storage.version == Version(first.content, 2) and storage.origin is None
    second = storage.version
    state = storage.state_dict()
    storage.clear()
    third = storage.version
    storage.load_state_dict(state)
    assert len({first.content, third.content, storage.version.content}) == 3
    assert storage.origin == second
    loaded = storage.version
    for made in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert made.version.content != loaded.content and made.origin == loaded
