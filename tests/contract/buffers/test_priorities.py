"""Prioritized draws and their weights agree with a plain Python oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.priorities import Oracle, check, close, filled, make_buffer, records

VALUES = [0.3, 2.0, 1.0, 0.7, 5.0, 0.05, 1.5, 3.0]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_draws_and_weights(alpha: float, eps: float) -> None:
    oracle = Oracle(alpha, 0.4, eps)
    check(filled(oracle, VALUES), oracle)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("normalize", ["buffer", "batch"])
def test_weights_follow_both_normalisations(beta: float, normalize: str) -> None:
    oracle = Oracle(0.6, beta)
    buffer = filled(oracle, VALUES, normalize=normalize, batch_size=3)
    check(buffer, oracle, batches=400, normalize=normalize)
    if normalize == "batch":
        for _ in range(50):
            assert buffer.sample(return_info=True)[1]["_weight"].max() == 1


def test_the_default_normalisation_is_over_the_buffer() -> None:
    oracle = Oracle(1.0, 1.0)
    buffer = filled(oracle, [1.0, 4.0, 4.0, 4.0], batch_size=2)
    weights = [buffer.sample(return_info=True)[1]["_weight"] for _ in range(100)]
    assert any(float(weight.max()) < 0.3 for weight in weights)


def test_one_tiny_priority_and_weights_of_a_batch() -> None:
    oracle = Oracle(0.6, 1.0, 0.0)
    buffer = filled(oracle, [1e-30, 1.0, 2.0, 3.0], normalize="batch")
    for _ in range(20):
        _, info = buffer.sample(return_info=True)
        assert info["_weight"].min() > 0.4 and info["_weight"].max() == 1


def test_records_of_priority_zero_are_never_drawn_without_eps() -> None:
    oracle = Oracle(0.6, 0.4, 0.0)
    values = [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0]
    buffer = filled(oracle, values)
    for _ in range(200):
        _, info = buffer.sample(return_info=True)
        assert set(info["index"].tolist()) <= {1, 3, 6}
        assert torch.isfinite(info["_weight"]).all() and (info["_weight"] > 0).all()


def test_sampling_with_all_priorities_zero_raises() -> None:
    buffer = filled(Oracle(0.6, 0.4, 0.0), [0.0, 0.0, 0.0])
    with pytest.raises(RuntimeError):
        buffer.sample()
    buffer.update_priority(torch.tensor([1]), torch.tensor([2.0]))
    assert set(buffer.sample(return_info=True)[1]["index"].tolist()) == {1}


@pytest.mark.parametrize("values", [[1e38, 1.0, 1.0], [1e-30, 1e-30, 1e-30], [3e38, 3e38, 3e38]])
def test_extreme_priorities_starve_nothing_by_overflow(values: list[float]) -> None:
    oracle = Oracle(0.6, 0.4, 0.0)
    buffer = make_buffer(oracle, len(values))
    buffer.extend(records(len(values)))
    buffer.update_priority(torch.arange(len(values)), torch.tensor(values, dtype=torch.float64))
    oracle.update([0, 1, 2], values)
    for _ in range(20):
        _, info = buffer.sample(return_info=True)
        slots = info["index"].tolist()
        assert torch.isfinite(info["_weight"]).all()
        if len(set(values)) == 1:
            close(info["_weight"], [1.0] * len(slots))
            assert set(slots) == {0, 1, 2}
        else:
            assert set(slots) == {0}


def test_alpha_beta_and_eps_may_change_at_any_time() -> None:
    oracle = Oracle(0.6, 0.4)
    buffer = filled(oracle, VALUES)
    for alpha, beta, eps in (
        (1.0, 0.4, 1e-8),
        (0.3, 1.0, 1e-8),
        (0.3, 0.7, 0.2),
        (0.0, 0.5, 0.2),
        (0.6, 0.4, 1e-8),
    ):
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            setattr(oracle, name, value)
            setattr(buffer.sampler, name, value)
            assert getattr(buffer.sampler, name) == value
        check(buffer, oracle, batches=40)


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "a"])
def test_bad_exponents_are_refused(name: str, value: Any) -> None:
    oracle = Oracle()
    buffer = filled(oracle, VALUES)
    with pytest.raises((ValueError, TypeError), match=name):
        setattr(buffer.sampler, name, value)
    check(buffer, oracle, batches=20)


def test_new_records_get_the_largest_raw_priority() -> None:
    # (5 + eps) ** .6 = 2.627: the priority is transformed once, and doesn't depend on its place in the batch.
    oracle = Oracle(0.6, 1.0)
    buffer = make_buffer(oracle, 8)
    buffer.extend(records(4))
    oracle.write([0, 1, 2, 3])
    check(buffer, oracle, batches=20)
    buffer.update_priority(torch.tensor([3, 1, 2, 0]), torch.tensor([1.0, 5.0, 1.0, 1.0]))
    oracle.update([3, 1, 2, 0], [1.0, 5.0, 1.0, 1.0])
    buffer.extend(records(2))
    buffer.add(records(1)[0])
    oracle.write([4, 5, 6])
    assert oracle.raw[6] == 5.0
    check(buffer, oracle)
    close(oracle.stored(6), 5.0**0.6)
    buffer.update_priority(torch.tensor([1]), torch.tensor([0.5]))
    oracle.update([1], [0.5])
    buffer.extend(records(3))
    oracle.write([7, 0, 1])
    assert oracle.raw[1] == 5.0
    check(buffer, oracle)


def test_the_largest_priority_may_be_below_one() -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = make_buffer(oracle, 8)
    buffer.extend(records(4))
    oracle.write([0, 1, 2, 3])
    buffer.update_priority(torch.arange(4), torch.tensor([0.5, 0.1, 0.2, 0.1]))
    oracle.update([0, 1, 2, 3], [0.5, 0.1, 0.2, 0.1])
    buffer.extend(records(2))
    oracle.write([4, 5])
    assert oracle.raw[4] == 0.5
    check(buffer, oracle)


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_new_records_get_the_largest_raw_priority_after_alpha_changed(alpha: float) -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = filled(oracle, [5.0, 1.0, 1.0, 1.0])
    buffer.sampler.alpha = oracle.alpha = alpha
    buffer.extend(records(1))
    oracle.write([0])
    buffer.extend(records(1))
    oracle.write([1])
    assert oracle.raw[1] == 5.0
    check(buffer, oracle)


def test_the_largest_priority_of_all_times() -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = filled(oracle, [5.0, 3.0, 1.0, 1.0])
    buffer.extend(records(4))
    oracle.write([0, 1, 2, 3])
    buffer.update_priority(torch.arange(4), torch.tensor([2.0, 1.0, 1.0, 1.0]))
    oracle.update([0, 1, 2, 3], [2.0, 1.0, 1.0, 1.0])
    buffer.extend(records(1))
    oracle.write([0])
    assert oracle.raw[0] == 5.0
    check(buffer, oracle)


def test_the_largest_priority_within_the_buffer_is_forgotten_with_its_record() -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = filled(oracle, [5.0, 3.0, 1.0, 1.0], max_priority_within_buffer=True)
    oracle.within = True
    for slot in range(4):
        buffer.extend(records(1))
        oracle.write([slot])
        check(buffer, oracle, batches=20)
    assert oracle.raw[1] == 3.0
    buffer.update_priority(torch.arange(4), torch.tensor([0.1, 0.2, 0.4, 0.3]))
    oracle.update([0, 1, 2, 3], [0.1, 0.2, 0.4, 0.3])
    buffer.extend(records(1))
    oracle.write([0])
    check(buffer, oracle)


@pytest.mark.parametrize("length", [4, 5, 11])
def test_long_writes(length: int) -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = filled(oracle, [5.0, 1.0, 2.0, 1.0])
    oracle.write(buffer.extend(records(length)).tolist())
    check(buffer, oracle, batches=20)


def test_an_emptied_buffer_forgets_its_priorities() -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = filled(oracle, VALUES)
    buffer.empty()
    with pytest.raises(RuntimeError):
        buffer.sample()
    buffer.extend(records(3))
    _, info = buffer.sample(return_info=True)
    assert set(info["index"].tolist()) <= {0, 1, 2}
    close(info["_weight"], [1.0] * 64)


def test_draws_stay_in_the_filled_part() -> None:
    oracle = Oracle()
    buffer = make_buffer(oracle, 1000)
    buffer.extend(records(3))
    for _ in range(50):
        assert buffer.sample(return_info=True)[1]["index"].max() < 3


def test_a_restored_buffer_has_the_same_priorities_and_draws() -> None:
    oracle = Oracle()
    buffer = filled(oracle, VALUES)
    buffer.sample()
    buffer.sampler.beta = oracle.beta = 0.9
    other = make_buffer(Oracle(0.1, 0.1), len(VALUES))
    other.load_state_dict(buffer.state_dict())
    for _ in range(5):
        (a, b), (c, d) = buffer.sample(return_info=True), other.sample(return_info=True)
        assert (a == c).all() and torch.equal(b["index"], d["index"])
        assert torch.equal(b["_weight"], d["_weight"])
    check(other, oracle, batches=20)
    for one in (buffer, other):
        one.extend(records(1))
    oracle.write([0])
    check(other, oracle)
    check(buffer, oracle)


def test_other_dtypes_are_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="dtype"):
        parts.PrioritizedSampler(max_capacity=8, alpha=0.6, beta=0.4, dtype=torch.int64)


def test_a_million_updates_leave_no_drift() -> None:
    # After many updates of a wide tree, all leaves but one are set to zero: only this one may be drawn.
    size = 5000
    oracle = Oracle(1.0, 1.0, 0.0)
    buffer = make_buffer(oracle, size, batch_size=256)
    buffer.extend(records(size))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        index = torch.randint(size, (5000,), generator=generator)
        buffer.update_priority(
            index, 10 ** (12 * torch.rand(5000, generator=generator, dtype=torch.float64) - 6)
        )
    zeros = torch.zeros(size)
    for last in (0, 17, size - 1):
        zeros[last] = 1e-3
        buffer.update_priority(torch.arange(size), zeros)
        for _ in range(20):
            assert set(buffer.sample(return_info=True)[1]["index"].tolist()) == {last}
        zeros[last] = 0


def test_every_pair_of_zero_and_positive_neighbours() -> None:
    oracle = Oracle(1.0, 0.0, 0.0)
    for values in itertools.product([0.0, 1e-12, 1.0], repeat=4):
        if any(values):
            buffer = filled(oracle, list(values), batch_size=16)
            drawn = set(buffer.sample(return_info=True)[1]["index"].tolist())
            assert all(values[slot] > 0 for slot in drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_dtype_of_the_sampler(dtype: torch.dtype) -> None:
    oracle = Oracle()
    buffer = filled(oracle, VALUES, dtype=dtype)
    assert buffer.sample(return_info=True)[1]["_weight"].dtype == dtype
    check(buffer, oracle, batches=20)


@pytest.mark.parametrize("first", ["extend", "update", "sample"])
def test_restored_priorities_are_right_before_any_next_call(first: str) -> None:
    oracle = Oracle(0.6, 1.0)
    saved = filled(oracle, VALUES)
    buffer = make_buffer(oracle, len(VALUES))
    buffer.load_state_dict(saved.state_dict())
    if first == "extend":
        buffer.extend(records(2))
        oracle.write([0, 1])
    elif first == "update":
        buffer.update_priority(torch.tensor([6]), torch.tensor([9.0]))
        oracle.update([6], [9.0])
    check(buffer, oracle, batches=30)


def test_priorities_below_single_precision_are_drawn() -> None:
    buffer = make_buffer(Oracle(0.6, 0.4, 0.0), 3)
    buffer.extend(records(3))
    buffer.update_priority(torch.arange(3), torch.full((3,), 1e-300, dtype=torch.float64))
    assert set(buffer.sample(return_info=True)[1]["index"].tolist()) == {0, 1, 2}


def test_records_replaced_by_index_are_new_ones() -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = filled(oracle, VALUES)
    buffer[5:7] = records(2)
    oracle.write([5, 6])
    check(buffer, oracle)
    buffer["x"] = torch.arange(len(VALUES))
    check(buffer, oracle)


def test_more_room_for_priorities_than_the_storage_has() -> None:
    oracle = Oracle(0.6, 1.0)
    sampler = parts.PrioritizedSampler(max_capacity=20, alpha=0.6, beta=1.0)
    buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(8), sampler=sampler, batch_size=64, seed=0)
    oracle.write(buffer.extend(records(6)).tolist())
    values = [1.0 + slot % 3 for slot in range(6)]
    buffer.update_priority(torch.arange(6), torch.tensor(values))
    oracle.update(list(range(6)), values)
    for count in (5, 5, 7, 11, 3):
        oracle.write(buffer.extend(records(count)).tolist())
        check(buffer, oracle, batches=20)


def test_records_that_the_writer_of_the_best_replaces_are_new_ones() -> None:
    oracle = Oracle(0.6, 1.0)
    buffer = parts.TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=1.0,
        storage=parts.LazyTensorStorage(4),
        writer=parts.TensorDictMaxValueWriter(rank_key="x"),
        batch_size=64,
        seed=0,
    )
    oracle.write(buffer.extend(records(4)).tolist())
    buffer.update_priority(torch.arange(4), torch.tensor([0.5, 2.0, 1.0, 3.0]))
    oracle.update([0, 1, 2, 3], [0.5, 2.0, 1.0, 3.0])
    oracle.write(buffer.extend(records(2, start=10)).tolist())
    check(buffer, oracle)
