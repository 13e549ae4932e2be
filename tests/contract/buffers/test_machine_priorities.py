"""Priorities, generations and weights agree with a plain Python model in random sequences of calls."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.priorities import Oracle, close, records

VALUES = st.sampled_from([0.0, 1e-6, 0.25, 1.0, 1.0, 3.0, 17.0])
EPS = 1e-3


class PriorityMachine(RuleBasedStateMachine):
    """A prioritized buffer with an `Oracle`, its slots' generations, and the generations at their last draws."""

    @initialize(
        capacity=st.integers(1, 9),
        normalize=st.sampled_from(["buffer", "batch"]),
        within=st.booleans(),
        alpha=st.sampled_from([0.0, 0.6, 1.0]),
    )
    def make(self, capacity: int, normalize: str, within: bool, alpha: float) -> None:
        self.options = (capacity, normalize, within)
        self.oracle = Oracle(alpha, 0.5, EPS)
        self.oracle.within = within
        self.buffer = self.fresh()
        self.clock = self.cursor = self.dropped = self.draws = 0
        self.held: dict[int, int] = {}  # slot -> number of its record
        self.drawn: dict[int, int] = {}  # slot -> number of the record that was last drawn from it
        self.tickets: list[tuple[list[int], list[int], torch.Tensor]] = []

    def fresh(self) -> Any:
        capacity, normalize, within = self.options
        return parts.ReplayBuffer(
            storage=parts.LazyTensorStorage(capacity),
            sampler=parts.PrioritizedSampler(
                max_capacity=capacity,
                alpha=self.oracle.alpha,
                beta=0.5,
                eps=EPS,
                normalize=normalize,
                max_priority_within_buffer=within,
            ),
            batch_size=6,
            seed=0,
        )

    @rule(count=st.integers(1, 12))
    def extend(self, count: int) -> None:
        capacity = self.options[0]
        slots = self.buffer.extend(records(count, self.clock)).tolist()
        numbers = range(self.clock, self.clock + count)
        kept = list(numbers)[-capacity:]
        gone = [-1] * (count - len(kept))
        assert slots == gone + [(self.cursor + number - self.clock) % capacity for number in kept]
        slots = slots[len(gone) :]
        self.cursor = (self.cursor + count) % capacity
        self.clock += count
        self.held.update(zip(slots, kept, strict=True))
        self.oracle.write(slots)

    @precondition(lambda self: self.held)
    @rule()
    def sample(self) -> None:
        batch, info = self.buffer.sample(return_info=True)
        slots, numbers = info["index"].tolist(), batch["x"].tolist()
        assert numbers == [self.held[slot] for slot in slots]
        close(info["_weight"], self.oracle.weights(slots, self.options[1]), rtol=1e-4)
        self.drawn.update(zip(slots, numbers, strict=True))
        self.tickets.append((slots, numbers, info["generation"]))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), explicit=st.booleans())
    def update_drawn(self, data: st.DataObject, explicit: bool) -> None:
        slots, numbers, generation = data.draw(st.sampled_from(self.tickets))
        values = data.draw(st.lists(VALUES, min_size=6, max_size=6))
        self.buffer.update_priority(
            torch.tensor(slots), torch.tensor(values), generation if explicit else None
        )
        asked = numbers if explicit else [self.drawn[slot] for slot in slots]
        self.apply(slots, asked, values)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), value=VALUES)
    def update_any(self, data: st.DataObject, value: float) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.buffer.update_priority(slot, value)
        self.apply([slot], [self.drawn.get(slot, self.held[slot])], [value])

    def apply(self, slots: list[int], asked: list[int], values: list[float]) -> None:
        """Apply the updates whose record is still in its slot; count the other updates as dropped."""
        right = [self.held.get(slot) == number for slot, number in zip(slots, asked, strict=True)]
        taken = [(slot, value) for slot, value, ok in zip(slots, values, right, strict=True) if ok]
        self.dropped += len(slots) - len(taken)
        self.oracle.update([slot for slot, _ in taken], [value for _, value in taken])

    @rule(alpha=st.sampled_from([0.0, 0.3, 1.0]), beta=st.sampled_from([0.0, 0.7, 1.0]))
    def turn(self, alpha: float, beta: float) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            setattr(self.oracle, name, value)
            setattr(self.buffer.sampler, name, value)

    @rule()
    def restore(self) -> None:
        state = self.buffer.state_dict()
        self.buffer = self.fresh()
        self.buffer.load_state_dict(state)
        # The loaded buffer continues with the saved one's last draws and its count of dropped updates.

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "buffer"):
            assert self.buffer.stats().priorities_dropped == self.dropped
            assert len(self.buffer) == len(self.held)

    def teardown(self) -> None:
        """Check every record's stored priority by the weights at beta 1."""
        if not getattr(self, "held", None):
            return
        self.buffer.sampler.beta = self.oracle.beta = 1.0
        for _ in range(5):
            self.sample()


PriorityMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPriorities = PriorityMachine.TestCase
