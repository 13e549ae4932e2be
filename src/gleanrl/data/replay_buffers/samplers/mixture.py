"""How a batch is shared among several buffers: which member each part of it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gleanrl.arguments import positive
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from gleanrl.seeding import GeneratorState, GivenGenerator, OwnedGenerator, RandomSource
from gleanrl.state import Stateful


class Mixture(Stateful[GeneratorState]):
    """Chooses a member for each part of a batch, by a random generator of its own.

    Not thread-safe: its owner locks.

    Args:
        members: how many there are.
        p: how often each member is chosen, numbers of 0 or more that needn't add up to 1; None for equally
            often. Members are chosen with replacement.
        sample_from_all: whether each batch has one part from every member, in their order.
        num_buffer_sampled: parts of a batch; None for as many as there are members.
        seed: where the random sequence starts; None takes a seed from torch's global generator at the first
            choice.

    Raises:
        InvalidArgumentError: a bad number.
        UnsupportedError: `p` together with `sample_from_all`.

    Examples:
        >>> Mixture(2, p=[0, 3], num_buffer_sampled=4).choose()
        tensor([1, 1, 1, 1])
    """

    def __init__(
        self,
        members: int,
        p: Sequence[float] | torch.Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        seed: int | None = None,
    ) -> None:
        if sample_from_all and p is not None:
            raise UnsupportedError(
                "p says how often members are chosen, sample_from_all takes every one: give one of them"
            )
        self.members = members
        self.sample_from_all = bool(sample_from_all)
        self._num_asked = _checked_count(num_buffer_sampled, members, self.sample_from_all)
        self._p = None if p is None else _shares(p, members)
        self._random: RandomSource = OwnedGenerator(seed)

    @property
    def p(self) -> torch.Tensor | None:
        """How often each member is chosen, ``(members,)`` float64 with the sum 1; None for equally often."""
        return None if self._p is None else self._p.clone()

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch."""
        return self.members if self._num_asked is None else self._num_asked

    def among(self, chosen: list[int]) -> Mixture:
        """Return a mixture of some members, in the same proportions, with choices of its own."""
        p = None if self._p is None else self._p[chosen]
        count = None if self.sample_from_all else self._num_asked
        return Mixture(len(chosen), p, self.sample_from_all, count)

    def share(self, batch_size: int) -> int:
        """Return the size of each part of a batch; `InvalidArgumentError` if the parts weren't equal."""
        parts = self.num_buffer_sampled
        if batch_size < 1 or batch_size % parts:
            raise InvalidArgumentError(
                f"batch_size: expected a multiple of {parts}, the parts that a batch is sampled in "
                f"(num_buffer_sampled), got {batch_size}"
            )
        return batch_size // parts

    def choose(self) -> torch.Tensor:
        """Return the member of each part of the next batch, ``(num_buffer_sampled,)`` int64."""
        count = self.num_buffer_sampled
        if self.sample_from_all:
            return torch.arange(count, device="cpu")
        if self._p is None:
            return self._random.integers(self.members, count)
        # The first member whose cumulated share lies above the draw: never one with the share 0.
        cumulated = self._p.cumsum(0)
        drawn = self._random.uniforms(count)
        return torch.searchsorted(cumulated, drawn * cumulated[-1], right=True)

    def set_seed(self, seed: int) -> None:
        """Start the random sequence of `seed`."""
        self._random.seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a user's generator from now on; None for one of the mixture's own."""
        self._random = OwnedGenerator() if generator is None else GivenGenerator(generator)

    def snapshot(self) -> GeneratorState:
        """Return the random generator's state."""
        return self._random.snapshot()

    def parse(self, state: Any) -> GeneratorState:
        """Return the value of a saved state; `SchemaError` for anything else."""
        return self._random.parse(state)

    def adopt(self, value: GeneratorState) -> None:
        """Go on from a value."""
        self._random.adopt(value)


def _checked_count(count: Any, members: int, sample_from_all: bool) -> int | None:
    if count is None:
        return None
    count = positive("num_buffer_sampled", count)
    if sample_from_all and count != members:
        raise InvalidArgumentError(
            f"num_buffer_sampled: sample_from_all samples all {members} members, got {count}; leave it out"
        )
    return count


def _shares(p: Any, members: int) -> torch.Tensor:
    try:
        shares = torch.as_tensor(p, dtype=torch.float64, device="cpu").clone()
    except (TypeError, ValueError, RuntimeError) as cause:
        raise InvalidArgumentError(f"p: expected {members} numbers, got {p!r}") from cause
    total = float(shares.sum())
    if shares.shape != (members,) or not bool((shares >= 0).all()) or not 0 < total < math.inf:
        raise InvalidArgumentError(
            f"p: expected {members} numbers of 0 or more, one for each member and not all 0, got {p!r}"
        )
    return shares / total
