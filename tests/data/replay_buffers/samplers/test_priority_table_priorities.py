"""The priorities of rows agree with a plain dictionary after any sequence of calls on a buffer."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gleanrl._arrays.results import Draw
from gleanrl.data.replay_buffers import LazyTensorStorage, PrioritizedReplayBuffer, PrioritizedSampler
from gleanrl.data.replay_buffers.samplers.priority_table import PriorityTable
from gleanrl.errors import EmptyBufferError, InvalidArgumentError, SchemaError, UnsupportedError
from tests.data.replay_buffers.oracle import fill
from tests.data.replay_buffers.samplers.acts import (
    CLEARS,
    COPIES,
    EXCHANGES,
    WRITES,
    Kind,
    acts,
    new_buffer,
    perform,
)


def table_of(capacity: int = 10, **options: Any) -> PriorityTable:
    given = {"alpha": 0.6, "beta": 0.4, "eps": 1e-8, "dtype": torch.float32, "within_buffer": False}
    return PriorityTable(capacity, **{**given, "normalize": "buffer", **options})


def filled(rows: int, capacity: int = 10) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity)
    fill(storage, torch.arange(rows))
    return storage


def raw(table: PriorityTable, storage: Any) -> list[float]:
    """Return the priority of every stored row in the table."""
    native = table.of(storage)
    table.check_valid()
    index, values = np.arange(native.capacity), np.full(native.capacity, -7.0)
    native.get(index.ctypes.data, len(index), values.ctypes.data)
    assert not values[len(storage) :].any(), "priorities behind what is stored"
    return values[: len(storage)].tolist()


def leaves(table: PriorityTable, storage: Any) -> list[float]:
    native = table.of(storage)
    index, values = np.arange(len(storage)), np.full(len(storage), -7.0)
    native.leaves(index.ctypes.data, len(index), values.ctypes.data)
    return values.tolist()


def update(table: PriorityTable, storage: Any, slots: list[int], values: Any, generation: Any = None) -> None:
    table.update(storage, torch.tensor(slots), values, generation)


class Model:
    """Raw priorities by slot, and the largest priority so far."""

    def __init__(self, within: bool) -> None:
        self.within, self.raw, self.seen = within, {}, None

    def enter(self, slots: list[int]) -> None:
        for slot in slots:
            self.raw.pop(slot, None)
        largest = max(self.raw.values(), default=0.0) or None if self.within else self.seen
        self.raw.update(dict.fromkeys(slots, 1.0 if largest is None else largest))

    def forget(self) -> None:
        self.raw, self.seen = {}, None


# "item" and "items" are separate acts, because they replace rows. "done" and "ids" change columns of existing rows.
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", [Kind(), Kind(batch=(3,))], ids=str)
@settings(max_examples=80, deadline=None)
@given(script=acts(*WRITES, *CLEARS, *EXCHANGES, *COPIES, "update", "mark", "draw", "alpha"))
def test_table_agrees_with_a_dictionary(kind, within, script):
    def make_sampler() -> PrioritizedSampler:
        size = kind.storage().max_size
        return PrioritizedSampler(size, 0.6, 0.4, max_priority_within_buffer=within, seed=0)

    model, alpha = Model(within), 0.6
    buffer = new_buffer(kind, make_sampler())
    for name, number in script:
        storage, before = buffer.storage, buffer.storage.generation
        held = before(torch.arange(len(storage)))
        if name == "update" and len(storage):
            slots = [number % len(storage), number // 5 % len(storage)]
            values = [float(number % 7), float(number % 4)]
            buffer.sampler.prioritize(storage, torch.tensor(slots), values, before(torch.tensor(slots)))
            for slot, value in zip(slots, values, strict=True):
                model.raw[slot] = value
                model.seen = max(value, model.seen or 0.0)
        elif name == "mark" and len(storage):
            slots = sorted({number % len(storage), number // 5 % len(storage)})
            model.enter(slots)
            buffer.sampler.mark(storage, torch.tensor(slots))
        elif name == "draw" and len(storage):
            buffer.sample(4)
        elif name == "alpha":
            alpha = buffer.sampler.alpha = number % 3 / 2
        else:
            buffer = perform(name, number, buffer, kind, make_sampler)
        storage = buffer.storage
        if name in ("storage", *CLEARS):
            model.forget()
        if name == "sampler":
            alpha = 0.6
            model.forget()
            model.enter(list(range(len(storage))))
        elif name in ("extend", "add", "set", "set_extend", "item", "items", "storage"):
            known = len(held) if name != "storage" else 0
            after = storage.generation(torch.arange(len(storage)))
            fresh = [s for s in range(len(storage)) if s >= known or after[s] != held[s]]
            model.enter(fresh)
        found = raw(buffer.sampler._priorities, storage)
        assert found == [model.raw[slot] for slot in range(len(storage))]
        expected = [(model.raw[slot] + 1e-8) ** alpha for slot in range(len(storage))]
        np.testing.assert_allclose(leaves(buffer.sampler._priorities, storage), expected, rtol=1e-6)


@given(
    values=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=10),
    alpha=st.floats(0, 3),
    beta=st.floats(0, 1),
    eps=st.sampled_from([0.0, 1e-8, 0.5]),
    normalize=st.sampled_from(["buffer", "batch"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_draws_follow_the_formula(values, alpha, beta, eps, normalize, dtype):
    storage = filled(len(values))
    table = table_of(alpha=alpha, beta=beta, eps=eps, normalize=normalize, dtype=dtype)
    update(table, storage, list(range(len(values))), values)
    probability = np.array([0.0 if v + eps == 0 and alpha else (v + eps) ** alpha for v in values])
    uniforms = torch.linspace(0, 1, 50, dtype=torch.float64)[:-1]
    if not probability.any():
        with pytest.raises(EmptyBufferError, match="all stored priorities are 0"):
            table.draw(storage, len(uniforms), uniforms)
        return
    slots, weight, generation = table.draw(storage, len(uniforms), uniforms)
    edges = probability.cumsum() / probability.sum()
    picked = slots.numpy()
    assert (probability[picked] > 0).all()
    below = np.where(picked > 0, edges[picked - 1], 0.0)
    assert (below <= uniforms.numpy() + 1e-6).all() and (uniforms.numpy() <= edges[picked] + 1e-6).all()
    least = probability[picked].min() if normalize == "batch" else probability[probability > 0].min()
    np.testing.assert_allclose(weight, (probability[picked] / least) ** -beta, rtol=1e-4, atol=1e-30)
    assert weight.max() <= 1 and (normalize == "buffer" or weight.max() == 1)
    assert generation.tolist() == [1] * 49


def test_late_updates_are_dropped_and_counted():
    storage, table = filled(10), table_of()
    slots, _, generation = table.draw(storage, 10, torch.linspace(0, 0.99, 10, dtype=torch.float64))
    assert slots.tolist() == list(range(10))
    table.remember(storage, Draw(slots, {}, generation))
    fill(storage, torch.arange(3))  # the table doesn't hear of this write
    update(table, storage, [1, 5], [7.0, 8.0])
    assert (raw(table, storage)[1], raw(table, storage)[5], table.dropped) == (1.0, 8.0, 1)
    update(table, storage, [2, 6], [7.0, 9.0], generation[[2, 6]])
    assert (raw(table, storage)[2], raw(table, storage)[6], table.dropped) == (1.0, 9.0, 2)
    update(table, storage, [2], [7.0], [2])
    assert (raw(table, storage)[2], table.dropped) == (7.0, 2)
    assert table.remember(storage, Draw(torch.tensor([0, 1]), {})).generation.tolist() == [2, 2]
    update(table, storage, [0, 1, 9], 3.0)
    assert raw(table, storage) == [3, 3, 7, 1, 1, 8, 9, 1, 1, 3]
    assert table.dropped == 2


def test_skipped_dropped_and_repeated_slots_of_an_update():
    storage, table = filled(4), table_of()
    update(table, storage, [-1, 2, 2, -1], [math.nan, 5.0, 3.0, -1.0])
    assert raw(table, storage) == [1, 1, 3, 1]
    assert table.default == 5.0
    update(table, storage, [0], [100.0], [7])
    assert (table.default, table.dropped) == (5.0, 1)


@pytest.mark.parametrize(
    ("slots", "values", "generation", "error"),
    [
        ([0, 1], [1.0, -1.0], None, InvalidArgumentError),
        ([0, 1], [1.0, math.nan], None, InvalidArgumentError),
        ([0, 1], [1.0, math.inf], None, InvalidArgumentError),
        ([0, 1], [1.0, 1e39], None, InvalidArgumentError),
        ([0, 1], [1.0], None, SchemaError),
        ([0, 1], 1.0, [1, 1, 1], SchemaError),
    ],
)
def test_a_refused_update_changes_nothing(slots, values, generation, error):
    storage, table = filled(4), table_of()
    update(table, storage, [0, 1, 2], [3.0, 4.0, 5.0])
    with pytest.raises(error):
        update(table, storage, slots, values, generation)
    assert raw(table, storage) == [3, 4, 5, 1]
    assert (table.default, table.dropped) == (5.0, 0)


def test_the_rule_may_change_and_come_back():
    storage, table = filled(3), table_of(alpha=1.0, eps=0.0, dtype=torch.float64)
    values = [0.1, 2.0, 3e7]
    update(table, storage, [0, 1, 2], values)
    for alpha in (0.5, 0.0, 2.0, 1.0):
        table.alpha = alpha
        np.testing.assert_allclose(leaves(table, storage), [v**alpha for v in values], rtol=1e-7)
    assert leaves(table, storage) == values
    table.eps = 1.0
    np.testing.assert_allclose(leaves(table, storage), [1.1, 3.0, 3e7 + 1])
    table.beta = 0.0
    assert table.draw(storage, 2, torch.zeros(2, dtype=torch.float64))[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "a", None])
def test_a_refused_rule_changes_nothing(name, value):
    storage, table = filled(3), table_of()
    update(table, storage, [0], 5.0)
    before = leaves(table, storage), table.alpha, table.beta, table.eps
    with pytest.raises(InvalidArgumentError, match=name):
        setattr(table, name, value)
    assert (leaves(table, storage), table.alpha, table.beta, table.eps) == before


def test_a_rule_that_makes_probabilities_overflow_is_refused():
    storage, table = filled(3), table_of(alpha=1.0)
    update(table, storage, [0], 1e30)
    with pytest.raises(InvalidArgumentError):
        table.alpha = 100.0
    assert table.alpha == 1.0 and table.of(storage).alpha == 1.0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"capacity": 0}, InvalidArgumentError, "max_capacity"),
        ({"capacity": True}, InvalidArgumentError, "max_capacity"),
        ({"capacity": 2.0}, InvalidArgumentError, "max_capacity"),
        ({"dtype": torch.float16}, UnsupportedError, "dtype"),
        ({"dtype": "float32"}, UnsupportedError, "dtype"),
        ({"normalize": "max"}, InvalidArgumentError, "normalize"),
        ({"alpha": -1}, InvalidArgumentError, "alpha"),
    ],
)
def test_invalid_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        table_of(**options)


def test_a_storage_that_is_larger_than_the_table():
    with pytest.raises(InvalidArgumentError, match="max_capacity=9 is less than the 10 rows"):
        table_of(9).of(filled(4))
    rounded = LazyTensorStorage(10, ndim=2)
    fill(rounded, torch.zeros(4, 3))
    assert raw(table_of(10), rounded) == [1.0] * 12


def test_a_table_that_is_larger_than_the_storage():
    storage, table = filled(8, 8), table_of(100)
    update(table, storage, list(range(8)), torch.arange(8.0))
    fill(storage, torch.arange(2), 6)
    fill(storage, torch.arange(1))
    assert raw(table, storage) == [7, 1, 2, 3, 4, 5, 7, 7]


def test_rows_written_beyond_the_log_count_as_new():
    storage, table = filled(5), table_of()
    update(table, storage, list(range(5)), [2.0, 3.0, 4.0, 5.0, 6.0])
    for _ in range(1100):
        fill(storage, torch.zeros(1, dtype=torch.int64))
    assert raw(table, storage) == [6.0] * 5


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_copies_and_states(duplicate):
    storage, table = filled(5), table_of(alpha=0.3)
    update(table, storage, [0, 1, 4], [2.0, 3.0, 4.0])
    other, third = duplicate(table), table_of()
    third.load_state_dict(table.state_dict())
    for made in (other, third):
        assert made.state_dict()["raw"].tolist() == table.state_dict()["raw"].tolist()
        update(made, storage, [0], 9.0)
        assert raw(made, storage) == [9, 3, 1, 1, 4] and (made.alpha, made.default) == (0.3, 9.0)
    assert raw(table, storage) == [2, 3, 1, 1, 4]


@pytest.mark.parametrize("how", ["fresh", "used", "itself", "pickle", "deepcopy"])
def test_late_updates_stay_late_after_a_load(how):
    def make() -> PrioritizedReplayBuffer:
        storage = LazyTensorStorage(6)
        return PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=60, seed=0)

    buffer = make()
    buffer.extend(torch.arange(5))
    assert set(buffer.sample().tolist()) == set(range(5))
    buffer.extend(torch.arange(3))  # overwrites the slots 5, 0 and 1
    if how in ("pickle", "deepcopy"):
        other = copy.deepcopy(buffer) if how == "deepcopy" else pickle.loads(pickle.dumps(buffer))
    else:
        other = buffer if how == "itself" else make()
        if how == "used":
            other.extend(torch.arange(17))
            other.sample()
        other.load_state_dict(buffer.state_dict())
    other.update_priority(torch.arange(6), torch.arange(2.0, 8.0))
    assert raw(other.sampler._priorities, other.storage) == [1, 1, 4, 5, 6, 7]
    assert other.stats().priorities_dropped == 2
    other.extend(torch.arange(3))
    other.update_priority(torch.arange(6), 9.0)
    assert raw(other.sampler._priorities, other.storage) == [1, 1, 7, 7, 7, 9]


def test_a_state_of_another_number_of_rows_is_not_taken_for_this_storage():
    storage, table = filled(5), table_of()
    update(table, storage, [0], 4.0)
    other = table_of()
    other.load_state_dict(table.state_dict())
    assert raw(other, filled(6)) == [1.0] * 6


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": -1.0},
        {"beta": None},
        {"raw": [1.0]},
        {"raw": torch.zeros(3)},
        {"raw": torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0])},
        {"raw": torch.full((5,), math.nan)},
        {"mark": torch.zeros(5, 1)},
        {"max_seen": -1.0},
        {"dropped": "a"},
    ],
)
def test_a_broken_state_changes_nothing(change):
    storage, table = filled(5), table_of()
    update(table, storage, [0, 1], [2.0, 3.0])
    state = table.state_dict()
    with pytest.raises(SchemaError, match="load_state_dict"):
        table.load_state_dict({**state, **change})
    with pytest.raises(SchemaError, match="load_state_dict"):
        table.load_state_dict({name: state[name] for name in state if name not in change})
    assert raw(table, storage) == [2, 3, 1, 1, 1]


@pytest.mark.parametrize("slots", [[2, 3], [1, 3]], ids=["adjacent", "scattered"])
def test_present_priorities_of_marked_rows_do_not_count_within_the_buffer(slots):
    storage, table = filled(4), table_of(within_buffer=True)
    table.of(storage)
    update(table, storage, [0, 1, 2, 3], [5.0 if slot in slots else 1.0 for slot in range(4)])
    table.reset(storage, torch.tensor(slots))
    assert raw(table, storage) == [1.0] * 4
