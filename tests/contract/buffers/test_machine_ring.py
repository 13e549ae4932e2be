"""Ring, generations and epochs agree with a plain Python model in random sequences of calls."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import GleanError
from tests.contract.buffers.cases import make_storage
from tests.contract.buffers.tape import Ring, Tape, chunks

TAPE = Tape((3, 5, 1))
STORAGES = ("list", "tensor", "memmap", "given")


class RingMachine(RuleBasedStateMachine):
    """A buffer without replacement; `due` holds the slots that the current epoch has not yet served."""

    @initialize(
        capacity=st.integers(1, 9),
        storage=st.sampled_from(STORAGES),
        prefetch=st.sampled_from([None, 1, 3]),
        shuffle=st.booleans(),
    )
    def make(self, capacity: int, storage: str, prefetch: int | None, shuffle: bool) -> None:
        self.options = (storage, capacity, prefetch, shuffle)
        self.ring = Ring(capacity)
        self.buffer = self.fresh(self.ring)
        self.clock = len(self.ring)
        self.due: set[int] | None = None
        self.seen: dict[tuple[int, int], int] = {}
        self.size = 3

    def fresh(self, ring: Ring | None = None) -> Any:
        storage, capacity, prefetch, shuffle = self.options
        collate = {"collate_fn": torch.stack} if storage == "list" else {}
        return parts.ReplayBuffer(
            storage=make_storage(storage, capacity, TAPE, ring),
            sampler=parts.SamplerWithoutReplacement(shuffle=shuffle),
            prefetch=prefetch,
            batch_size=3,
            **collate,
        )

    @rule(count=st.integers(1, 20))
    def extend(self, count: int) -> None:
        index = self.buffer.extend(TAPE.rows(self.clock, self.clock + count))
        assert index.tolist() == self.ring.extend(range(self.clock, self.clock + count))
        self.clock += count

    @rule()
    def add(self) -> None:
        assert self.buffer.add(TAPE.step_at(self.clock)) == self.ring.extend([self.clock])[0]
        self.clock += 1

    @rule(count=st.integers(1, 12))
    def extend_in_chunks(self, count: int) -> None:
        for start, stop in chunks(count):
            self.buffer.extend(TAPE.rows(self.clock + start, self.clock + stop))
            self.ring.extend(range(self.clock + start, self.clock + stop))
        self.clock += count

    @precondition(lambda self: len(self.ring))
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.ring) - 1))
        self.buffer[slot] = TAPE.step_at(self.clock)
        self.ring.slots[slot] = self.clock
        self.clock += 1

    @rule()
    def empty(self) -> None:
        self.buffer.empty()
        self.ring.clear()
        self.due = None

    @rule()
    def refused_write(self) -> None:
        if len(self.ring):
            other_schemas = (TAPE.rows(0, 2).exclude("action"), TAPE.rows(0, 2).double())
            for bad in (TAPE.rows(0, 0), *(other_schemas if self.options[0] != "list" else ())):
                try:
                    self.buffer.extend(bad)
                except GleanError:
                    continue
                raise AssertionError("a bad write was taken")

    @precondition(lambda self: not len(self.ring))
    @rule()
    def sample_nothing(self) -> None:
        try:
            self.buffer.sample()
        except RuntimeError:
            return
        raise AssertionError("a sample of an empty buffer")

    @precondition(lambda self: len(self.ring))
    @rule()
    def sample(self) -> None:
        self.serve(*self.buffer.sample(return_info=True))

    def serve(self, batch: Any, info: Any) -> None:
        if not self.due:
            self.due = set(range(len(self.ring)))
        slots = info["index"].tolist()
        assert len(slots) == min(3, len(self.due))
        assert len(set(slots)) == len(slots) and set(slots) <= self.due, "not without replacement"
        if not self.options[3]:
            assert slots == sorted(self.due)[: len(slots)]
        self.due -= set(slots)
        _, t = TAPE.check(batch)
        assert t.tolist() == [self.ring.slots[slot] for slot in slots]
        for slot, generation, now in zip(slots, info["generation"].tolist(), t.tolist(), strict=True):
            assert self.seen.setdefault((slot, generation), now) == now, "one generation, two records"
        if self.options[2] is None:
            assert self.buffer.sampler.ran_out == (not self.due)

    @precondition(lambda self: len(self.ring))
    @rule()
    def epoch(self) -> None:
        steps = [t for batch in self.buffer for t in TAPE.check(batch)[1].tolist()]
        assert sorted(steps) == sorted(t for t in self.ring.slots if t is not None)
        self.due = None

    @rule()
    def restore(self) -> None:
        state = self.buffer.state_dict()
        other = self.fresh()
        other.load_state_dict(state)
        if len(self.ring) and self.options[2] is None:
            # Both continue the same epoch with the same random numbers.
            (batch, info), (again, _) = (one.sample(return_info=True) for one in (self.buffer, other))
            assert (batch == again).all()
            self.seen.clear()
            self.serve(batch, info)
        self.seen.clear()
        self.buffer = other

    @invariant()
    def content(self) -> None:
        if hasattr(self, "buffer"):
            assert len(self.buffer) == len(self.ring)
            if len(self.ring):
                batch = self.buffer[:]
                rows = torch.stack(batch) if isinstance(batch, list) else batch
                assert TAPE.check(rows)[1].tolist() == self.ring.slots[: len(self.ring)]


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRing = RingMachine.TestCase
