"""Updates of priorities accept all forms of indices, check generations, and reject invalid values."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import GleanError
from tests.contract.buffers.priorities import Oracle, check, filled, make_buffer, records
from tests.contract.buffers.tape import Tape
from tests.data.replay_buffers.oracle import fingerprint

VALUES = [0.3, 2.0, 1.0, 0.7, 5.0, 0.05, 1.5, 3.0]


def state(buffer: Any) -> str:
    """Return a hash of all state that a failed call must not change."""
    text = f"{fingerprint(buffer.state_dict())} {len(buffer)} {buffer.stats()}"
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("index", "values", "slots"),
    [
        (torch.tensor([2, 5]), torch.tensor([4.0, 0.1]), [2, 5]),
        (torch.tensor([2, 5]), 4.0, [2, 5]),
        (torch.tensor([2, 5]), torch.tensor(4.0), [2, 5]),
        (torch.tensor(6), torch.tensor(4.0), [6]),
        (6, 4.0, [6]),
        ([2, 5], [4.0, 0.1], [2, 5]),
        (np.array([2, 5]), np.array([4.0, 0.1]), [2, 5]),
        (torch.tensor([2, 5], dtype=torch.int32), torch.tensor([4.0, 0.1], dtype=torch.float64), [2, 5]),
        (torch.tensor([], dtype=torch.int64), torch.tensor([]), []),
        (torch.tensor([3, -1, 4]), torch.tensor([4.0, 9.0, 0.1]), [3, None, 4]),
        (torch.tensor([-1, -1]), torch.tensor([4.0, 9.0]), [None, None]),
        (torch.tensor([2, 5, 2, 2]), torch.tensor([4.0, 0.1, 7.0, 0.2]), [2, 5, 2, 2]),
    ],
)
def test_updates_accept_indices_and_priorities_of_all_forms(
    index: Any, values: Any, slots: list[int | None]
) -> None:
    oracle = Oracle()
    buffer = filled(oracle, VALUES)
    buffer.update_priority(index, values)
    expected = torch.as_tensor(values, dtype=torch.float64).expand(len(slots)).tolist()
    kept = [(slot, value) for slot, value in zip(slots, expected, strict=True) if slot is not None]
    oracle.update([slot for slot, _ in kept], [value for _, value in kept])
    check(buffer, oracle, batches=40)
    buffer.extend(records(1))
    oracle.write([0])
    check(buffer, oracle, batches=20)


def test_priority_of_a_skipped_index_does_not_count_as_the_largest() -> None:
    oracle = Oracle()
    buffer = filled(oracle, VALUES)
    buffer.update_priority(torch.tensor([-1, 1]), torch.tensor([1000.0, 1.0]))
    oracle.update([1], [1.0])
    buffer.extend(records(1))
    oracle.write([0])
    assert oracle.raw[0] == 5.0
    check(buffer, oracle)


def grid_buffer(oracle: Oracle) -> Any:
    tape = Tape((5,), (3,))
    sampler = parts.PrioritizedSampler(max_capacity=12, alpha=oracle.alpha, beta=oracle.beta)
    sampler.set_seed(0)
    buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=64)
    buffer.extend(tape.rows(0, 4))
    oracle.write(list(range(12)))
    return buffer


class Flat:
    """Presents a grid buffer with an `info["index"]` that counts slots in one dimension."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def sample(self, return_info: bool) -> tuple[Any, dict[str, Any]]:
        batch, info = self.buffer.sample(return_info=return_info)
        step, column = info["index"]
        assert torch.equal(batch["observation"][:, 0].long(), column)
        return batch, {**info, "index": step * 3 + column}


