"""Writers other than the round robin keep the best records, or reject all writes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import GleanError
from tests.contract.buffers.tape import Tape

TAPE = Tape((5,))


def rows(values: list[Any], start: int = 0) -> TensorDict:
    """Return rows of the tape with a rank."""
    return TAPE.rows(start, start + len(values)).update({"rank": torch.tensor(values, dtype=torch.float32)})


def best(capacity: int = 5, **kwargs: Any) -> Any:
    return parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(capacity),
        writer=parts.TensorDictMaxValueWriter(**{"rank_key": "rank", **kwargs}),
        batch_size=16,
        seed=0,
    )


class Top:
    """A model of the `capacity` records with the highest ranks; an equal rank doesn't replace a record."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[tuple[float, int]] = []

    def offer(self, rank: float, number: int) -> bool:
        if len(self.held) == self.capacity:
            low = min(rank for rank, _ in self.held)
            if rank <= low:
                return False
            # The contract leaves open which of several lowest records is replaced, so only ranks are compared.
            self.held.remove(next(item for item in self.held if item[0] == low))
        self.held.append((rank, number))
        return True


def ranks(buffer: Any) -> list[float]:
    held = buffer[:]
    TAPE.check(held.exclude("rank"))
    return sorted(held["rank"].tolist())


def test_best_records_stay() -> None:
    dice, buffer, top = random.Random(0), best(), Top(5)
    number = 0
    for _ in range(60):
        values = [dice.randint(0, 10**6) / 2 for _ in range(dice.randint(1, 9))]
        index = buffer.extend(rows(values, number))
        for i, value in enumerate(values):
            top.offer(value, number + i)
        stayed = {place for _, place in top.held}
        assert len(index) == len(values) and index.max() < 5
        # A record that a later record of the same call replaced has no slot either.
        assert [slot >= 0 for slot in index.tolist()] == [number + i in stayed for i in range(len(values))]
        assert len({slot for slot in index.tolist() if slot >= 0}) == int((index >= 0).sum())
        number += len(values)
        assert ranks(buffer) == sorted(rank for rank, _ in top.held)
        assert set(buffer.sample()["rank"].tolist()) <= {rank for rank, _ in top.held}


def test_rejected_records_change_nothing() -> None:
    buffer = best(3)
    buffer.extend(rows([5.0, 6.0, 7.0]))
    before = buffer[:].clone()
    assert buffer.extend(rows([5.0, 1.0, 4.9], 10)).tolist() == [-1, -1, -1]
    assert (buffer[:] == before).all() and len(buffer) == 3


def test_added_records_compete_by_rank() -> None:
    buffer = best(2)
    for number, value in enumerate([1.0, 2.0, 0.5, 3.0]):
        buffer.add(rows([value], number)[0])
    assert ranks(buffer) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("reduction", "order"),
    [("max", [0, 2]), ("min", [1, 2]), ("mean", [0, 2]), ("median", [1, 2]), ("sum", [0, 2])],
)
def test_several_values_are_reduced(reduction: str, order: list[int]) -> None:
    buffer = best(2, reduction=reduction)
    values = [[9.0, 0.0, 1.0], [2.0, 1.5, 2.0], [3.0, 3.0, 3.0]]
    data = rows([0.0] * 3).update({"rank": torch.tensor(values)})
    buffer.extend(data)
    assert sorted(buffer[:]["rank"].tolist()) == sorted(values[place] for place in order)


def test_the_default_rank_is_the_reward() -> None:
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(3), writer=parts.TensorDictMaxValueWriter(), batch_size=4
    )
    buffer.extend(TAPE.rows(0, 20))
    assert sorted(buffer[:]["next", "reward"][:, 0].tolist()) == [17.0, 18.0, 19.0]


def test_more_dimensions_are_refused() -> None:
    with pytest.raises(ValueError):
        buffer = parts.TensorDictReplayBuffer(
            storage=parts.LazyTensorStorage(12, ndim=2), writer=parts.TensorDictMaxValueWriter(), batch_size=4
        )
        buffer.extend(Tape((5,), (3,)).rows(0, 2))


def test_write_without_a_rank_raises() -> None:
    buffer = best()
    with pytest.raises(KeyError, match="rank"):
        buffer.extend(TAPE.rows(0, 3))
    assert len(buffer) == 0


