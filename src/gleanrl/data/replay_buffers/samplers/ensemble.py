"""The samplers of the members of an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.mixture import Mixture
from gleanrl.data.replay_buffers.showing import Shown
from gleanrl.data.replay_buffers.storages.indexing import members_at
from gleanrl.data.replay_buffers.utils import load_all, states_in
from gleanrl.errors import InvalidArgumentError, SchemaError
from gleanrl.system.interrupts import to_the_end


class SamplerEnsemble(Shown):
    """Several samplers side by side, and the `Mixture` that chooses among them.

    It isn't a `Sampler`: slots are drawn by the members, each from its own storage. Not thread-safe: its owner
    locks.

    Args:
        samplers: one for each buffer.
        p: how often each one is chosen (see `Mixture`).
        sample_from_all: whether each batch has one part from every one.
        num_buffer_sampled: parts of a batch; None for as many as there are samplers.

    Raises:
        InvalidArgumentError: no samplers, or a bad number.
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
            raise InvalidArgumentError("samplers: an ensemble has at least one")
        self._samplers = samplers
        self.mixture = Mixture(len(samplers), p, sample_from_all, num_buffer_sampled)
        """Which sampler each part of a batch comes from."""

    @property
    def p(self) -> torch.Tensor | None:
        """How often each sampler is chosen, ``(samplers,)`` float64 with the sum 1; None for equally often."""
        return self.mixture.p

    @property
    def num_buffer_sampled(self) -> int:
        """Parts of a batch."""
        return self.mixture.num_buffer_sampled

    @property
    def ran_out(self) -> bool:
        """Whether the last draw of a sampler ended an epoch."""
        return any(sampler.ran_out for sampler in self._samplers)

    def __len__(self) -> int:
        """Return the number of samplers."""
        return len(self._samplers)

    def __iter__(self) -> Iterator[Sampler]:
        """Yield the samplers."""
        return iter(self._samplers)

    def __getitem__(self, index: Any) -> Any:
        """Return the sampler at an int; at a slice, list or tensor an ensemble of them, `p` among them."""
        chosen = members_at(index, len(self._samplers))
        if isinstance(chosen, int):
            return self._samplers[chosen]
        some = SamplerEnsemble(*(self._samplers[position] for position in chosen))
        some.mixture = self.mixture.among(chosen)
        return some

    def sample(self, storages: Any, batch_size: int) -> tuple[TensorDict, TensorDict]:
        """Return an index and what comes with it, for callers without a buffer.

        Args:
            storages: a `StorageEnsemble`, or a sequence of storages.
            batch_size: transitions, a multiple of `num_buffer_sampled`.

        Returns:
            The index, as `StorageEnsemble.get` takes it, and the whole info (see `join_infos`).
        """
        each = self.mixture.share(batch_size)
        chosen = self.mixture.choose()
        infos, places = [], {}
        for member in dict.fromkeys(chosen.tolist()):
            sampler = self._samplers[member]
            if sampler.uses_up:
                sampler.random.begin()
                places[member] = sampler.place()
        with all_or_none(places, lambda member, place: self._samplers[member].adopt(place)):
            for member in chosen.tolist():
                index, extras = self._samplers[member].sample(storages[member], each)
                infos.append({"index": index, **extras})
            info = join_infos(chosen, infos)
        return info.get("index"), info

    def set_seed(self, seed: int) -> int:
        """Start the choices' sequence of `seed`, and those of the samplers of the numbers after it.

        Returns:
            The last seed used.
        """
        self.mixture.set_seed(seed)
        for offset, sampler in enumerate(self._samplers, 1):
            sampler.set_seed(seed + offset)
        return seed + len(self._samplers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the choices and of each sampler."""
        return {
            "mixture": self.mixture.state_dict(),
            "samplers": [sampler.state_dict() for sampler in self._samplers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            SchemaError: a state that doesn't fit; nothing changed.
        """
        states = states_in(state_dict, "samplers", len(self._samplers))
        load_all([self.mixture, *self._samplers], [state_dict.get("mixture"), *states])


@contextmanager
def all_or_none(places: Mapping[int, Any], go_back: Callable[[int, Any], None]) -> Iterator[None]:
    """Draw parts of a batch; where that raises, an interrupt say, members go back: what nobody gets isn't used up.

    Args:
        places: where the next batch of each member was drawn beforehand; members without one stay.
        go_back: has a member draw there again; doing it twice is the same.
    """
    try:
        yield
    except BaseException:

        def change() -> None:
            for member, place in places.items():
                go_back(member, place)

        to_the_end(change)
        raise


def join_infos(chosen: torch.Tensor, infos: Sequence[Mapping[Any, Any]]) -> TensorDict:
    """Return what comes with the parts of a batch as one TensorDict ``[parts, n]``.

    Args:
        chosen: the member of each part, ``(parts,)`` int64.
        infos: what came with each part: ``"index"``, ``"generation"``, what the member's sampler adds.

    Returns:
        ``("index", "buffer_ids")`` and ``("index", "index")``, ``(parts, n)``, or ``(parts, n, ndim)``
        where members have several batch dimensions; every other entry that all parts have, ``(parts, n, ...)``.

    Raises:
        SchemaError: parts whose entries differ in shape.
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