@pytest.mark.parametrize("form", ["rows", "tuple", "sampled"])
def test_updates_accept_indices_of_two_dimensions(form: str) -> None:
    oracle = Oracle()
    buffer = grid_buffer(oracle)
    pairs = torch.tensor([[0, 1], [3, 2], [2, 0]])
    values = torch.tensor([4.0, 0.1, 2.0])
    if form == "rows":
        buffer.update_priority(pairs, values)
    elif form == "tuple":
        buffer.update_priority(tuple(pairs.unbind(1)), values)
    else:
        _, info = buffer.sample(return_info=True)
        slots = (info["index"][0] * 3 + info["index"][1]).tolist()
        values = 0.1 + torch.tensor(slots).float()
        buffer.update_priority(info["index"], values)
        oracle.update(slots, values.tolist())
    if form != "sampled":
        oracle.update([1, 11, 6], values.tolist())
    check(Flat(buffer), oracle, batches=80)


class TestGenerations:
    """An update changes the priority of the drawn record, never of the record that replaced it in its slot."""

    def test_a_late_update_is_dropped_and_counted(self) -> None:
        oracle = Oracle()
        buffer = filled(oracle, VALUES, batch_size=200)
        _, info = buffer.sample(return_info=True)
        index = info["index"].unique()
        assert {0, 1} <= set(index.tolist())
        before = buffer.stats().priorities_dropped
        buffer.extend(records(2))
        oracle.write([0, 1])
        buffer.update_priority(index, torch.full((len(index),), 2.5))
        oracle.update([slot for slot in index.tolist() if slot > 1], [2.5] * (len(index) - 2))
        assert buffer.stats().priorities_dropped - before == 2
        check(buffer, oracle)

    def test_priority_of_a_dropped_update_does_not_count_as_the_largest(self) -> None:
        oracle = Oracle()
        buffer = filled(oracle, VALUES, batch_size=200)
        buffer.sample()
        buffer.extend(records(1))
        oracle.write([0])
        buffer.update_priority(torch.tensor([0]), torch.tensor([1000.0]))
        buffer.extend(records(1))
        oracle.write([1])
        assert oracle.raw[1] == 5.0
        check(buffer, oracle)

    def test_update_of_a_replaced_record_counts_once_it_is_drawn(self) -> None:
        oracle = Oracle()
        buffer = filled(oracle, VALUES, batch_size=200)
        buffer.sample()
        buffer.extend(records(1))
        oracle.write([0])
        assert 0 in buffer.sample(return_info=True)[1]["index"]
        buffer.update_priority(torch.tensor([0]), torch.tensor([0.2]))
        oracle.update([0], [0.2])
        assert buffer.stats().priorities_dropped == 0
        check(buffer, oracle)

    def test_a_slot_that_was_never_drawn_takes_any_priority(self) -> None:
        oracle = Oracle()
        buffer = make_buffer(oracle, 4)
        for count in (4, 2, 4):
            buffer.extend(records(count))
        oracle.write([0, 1, 2, 3])
        buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        oracle.update([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
        assert buffer.stats().priorities_dropped == 0
        check(buffer, oracle)

    def test_generations_that_are_given(self) -> None:
        oracle = Oracle()
        buffer = filled(oracle, VALUES, batch_size=200)
        _, old = buffer.sample(return_info=True)
        buffer.extend(records(2))
        oracle.write([0, 1])
        _, new = buffer.sample(return_info=True)
        assert {0, 1} <= set(old["index"].tolist()) & set(new["index"].tolist())
        late = old["index"] < 2
        buffer.update_priority(old["index"], torch.full((200,), 2.5), generation=old["generation"])
        fresh = old["index"][~late].tolist()
        oracle.update(fresh, [2.5] * len(fresh))
        assert buffer.stats().priorities_dropped == int(late.sum())
        check(buffer, oracle, batches=20)
        buffer.update_priority(new["index"], torch.full((200,), 1.5), generation=new["generation"])
        oracle.update(new["index"].tolist(), [1.5] * 200)
        assert buffer.stats().priorities_dropped == int(late.sum())
        check(buffer, oracle, batches=20)

    def test_update_after_emptying_is_dropped(self) -> None:
        oracle = Oracle()
        buffer = filled(oracle, VALUES, batch_size=200)
        _, info = buffer.sample(return_info=True)
        buffer.empty()
        buffer.extend(records(len(VALUES)))
        buffer.update_priority(info["index"], torch.full((200,), 50.0), generation=info["generation"])
        assert buffer.stats().priorities_dropped == 200
        _, info = buffer.sample(return_info=True)
        assert torch.allclose(info["_weight"], torch.ones(200))

    def test_update_after_a_replacement_by_index_is_dropped(self) -> None:
        oracle = Oracle()
        buffer = filled(oracle, VALUES, batch_size=200)
        _, info = buffer.sample(return_info=True)
        buffer[4:5] = records(1)
        buffer.update_priority(torch.tensor([4]), torch.tensor([0.01]))
        assert buffer.stats().priorities_dropped == 1

    def test_generation_of_another_shape_raises(self) -> None:
        buffer = filled(Oracle(), VALUES)
        with pytest.raises(GleanError, match="generation"):
            buffer.update_priority(torch.tensor([1, 2]), torch.ones(2), generation=torch.ones(3).long())


BAD = {
    "NaN": (torch.tensor([1, 2]), torch.tensor([1.0, float("nan")]), ValueError),
    "infinite": (torch.tensor([1, 2]), torch.tensor([1.0, float("inf")]), ValueError),
    "negative": (torch.tensor([1, 2]), torch.tensor([1.0, -1e-6]), ValueError),
    "NaN scalar": (torch.tensor([1, 2]), float("nan"), ValueError),
    "too few": (torch.tensor([1, 2]), torch.tensor([[1.0], [2.0], [3.0]]), RuntimeError),
    "too many": (torch.tensor([1, 2]), torch.ones(3), RuntimeError),
    "a pair for one": (torch.tensor([1]), torch.ones(2), RuntimeError),
    "too low": (torch.tensor([1, -2]), torch.ones(2), IndexError),
    "outside": (torch.tensor([1, 8]), torch.ones(2), IndexError),
    "far outside": (torch.tensor([1, 10**12]), torch.ones(2), IndexError),
    "the lowest": (torch.tensor([-(2**63)]), torch.ones(1), IndexError),
    "the highest": (torch.tensor([2**63 - 1]), torch.ones(1), IndexError),
    "fractions": (torch.tensor([1.0, 2.5]), torch.ones(2), (IndexError, TypeError, ValueError)),
    "no numbers": (torch.tensor([1, 2]), ["a", "b"], (TypeError, ValueError)),
    "complex": (torch.tensor([1, 2]), torch.ones(2, dtype=torch.complex64), (TypeError, ValueError)),
}


@pytest.mark.parametrize("bad", BAD)
def test_refused_update_changes_nothing(bad: str) -> None:
    index, values, error = BAD[bad]
    oracle = Oracle()
    buffer = filled(oracle, VALUES)
    buffer.sample()
    before = state(buffer)
    with pytest.raises(error) as caught:
        buffer.update_priority(index, values)
    assert isinstance(caught.value, GleanError)
    assert state(buffer) == before
    check(buffer, oracle, batches=20)


def test_update_outside_the_filled_part_raises() -> None:
    buffer = make_buffer(Oracle(), 8)
    with pytest.raises((IndexError, RuntimeError)):
        buffer.update_priority(torch.tensor([0]), torch.ones(1))
    buffer.extend(records(3))
    with pytest.raises(IndexError):
        buffer.update_priority(torch.tensor([3]), torch.ones(1))


def test_samplers_without_priorities_warn() -> None:
    buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(8), batch_size=2)
    buffer.extend(records(4))
    with pytest.warns(UserWarning, match="priorit"):
        buffer.update_priority(torch.tensor([1]), torch.ones(1))
