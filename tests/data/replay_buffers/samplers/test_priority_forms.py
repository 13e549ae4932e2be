"""Priorities are accepted in many types, also if the buffer changes while they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gleanrl.data.replay_buffers import ListStorage, PrioritizedSampler, ReplayBuffer
from gleanrl.data.replay_buffers.samplers import priority_table
from gleanrl.errors import IndexRangeError, InvalidArgumentError, InvalidTypeError, SchemaError
from tests.data.replay_buffers.samplers.test_priority_table_priorities import filled, table_of
from tests.lazy import freed, negated
from tests.ways import both_ways

FORMS = [
    lambda values: values,
    lambda values: values.double(),
    lambda values: values.requires_grad_(),
    lambda values: values.repeat_interleave(2)[::2],
    lambda values: negated(values),
    lambda values: values.half(),
    lambda values: values.numpy(),
    lambda values: values.tolist(),
    lambda values: values[:-1],
    lambda values: 2.5,
    lambda values: -values,
]


by = both_ways(priority_table, "_BY_CORE")


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_updates_of_any_type_equal_updates_one_by_one(by, data):
    """An update of many slots equals valid updates one by one, and late updates are counted."""
    storage, table, expected, dropped = filled(8), table_of(alpha=1.0, eps=0.0), [1.0] * 8, 0
    for _ in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.lists(st.integers(-1, 9), min_size=2, max_size=5))
        given = data.draw(st.sampled_from(FORMS))(torch.arange(1.0, len(slots) + 1))
        timely = data.draw(st.none() | st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        generation = None if timely is None else torch.tensor(timely).long()  # each slot was written once
        numbers = torch.as_tensor(given).detach().tolist()
        numbers = numbers if isinstance(numbers, list) else [numbers] * len(slots)
        named = [(slot, number) for slot, number in zip(slots, numbers, strict=False) if 0 <= slot < 8]
        forgotten = sum(slot > 7 for slot in slots)
        illegal = any(number < 0 for _, number in named) or (forgotten and timely is None)
        if len(numbers) != len(slots) or illegal:
            with pytest.raises((SchemaError, InvalidArgumentError, IndexRangeError)):
                table.update(storage, torch.tensor(slots), given, generation)
        else:
            table.update(storage, torch.tensor(slots), given, generation)
            dropped += forgotten
            for slot, number, in_time in zip(slots, numbers, timely or [True] * len(slots), strict=True):
                if 0 <= slot < 8 and in_time:
                    expected[slot] = number
                dropped += 0 <= slot < 8 and not in_time
        assert table.of(storage).end == 8 and table.snapshot().raw.tolist() == expected
        assert table.dropped == dropped


def test_plain_tensors_are_read_by_the_core(by, monkeypatch):
    asked = []
    monkeypatch.setattr(priority_table, "per_slot", lambda name, values, *more: asked.append(name) or values)
    storage, table, slots = filled(8), table_of(), torch.arange(3)
    table.update(storage, slots, torch.ones(3), None)
    table.update(storage, slots, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64))
    assert bool(asked) is (by == "asked")


class Extending:
    """A priority that makes a buffer grow, once, while it is read."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer, self.done = buffer, False

    def extend(self) -> None:
        if not self.done:
            self.done = True
            self.buffer.extend(list(range(4 * len(self.buffer))))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.extend()
        return np.full(1000, 2.0)


class Mode(torch.overrides.TorchFunctionMode):
    def __init__(self, extending: Extending) -> None:
        super().__init__()
        self.extending = extending

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.extending.extend()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["array", "mode"])
def test_a_buffer_that_grows_while_priorities_are_taken(by, how):
    """The counters of an unbounded storage have moved to other memory then."""
    buffer = ReplayBuffer(storage=ListStorage(), sampler=PrioritizedSampler(None, 1.0, 1.0))
    buffer.extend(list(range(1000)))
    index, generation = torch.arange(1000), buffer.generation(torch.arange(1000))
    extending = Extending(buffer)
    if how == "array":
        buffer.update_priority(index, extending, generation)
    else:
        with Mode(extending):
            buffer.update_priority(index, torch.full((1000,), 2.0), generation)
    assert extending.done and len(buffer) == 5000
    assert buffer.sampler.priorities_dropped == 0
    assert buffer.sampler._priorities.snapshot().raw[:1000].eq(2.0).all()


def test_errors_of_the_users_code_reach_the_user(by):
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise IndexError("mine")

    with pytest.raises(IndexError, match="^mine$"):
        table_of().update(filled(8), torch.arange(3), Broken(), None)


def test_priorities_without_memory_are_refused(by):
    given = freed(torch.ones(3))
    for values in (given, torch._neg_view(given), torch._efficientzerotensor((3,))):
        with pytest.raises(InvalidTypeError, match="priority: expected numbers, got a tensor without memory"):
            table_of().update(filled(8), torch.arange(3), values, None)


def test_draw_with_numbers_outside_the_unit_interval_raises():
    storage, table = filled(8), table_of()
    with pytest.raises(ValueError, match="uniform"):
        table.draw(storage, 1, torch.full((1,), 1.5, dtype=torch.float64))
