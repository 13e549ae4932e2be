"""The samplers of a buffer ensemble, and the mixture that assigns each part of a batch to a member."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl._os.interrupts import to_the_end
from gleanrl._state.rng import GeneratorState, OwnedGenerator, RandomSource, UserGenerator
from gleanrl._state.state import Stateful
from gleanrl._util import positive
from gleanrl.data.replay_buffers.component_base import Part
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.storages.indexing import members_at
from gleanrl.data.replay_buffers.utils import load_all, states_in
from gleanrl.errors import InvalidArgumentError, SchemaError, UnsupportedError


class Mixture(Stateful[GeneratorState]):
    """Chooses a member for each part of a batch with its own random generator.

    Not thread-safe: its owner locks.

    Args:
        members: number of members.
        p: how often each member is chosen: numbers of 0 or more, which needn't sum to 1. None for equally often.
            Members are chosen with replacement.
        sample_from_all: whether each batch has one part from every member, in their order.
        num_buffer_sampled: parts of a batch; None for as many as there are members.
        seed: seed of the random sequence. None takes a seed from torch's global generator at the first choice.

    Raises:
        InvalidArgumentError: a value is out of range.
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
                "p and sample_from_all exclude each other, because sample_from_all=True samples every member; give "
                "one of them"
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
        """Number of parts in a batch."""
        return self.members if self._num_asked is None else self._num_asked

    def among(self, chosen: list[int]) -> Mixture:
        """Return a mixture of some members in the same proportions, with a new, unseeded random generator.

        Raises:
            InvalidArgumentError: all of these members have the share 0.
        """
        p = None if self._p is None else self._p[chosen]
        count = None if self.sample_from_all else self._num_asked
        return Mixture(len(chosen), p, self.sample_from_all, count)

    def share(self, batch_size: int) -> int:
        """Return the size of each part of a batch; raise `InvalidArgumentError` if the parts weren't equal."""
        parts = self.num_buffer_sampled
        if batch_size < 1 or batch_size % parts:
            raise InvalidArgumentError(
                f"batch_size: expected a multiple of {parts}, the number of parts of a batch (num_buffer_sampled), "
                f"got {batch_size}"
            )
        return batch_size // parts

    def choose(self) -> torch.Tensor:
        """Draw the member of each part of the next batch, ``(num_buffer_sampled,)`` int64."""
        count = self.num_buffer_sampled
        if self.sample_from_all:
            return torch.arange(count, device="cpu")
        if self._p is None:
            return self._random.integers(self.members, count)
        # `right=True` finds the first member whose cumulative share exceeds the draw, so a share of 0 is never chosen.
        cumulated = self._p.cumsum(0)
        drawn = self._random.uniforms(count)
        return torch.searchsorted(cumulated, drawn * cumulated[-1], right=True)

    def set_seed(self, seed: int) -> None:
        """Restart the random sequence from `seed`."""
        self._random.seed(seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from a user's generator from now on; None creates a private one."""
        self._random = OwnedGenerator() if generator is None else UserGenerator(generator)

    def snapshot(self) -> GeneratorState:
        """Return the random generator's state."""
        return self._random.snapshot()

    def parse(self, state: Any) -> GeneratorState:
        """Return the value of a saved state; raise `SchemaError` for any other state."""
        return self._random.parse(state)

    def adopt(self, value: GeneratorState) -> None:
        """Continue from a value."""
        self._random.adopt(value)


def _checked_count(count: Any, members: int, sample_from_all: bool) -> int | None:
    if count is None:
        return None
    count = positive("num_buffer_sampled", count)
    if sample_from_all and count != members:
        raise InvalidArgumentError(
            f"num_buffer_sampled: expected {members}, because sample_from_all=True samples every member, got {count}; "
            "leave it out"
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


class SamplerEnsemble(Part):
    """Several samplers, and the `Mixture` that chooses among them.

    It isn't a `Sampler`: each member draws slots from its own storage. Not thread-safe: its owner locks.

    Args:
        samplers: one for each buffer.
        p: how often each one is chosen (see `Mixture`).
        sample_from_all: whether each batch has one part from every sampler.
        num_buffer_sampled: parts of a batch; None for as many as there are samplers.

    Raises:
        InvalidArgumentError: no sampler is given, or a value is out of range.
        UnsupportedError: `p` together with `sample_from_all`.

    Examples:
        >>> import torch
        >>> from gleanrl.data.replay_buffers import RandomSampler, StorageEnsemble, TensorStorage
        >>> samplers = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True)
        >>> storages = StorageEnsemble(TensorStorage(torch.zeros(3)), TensorStorage(torch.ones(3)))
        >>> index, _ = samplers.sample(storages, 4)
        >>> storages.get(index)
        [(0, tensor([0., 0.])), (1, tensor([1., 1.]))]
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Sequence[float] | torch.Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        for sampler in samplers:
            if not isinstance(sampler, Sampler):
                raise InvalidArgumentError(f"samplers: expected Samplers, got {sampler!r}")
        if not samplers:
            raise InvalidArgumentError("samplers: expected at least one, got none")
        self._samplers = samplers
        self.mixture = Mixture(len(samplers), p, sample_from_all, num_buffer_sampled)
        """Chooses the sampler of each part of a batch."""

    @property
    def p(self) -> torch.Tensor | None:
        """How often each sampler is chosen, ``(samplers,)`` float64 with the sum 1; None for equally often."""
        return self.mixture.p

    @property
    def num_buffer_sampled(self) -> int:
        """Number of parts in a batch."""
        return self.mixture.num_buffer_sampled

    @property
    def ran_out(self) -> bool:
        """Whether the last draw of any sampler ended an epoch."""
        return any(sampler.ran_out for sampler in self._samplers)

    def __len__(self) -> int:
        """Return the number of samplers."""
        return len(self._samplers)

    def __iter__(self) -> Iterator[Sampler]:
        """Yield the samplers."""
        return iter(self._samplers)

    def __getitem__(self, index: Any) -> Any:
        """Return the sampler at an int, or an ensemble of several (with their `p`) at a slice, list or tensor.

        The ensemble shares the samplers. See `Mixture.among` for its random generator.
        """
        chosen = members_at(index, len(self._samplers))
        if isinstance(chosen, int):
            return self._samplers[chosen]
        some = SamplerEnsemble(*(self._samplers[position] for position in chosen))
        some.mixture = self.mixture.among(chosen)
        return some

    def sample(self, storages: Any, batch_size: int) -> tuple[TensorDict, TensorDict]:
        """Return an index and the info of its rows, for callers without a buffer.

        If a part of the batch raises, samplers that use records up go back to their positions before the call. The
        mixture and all other samplers don't.

        Args:
            storages: a `StorageEnsemble`, or a sequence of storages.
            batch_size: transitions to draw, a multiple of `num_buffer_sampled`.

        Returns:
            The index in the form that `StorageEnsemble.get` takes, and the whole info (see `join_infos`).

        Raises:
            InvalidArgumentError: `batch_size` isn't a multiple of `num_buffer_sampled`.
            SchemaError: the parts differ in the shapes of an entry.
            EmptyBufferError: a chosen sampler can't draw any record.
        """
        each = self.mixture.share(batch_size)
        chosen = self.mixture.choose()
        infos, positions = [], {}
        for member in dict.fromkeys(chosen.tolist()):
            sampler = self._samplers[member]
            if sampler.uses_up:
                sampler.random.begin()
                positions[member] = sampler.draw_position()
        with all_or_none(positions, lambda member, position: self._samplers[member].adopt(position)):
            for member in chosen.tolist():
                index, extras = self._samplers[member].sample(storages[member], each)
                infos.append({"index": index, **extras})
            info = join_infos(chosen, infos)
        return info.get("index"), info

    def set_seed(self, seed: int) -> int:
        """Seed the mixture with `seed`, and the samplers with the following numbers.

        Returns:
            The last seed used.
        """
        self.mixture.set_seed(seed)
        for offset, sampler in enumerate(self._samplers, 1):
            sampler.set_seed(seed + offset)
        return seed + len(self._samplers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the mixture and of each sampler."""
        return {
            "mixture": self.mixture.state_dict(),
            "samplers": [sampler.state_dict() for sampler in self._samplers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            SchemaError: the state doesn't fit; nothing changed.
        """
        states = states_in(state_dict, "samplers", len(self._samplers))
        load_all([self.mixture, *self._samplers], [state_dict.get("mixture"), *states])


@contextmanager
def all_or_none(positions: Mapping[int, Any], go_back: Callable[[int, Any], None]) -> Iterator[None]:
    """Run a block that draws parts of a batch; on any exception restore the members in `positions`.

    Otherwise an interrupt between two parts would use up rows that the caller never gets.

    Args:
        positions: position of each member's next batch, taken before the block; members without one aren't restored.
        go_back: restores a member to its position; calling it twice has the same effect as calling it once.
    """
    try:
        yield
    except BaseException:

        def change() -> None:
            for member, position in positions.items():
                go_back(member, position)

        to_the_end(change)
        raise


def join_infos(chosen: torch.Tensor, infos: Sequence[Mapping[Any, Any]]) -> TensorDict:
    """Return the infos of the parts of a batch as one TensorDict ``[parts, n]``.

    Args:
        chosen: the member of each part, ``(parts,)`` int64.
        infos: the info of each part: ``"index"``, ``"generation"``, and the entries of the member's sampler.

    Returns:
        ``("index", "buffer_ids")`` and ``("index", "index")``, ``(parts, n)`` each. With several batch dimensions the
        latter is ``(parts, n, ndim)``. Every other entry that all parts have is ``(parts, n, ...)``.

    Raises:
        SchemaError: an entry has different shapes in different parts.
    """
    common = [key for key in infos[0] if all(key in info for info in infos)]
    entries = {key: _stacked(key, [info[key] for info in infos]) for key in common}
    rows = entries.pop("index")
    size = rows.shape[:2]
    members = chosen[:, None].expand(size).clone()
    return TensorDict({"index": TensorDict({"buffer_ids": members, "index": rows}, size), **entries}, size)


def _stacked(key: Any, parts: list[Any]) -> torch.Tensor:
    tensors = [torch.stack(part, -1) if isinstance(part, tuple) else part for part in parts]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise SchemaError(
            f"sample: the info {key!r} of the members differs in shape, {sorted(shapes)}, and can't be stacked; "
            "sample them one by one, or make their batches equally long (drop_last=True, strict_length=True)"
        )
    return torch.stack(tensors)