@pytest.mark.parametrize("bad", [float("nan")])
def test_a_rank_that_is_no_number(bad: float) -> None:
    buffer = best()
    with pytest.raises(ValueError, match="rank"):
        buffer.extend(rows([1.0, bad, 2.0]))
    assert len(buffer) == 0


def test_the_best_after_empty_and_restore() -> None:
    buffer = best(3)
    buffer.extend(rows([5.0, 6.0, 7.0]))
    other = best(3)
    other.load_state_dict(buffer.state_dict())
    other.extend(rows([5.5, 1.0], 10))
    assert ranks(other) == [5.5, 6.0, 7.0]
    buffer.empty()
    buffer.extend(rows([1.0, 2.0], 20))
    assert ranks(buffer) == [1.0, 2.0]
    buffer.extend(rows([0.5, 3.0], 30))
    assert ranks(buffer) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("sampler", ["PrioritizedSampler", "SamplerWithoutReplacement"])
def test_other_samplers_follow_the_best(sampler: str) -> None:
    options = {"max_capacity": 5, "alpha": 0.6, "beta": 0.4} if "Prio" in sampler else {}
    buffer = best()
    buffer.set_sampler(getattr(parts, sampler)(**options))
    for start in range(0, 60, 6):
        values = [(start * 7 + i * 5) % 31 / 2 for i in range(6)]
        buffer.extend(rows(values, start))
        for _ in range(3):
            batch = buffer.sample()
            assert set(batch["rank"].tolist()) <= set(ranks(buffer))
            TAPE.check(batch.exclude("rank"))


def test_a_late_priority_of_a_replaced_record_is_dropped() -> None:
    buffer = parts.TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=parts.LazyTensorStorage(3),
        writer=parts.TensorDictMaxValueWriter(rank_key="rank"),
        batch_size=50,
    )
    buffer.extend(rows([5.0, 6.0, 7.0]))
    batch = buffer.sample()
    slot = int(buffer.extend(rows([8.0], 10))[0])
    assert slot == 0
    batch["td_error"] = torch.ones(50)
    buffer.update_tensordict_priority(batch)
    assert buffer.stats().priorities_dropped == int((batch["index"] == slot).sum()) > 0


class TestImmutable:
    """A data set can be read but not written."""

    def make(self) -> Any:
        return parts.ReplayBuffer(
            storage=parts.TensorStorage(TAPE.rows(0, 10)), writer=parts.ImmutableDatasetWriter(), batch_size=4
        )

    @pytest.mark.parametrize("call", ["extend", "add", "empty"])
    def test_immutable_buffer_refuses_writes(self, call: str) -> None:
        buffer = self.make()
        before = buffer[:].clone()
        with pytest.raises(RuntimeError) as caught:
            {
                "extend": lambda: buffer.extend(TAPE.rows(10, 12)),
                "add": lambda: buffer.add(TAPE.step_at(10)),
                "empty": buffer.empty,
            }[call]()
        assert isinstance(caught.value, GleanError)
        assert len(buffer) == 10 and (buffer[:] == before).all()

    def test_immutable_buffer_can_be_sampled_and_restored(self) -> None:
        buffer = self.make()
        TAPE.check(buffer.sample())
        other = self.make()
        other.load_state_dict(buffer.state_dict())
        TAPE.check(other.sample())


def test_the_tensordict_round_robin() -> None:
    buffer = parts.TensorDictReplayBuffer(
        storage=parts.LazyTensorStorage(10), writer=parts.TensorDictRoundRobinWriter(), batch_size=8
    )
    assert buffer.extend(TAPE.rows(0, 13)).tolist() == [-1] * 3 + [(3 + i) % 10 for i in range(10)]
    batch = buffer.sample()
    _, t = TAPE.check(batch)
    assert ((t % 10) == batch["index"]).all()


def test_an_ensemble_of_writers_only_holds_them() -> None:
    writers = [parts.RoundRobinWriter(), parts.TensorDictRoundRobinWriter()]
    ensemble = parts.WriterEnsemble(*writers)
    assert ensemble[0] is writers[0] and ensemble[1] is writers[1]


def test_slices_of_the_best_are_refused_or_right() -> None:
    buffer = best(6)
    try:
        buffer.set_sampler(parts.SliceSampler(slice_len=2))
        buffer.extend(rows([float(i % 4) for i in range(20)]))
        batch = buffer.sample()
    except GleanError:
        return
    _, t = TAPE.locate(batch)
    assert (t.view(-1, 2).diff(dim=1) == 1).all()
