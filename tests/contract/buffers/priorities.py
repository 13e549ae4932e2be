"""A model of prioritized draws in plain Python: a list of raw priorities, powers and sums."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.tape import chi_square


class Oracle:
    """The state that a prioritized sampler must keep: each slot's raw priority and the largest priority seen."""

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-8) -> None:
        self.alpha, self.beta, self.eps = alpha, beta, eps
        self.raw: dict[int, float] = {}
        self.largest: float | None = None
        self.within: bool = False

    def write(self, slots: list[int]) -> None:
        """Write new records with the largest priority seen so far, or 1 before any was seen. Slot -1 means none.

        With `within`, the records get the largest priority among the remaining records.
        """
        slots = [slot for slot in slots if slot >= 0]
        for slot in slots:
            self.raw.pop(slot, None)
        largest = max(self.raw.values(), default=None) or None if self.within else self.largest
        for slot in slots:
            self.raw[slot] = 1.0 if largest is None else largest

    def update(self, slots: list[int], values: list[float]) -> None:
        """Set priorities; for a repeated slot the last value counts."""
        for slot, value in zip(slots, values, strict=True):
            self.raw[slot] = value
        if values:
            self.largest = max([*values, *([] if self.largest is None else [self.largest])])

    def stored(self, slot: int) -> float:
        return (self.raw[slot] + self.eps) ** self.alpha

    def probability(self, slot: int) -> float:
        return self.stored(slot) / math.fsum(map(self.stored, self.raw))

    def weights(self, slots: list[int], normalize: str = "buffer") -> list[float]:
        among = slots if normalize == "batch" else list(self.raw)
        least = min(map(self.stored, among))
        return [(self.stored(slot) / least) ** -self.beta for slot in slots]


def records(count: int, start: int = 0) -> TensorDict:
    """Return records numbered from `start`."""
    return TensorDict({"x": torch.arange(start, start + count)}, [count])


def make_buffer(oracle: Oracle, capacity: int = 8, batch_size: int = 64, **kwargs: Any) -> Any:
    """Return a plain buffer with a prioritized sampler that has the oracle's parameters."""
    sampler = parts.PrioritizedSampler(
        max_capacity=capacity, alpha=oracle.alpha, beta=oracle.beta, eps=oracle.eps, **kwargs
    )
    sampler.set_seed(0)
    return parts.ReplayBuffer(
        storage=parts.LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size
    )


def filled(oracle: Oracle, values: list[float], **kwargs: Any) -> Any:
    """Return a buffer with one record per value, which is the record's priority."""
    buffer = make_buffer(oracle, len(values), **kwargs)
    buffer.extend(records(len(values)))
    oracle.write(list(range(len(values))))
    buffer.update_priority(torch.arange(len(values)), torch.tensor(values))
    oracle.update(list(range(len(values))), values)
    return buffer


def close(found: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Check equality to single precision."""
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=rtol,
        atol=1e-9,
    )


def check(buffer: Any, oracle: Oracle, batches: int = 60, normalize: str = "buffer") -> None:
    """Check draws by chi-square, and check every weight."""
    counts: Counter[int] = Counter()
    for _ in range(batches):
        _, info = buffer.sample(return_info=True)
        slots = info["index"].tolist()
        close(info["_weight"], oracle.weights(slots, normalize))
        assert info["_weight"] is info["priority_weight"] or torch.equal(
            info["_weight"], info["priority_weight"]
        )
        counts.update(slots)
    total = sum(counts.values())
    often = [slot for slot in oracle.raw if oracle.probability(slot) * total >= 5]
    rare = 1 - math.fsum(map(oracle.probability, often))
    observed = [counts[slot] for slot in often]
    if rare * total >= 5:
        chi_square([*observed, total - sum(observed)], [*map(oracle.probability, often), rare])
    else:
        assert total - sum(observed) <= 25, "rare records come often"
        share = math.fsum(map(oracle.probability, often))
        chi_square(observed, [oracle.probability(slot) / share for slot in often])
