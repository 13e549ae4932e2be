"""The members of an ensemble: made of parts that lie side by side, and served as a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

from tensordict import TensorDictBase

from gleanrl.data.boundaries import marks_among
from gleanrl.data.replay_buffers.buffer import ReplayBuffer
from gleanrl.data.replay_buffers.draws import Keys, Place
from gleanrl.data.replay_buffers.gate import Gate
from gleanrl.data.replay_buffers.pipeline import Pipeline, none_returned
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.ensemble import all_or_none, join_infos
from gleanrl.data.replay_buffers.samplers.mixture import Mixture
from gleanrl.data.replay_buffers.server import Served, Server
from gleanrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from gleanrl.data.replay_buffers.utils import stack_samples
from gleanrl.errors import InvalidArgumentError
from gleanrl.layout import mark_rows


class EnsembleServer(Server):
    """Has members serve parts of a batch and puts them together; no two locks are held at a time.

    Where one refuses its part, or an interrupt comes, those that the others have drawn by then aren't used up, unless
    somebody else drew from them meanwhile.

    Args:
        gate: for the choices.
        members: the buffers.
        mixture: what chooses among them.
        transforms: act on the whole.
        batch_size: see `Server`.
        collate_fn: makes a batch of the members' samples; None for stacking them.
    """

    of = "an ensemble"

    def __init__(
        self,
        gate: Gate,
        members: Sequence[ReplayBuffer],
        mixture: Mixture,
        transforms: Pipeline,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__(batch_size)
        if self.batch_size is not None:
            mixture.share(self.batch_size)
        self.collate_fn = collate_fn
        self._gate = gate
        self._members = members
        self._mixture = mixture
        self._transforms = transforms

    def serve(self, size: int, keys: Keys | None, wants_info: bool) -> Served:
        """Return a batch; it ends an epoch if a member's ended with it."""
        each = self._mixture.share(size)
        with self._gate.lock:
            chosen = self._mixture.choose()
        numbers, parts = chosen.tolist(), list[Served]()
        draws = {number: self._members[number].server.draws for number in numbers}
        places = {number: place for number, of in draws.items() if (place := of.place()) is not None}

        def go_back(number: int, place: Place) -> None:
            draws[number].go_back(place, numbers[: len(parts)].count(number))

        with all_or_none(places, go_back):
            for number in numbers:
                parts.append(self._members[number].server.as_user(each, keys, True))
                if self._transforms.reads:  # they have to know where slices end, whatever the member's class
                    mark_rows(parts[-1].batch, marks_among(parts[-1].info), each)
            info = join_infos(chosen, [part.info for part in parts])
            index = info.get("index") if keys is None else None
            batch = self.finish([part.batch for part in parts], numbers, index)
        return Served(batch, info if wants_info else None, any(part.ran_out for part in parts), 0)

    def finish(self, samples: list[Any], members: Sequence[int], index: Any = None) -> Any:
        """Return the members' samples as the user gets them, with the index that says where they came from."""
        if self.collate_fn is None:
            batch = stack_samples(samples, [f"member {member}" for member in members])
        else:
            batch = self.collate_fn(samples)
            if batch is None:
                raise none_returned("collate_fn", self.collate_fn)
        if (
            index is not None
            and isinstance(batch, TensorDictBase)
            and batch.batch_size[:2] == index.batch_size
        ):
            batch.set("index", index.to(batch.device) if batch.device else index.clone())
        return self._transforms.read(batch)

    def new_epoch(self) -> None:
        """Begin a new epoch of every member."""
        for member in self._members:
            member.server.new_epoch()


def assemble(storages: Any, samplers: Any, writers: Any, collate_fns: Any) -> tuple[ReplayBuffer, ...]:
    """Return buffers made of parts, which lie side by side in ensembles or sequences of equal length.

    The writer of a buffer that is in use stays that buffer's, which continues to write to the storage; the member,
    which is read, gets another one. A sampler of a buffer that is in use stands for that buffer, if the storage is the
    buffer's, too, and is read in the same way.

    Raises:
        InvalidArgumentError: no storages or samplers, or parts of another number.
    """
    if storages is None or samplers is None:
        raise InvalidArgumentError(
            "rbs: expected ReplayBuffers, or else storages= and samplers= to make them of"
        )
    held = storages.storages if isinstance(storages, StorageEnsemble) else tuple(storages)
    transforms = storages.transforms if isinstance(storages, StorageEnsemble) else (None,) * len(held)
    columns = {
        "samplers": tuple(samplers),
        "writers": (None,) * len(held) if writers is None else tuple(writers),
        "collate_fns": (None,) * len(held) if collate_fns is None else tuple(collate_fns),
    }
    for name, column in columns.items():
        if len(column) != len(held):
            raise InvalidArgumentError(
                f"{name}: expected {len(held)}, one for each storage, got {len(column)}"
            )
    return tuple(starmap(_member, zip(held, transforms, *columns.values(), strict=True)))


def _member(storage: Any, transform: Any, sampler: Any, writer: Any, collate: Any) -> ReplayBuffer:
    """Return the buffer that has these parts already, or a new one of them."""
    owner = sampler.owner if isinstance(sampler, Sampler) else None
    if isinstance(owner, ReplayBuffer) and owner.storage is storage and collate is None:
        if transform == (owner.transforms.read if len(owner.transforms) else None):
            return owner
    return ReplayBuffer(
        storage=storage,
        transform=transform,
        sampler=sampler,
        writer=None if writer is None or writer.owner is not None else writer,
        collate_fn=collate,
    )
