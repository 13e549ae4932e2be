"""The trajectories of slices agree with a plain Python model in random sequences of calls."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.tape import IDS, TRUNCATED

Record = tuple[int, int, bool]  # number, id, done
RECORDS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5).map(lambda x: x == 0)), min_size=1, max_size=12
)


class SliceMachine(RuleBasedStateMachine):
    """Rows with few ids and rare ends, in a ring of one or two columns; every slice must be a run of the model."""

    @initialize(
        capacity=st.integers(2, 14),
        columns=st.sampled_from([0, 2]),
        length=st.integers(1, 4),
        strict=st.booleans(),
        span=st.booleans(),
    )
    def make(self, capacity: int, columns: int, length: int, strict: bool, span: bool) -> None:
        self.options = (capacity, columns, length, strict, span and length > 1)
        self.buffer = self.fresh()
        self.rings: list[list[Record | None]] = [[None] * capacity for _ in range(columns or 1)]
        self.cursor = self.clock = 0

    def fresh(self) -> Any:
        capacity, columns, length, strict, span = self.options
        return parts.TensorDictReplayBuffer(
            storage=parts.LazyTensorStorage(capacity * (columns or 1), ndim=2 if columns else 1),
            sampler=parts.SliceSampler(slice_len=length, strict_length=strict, span=span, traj_key=IDS),
            batch_size=8 * length,
            seed=0,
        )

    def rows(self, tracks: list[list[Record]]) -> TensorDict:
        shape = [len(tracks), len(tracks[0])] if self.options[1] else [len(tracks[0])]
        numbers, ids, done = (
            torch.tensor([[record[i] for record in track] for track in tracks]).reshape(shape)
            for i in range(3)
        )
        return TensorDict(
            {
                "n": numbers,
                "collector": TensorDict({"traj_ids": ids}, shape),
                "next": TensorDict({"done": done.bool()[..., None]}, shape),
            },
            shape,
        )

    @rule(records=RECORDS, others=RECORDS)
    def extend(self, records: list[tuple[int, bool]], others: list[tuple[int, bool]]) -> None:
        tracks: list[list[Record]] = []
        for column, ring in enumerate(self.rings):
            source = records if not column else [(others * 12)[i] for i in range(len(records))]
            tracks.append([(self.clock + i, one, done) for i, (one, done) in enumerate(source)])
            for i, record in enumerate(tracks[-1]):
                ring[(self.cursor + i) % self.options[0]] = record
        self.buffer.extend(self.rows(tracks))
        self.cursor = (self.cursor + len(records)) % self.options[0]
        self.clock += len(records)

    @rule()
    def empty(self) -> None:
        self.buffer.empty()
        self.rings = [[None] * self.options[0] for _ in self.rings]
        self.cursor = 0

    @rule()
    def restore(self) -> None:
        state = self.buffer.state_dict()
        self.buffer = self.fresh()
        self.buffer.load_state_dict(state)

    def runs(self) -> list[tuple[int, list[int]]]:
        """Return the trajectories, as (column, numbers)."""
        found: list[tuple[int, list[int]]] = []
        for column, ring in enumerate(self.rings):
            before: Record | None = None
            for record in [*ring[self.cursor :], *ring[: self.cursor]]:
                if record is None:
                    continue
                if before is None or before[1] != record[1] or before[2]:
                    found.append((column, []))
                found[-1][1].append(record[0])
                before = record
        return found

    @precondition(lambda self: self.clock)
    @rule()
    def sample(self) -> None:
        _, _, length, strict, span = self.options
        runs = [run for run in self.runs() if len(run[1]) >= length or not strict]
        if not runs:
            try:
                self.buffer.sample()
            except RuntimeError:
                return
            raise AssertionError("a slice of nothing")
        batch = self.buffer.sample()
        ends = batch[TRUNCATED].reshape(-1)
        assert ends[-1] and ends.sum() == 8
        columns = batch["index"][:, 1].tolist() if self.options[1] else [0] * len(batch)
        owner = {(column, n): run for column, run in runs for n in run}
        start = 0
        for stop in (ends.nonzero()[:, 0] + 1).tolist():
            numbers, column = batch["n"][start:stop].tolist(), columns[start]
            run = owner.get((column, numbers[0]))
            assert run is not None, "a slice outside"
            place = run.index(numbers[0])
            assert numbers == run[place : place + len(numbers)], "a slice of two trajectories"
            assert set(columns[start:stop]) == {column}
            whole = len(numbers) == min(length, len(run))
            assert whole or (span and (place == 0 or place + len(numbers) == len(run)))
            start = stop

    def teardown(self) -> None:
        """Check that every run of the model is drawn."""
        if not getattr(self, "clock", 0):
            return
        _, _, length, strict, _ = self.options
        expected = {(c, run[0]) for c, run in self.runs() if len(run) >= length or not strict}
        owner = {(c, n): (c, run[0]) for c, run in self.runs() for n in run}
        seen: set[tuple[int, int]] = set()
        for _ in range(40):
            if seen >= expected:
                break
            batch = self.buffer.sample()
            columns = batch["index"][:, 1].tolist() if self.options[1] else [0] * len(batch)
            seen |= {owner[key] for key in zip(columns, batch["n"].tolist(), strict=True)}
        assert seen == expected


SliceMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
TestSlices = SliceMachine.TestCase
