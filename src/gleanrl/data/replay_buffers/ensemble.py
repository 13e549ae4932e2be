"""Several replay buffers, read as one mixture.

The members of an ensemble: made of parts that lie side by side, and served as a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.results import BufferStats
from gleanrl._arrays.tensordicts import NestedKey, mark_rows
from gleanrl._state.rng import seeds_in_turn
from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed, with_records
from gleanrl.data.replay_buffers.draws import DrawPosition, Keys
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.ensemble import Mixture, SamplerEnsemble, all_or_none, join_infos
from gleanrl.data.replay_buffers.sampling import Served, Server
from gleanrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from gleanrl.data.replay_buffers.storages.indexing import is_key, members_at
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline, none_returned
from gleanrl.data.replay_buffers.utils import loading_all, stack_samples, states_in
from gleanrl.data.replay_buffers.writers.ensemble import WriterEnsemble, refuse
from gleanrl.data.trajectories import marks_among
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


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
        gate: BufferLock,
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

        def go_back(number: int, place: DrawPosition) -> None:
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


class ReplayBufferEnsemble(Checkpointed):
    """Several replay buffers, read as one mixture; each member is written through itself.

    A batch has `num_buffer_sampled` parts of equal size, each sampled by one member with its own sampler and
    transforms, and is ``[num_buffer_sampled, batch_size // num_buffer_sampled, ...]``. The ensemble's transforms
    act on the whole. It isn't a `ReplayBuffer`, which takes records in.

    Threads: `sample` and indexing may be called from any threads, beside any use of the members: each part is
    drawn and fetched by its member, under that member's rules and rate limiter, and no two locks are held at a time.
    State is saved member after member.

    Args:
        rbs: the members. A buffer may be a member of several ensembles.
        storages: instead of members, what to make them of: a `StorageEnsemble` or a sequence of storages.
        samplers: their samplers, a `SamplerEnsemble` or a sequence.
        writers: their writers, a `WriterEnsemble` or a sequence; None for `RoundRobinWriter`.
        transform: acts on batches that are read, behind the members' own.
        batch_size: transitions in a batch if `sample` isn't told otherwise; needed for iteration.
        collate_fn: makes a batch of the list of the members' samples; None for stacking them.
        collate_fns: one for each storage, what makes a sample of what it returns; only with `storages`.
        p: how often each member is chosen (see `SamplerEnsemble`).
        sample_from_all: whether each batch has one part from every member.
        num_buffer_sampled: parts of a batch; None for as many as there are members.
        generator: what choices, and the members' draws, come from (see `ReplayBuffer`); None leaves them as they are.
        seed: where the sequence of choices, and those of the members, start; None leaves them as they are.

    Raises:
        InvalidArgumentError: a bad value.
        UnsupportedError: arguments that exclude each other, `p` and `sample_from_all`, say.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> demos, online = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
        >>> ensemble = ReplayBufferEnsemble(demos, online, batch_size=6, sample_from_all=True)
        >>> for member, value in ((0, 1.0), (1, 2.0)):
        ...     _ = ensemble[member].extend(TensorDict({"x": torch.full((4,), value)}, [4]))
        >>> ensemble.sample()["x"]
        tensor([[1., 1., 1.],
                [2., 2., 2.]])
    """

    kind = "ReplayBufferEnsemble"

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | Sequence[Any] | None = None,
        samplers: SamplerEnsemble | Sequence[Any] | None = None,
        writers: WriterEnsemble | Sequence[Any] | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Sequence[float] | torch.Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> None:
        parts = {"storages": storages, "samplers": samplers, "writers": writers, "collate_fns": collate_fns}
        if not rbs:
            rbs = assemble(**parts)
        elif given := [name for name, part in parts.items() if part is not None]:
            raise UnsupportedError(
                f"{', '.join(given)}: the buffers given bring their own; give one or the other"
            )
        for member in rbs:
            if isinstance(member, ReplayBufferEnsemble):
                raise InvalidArgumentError(
                    "rbs: expected ReplayBuffers, got an ensemble: give its members themselves"
                )
            if ReplayBuffer not in type(member).__mro__:  # those in an actor pass for one
                raise InvalidArgumentError(
                    f"rbs: expected ReplayBuffers of this process, got {member!r:.200}"
                )
        if not isinstance(samplers, SamplerEnsemble):
            self._mixture = Mixture(len(rbs), p, sample_from_all, num_buffer_sampled)
        elif p is None and not sample_from_all and num_buffer_sampled is None:
            self._mixture = samplers.mixture
        else:
            raise UnsupportedError(
                "p, sample_from_all and num_buffer_sampled: the SamplerEnsemble given has them; give them to it"
            )
        self._members = rbs
        self._gate = BufferLock()
        self._transforms = Pipeline()
        self._server = EnsembleServer(
            self._gate, rbs, self._mixture, self._transforms, batch_size, collate_fn
        )
        if transform is not None:
            self.append_transform(transform)
        if generator is not None:
            self.set_rng(generator)
        if seed is not None:
            self.set_seed(seed)

    # Members

    @property
    def storage(self) -> StorageEnsemble:
        """The members' storages, with their transforms."""
        return StorageEnsemble(
            *(member.storage for member in self._members),
            transforms=[
                member.transforms.read if len(member.transforms) else None for member in self._members
            ],
        )

    @property
    def sampler(self) -> SamplerEnsemble:
        """The members' samplers, and what chooses among them."""
        samplers = SamplerEnsemble(*(member.sampler for member in self._members))
        samplers.mixture = self._mixture
        return samplers

    @property
    def writer(self) -> WriterEnsemble:
        """The members' writers."""
        return WriterEnsemble(*(member.writer for member in self._members))

    _storage, _sampler, _writer = storage, sampler, writer

    @property
    def server(self) -> EnsembleServer:
        """What serves the batches."""
        return self._server

    @property
    def batch_size(self) -> int | None:
        """Transitions in a batch if `sample` isn't told otherwise."""
        return self._server.batch_size

    def __len__(self) -> int:
        """Return the number of transitions that all members hold."""
        return sum(len(member) for member in self._members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of some members, or records inside members.

        Args:
            index: an int gives the member itself. A slice, list, tensor or mask gives an ensemble of these
                members, `p` among them, with choices of its own. A tuple: its first part picks members in these
                ways, ``...`` all of them, the rest is the index inside each one.

        Returns:
            For a tuple that starts with an int what the member returns; for other tuples the members' records
            put together and transformed like samples.

        Raises:
            IndexError: no such member.
            InvalidTypeError: a key; the members may be of different lengths.
        """
        if is_key(index):
            raise InvalidTypeError(
                f"a key reads a whole buffer: use ensemble[0][{index!r}], or ensemble[:, i]"
            )
        if not isinstance(index, tuple):
            chosen = members_at(index, len(self._members))
            return self._members[chosen] if isinstance(chosen, int) else self._some(chosen)
        first, *rest = index
        inside = rest[0] if len(rest) == 1 else tuple(rest)
        chosen = members_at(first, len(self._members))
        if isinstance(chosen, int):
            return self._members[chosen][inside] if rest else self._members[chosen]
        if not rest:
            return self._some(chosen)
        return self._server.finish([self._members[member][inside] for member in chosen], chosen)

    def _some(self, chosen: list[int]) -> ReplayBufferEnsemble:
        """Return an ensemble of some members, with this one's transforms and, if it can be shared, batch size."""
        mixture, size = self._mixture.among(chosen), self.batch_size
        some = ReplayBufferEnsemble(
            *(self._members[member] for member in chosen),
            batch_size=None if size is None or size % mixture.num_buffer_sampled else size,
            collate_fn=self._server.collate_fn,
            p=mixture.p,
            sample_from_all=mixture.sample_from_all,
            num_buffer_sampled=mixture.num_buffer_sampled,
        )
        some._transforms.take(self._transforms)
        return some

    # Reading

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        keys: Iterable[NestedKey] | None = None,
    ) -> Any:
        """Return a batch of parts that members sampled, in fresh memory.

        Args:
            batch_size: transitions, a multiple of `num_buffer_sampled`; None for the one given at construction.
            return_info: whether to return ``(batch, info)``.
            keys: the only columns to fetch, as in `ReplayBuffer.sample`; None for all.

        Returns:
            The batch ``[num_buffer_sampled, n]``, with ``("index", "buffer_ids")``, the member of each row, and
            ``("index", "index")``, its index there, ``(parts, n)`` or ``(parts, n, ndim)``, if it is a TensorDict; a
            lazy stack where members differ in keys. ``info`` is a TensorDict of the same size with these,
            ``"generation"``, and whatever else all parts have (weights, say).

        Raises:
            EmptyBufferError: nothing is stored in a member that was chosen.
            UnsupportedError: no batch size, here or at construction.
            InvalidArgumentError: a batch size that can't be shared.
            SchemaError: samples that differ in a shape, dtype or device at a common key, and no `collate_fn`.
        """
        return self._server.sample(batch_size, return_info, keys)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the epoch of a member ends (for ever, with samplers without epochs)."""
        return self._server.epoch()

    # Writing: through the members

    def add(self, data: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        refuse("add")

    def extend(self, data: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        refuse("extend")

    def empty(self) -> NoReturn:
        """Raise `UnsupportedError`."""
        refuse("empty")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        refuse("__setitem__")

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Give records the priorities that their members' samplers draw them by, part by part.

        Parts of members whose sampler has no priorities are left out.

        Args:
            index: ``info["index"]``, or the batch's ``"index"``, as `sample` returned it.
            priority: one number, or one for each record, ``(parts, n)``.
            generation: ``info["generation"]``, or None (see `ReplayBuffer.update_priority`).

        Raises:
            SchemaError: another number of priorities than of parts; nothing changed.
        """
        members, inside = index["buffer_ids"][:, 0].tolist(), index["index"]
        priorities = torch.as_tensor(priority)
        for name, values in (("priority", priorities), ("generation", generation)):
            if values is not None and values.ndim and len(values) != len(members):
                raise SchemaError(
                    f"update_priority: {len(values)} parts in {name}, {len(members)} in the index"
                )
        for part, number in enumerate(members):
            if self._members[number].sampler.takes_priorities:
                self._members[number].update_priority(
                    inside[part],
                    priorities[part] if priorities.ndim else priorities,
                    None if generation is None else generation[part],
                )

    # Transforms, seeds, state

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBufferEnsemble:
        """Add a transform behind the others, and return the ensemble; see `insert_transform`."""
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> ReplayBufferEnsemble:
        """Add a transform before the one at `index`, in evaluation mode, and return the ensemble.

        Args:
            index: its place in the order in which batches pass.
            transform: a callable on batches, or an object with `forward` (and `inv`).
            invert: whether `inv` acts on batches instead.

        Raises:
            UnsupportedError: a plain callable with `invert`, which would act on writes only.
        """
        if invert and not callable(getattr(transform, "inv", None)):
            raise UnsupportedError(
                "invert=True makes a callable without inv act on writes, and an ensemble isn't written; give it to a "
                "member"
            )
        self._transforms.insert(index, transform, invert)
        return self

    def set_seed(self, seed: int) -> int:
        """Start the sequence of choices of `seed`, and those of the members of the numbers after it.

        Returns:
            The last seed used.
        """
        with self._gate.lock:
            self._mixture.set_seed(seed)
        for offset, member in enumerate(self._members, 1):
            member.set_seed(seed + offset)
        return seed + len(self._members)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw choices, and have the members draw, from a generator of yours; None for generators of their own."""
        with self._gate.lock:
            self._mixture.set_rng(generator)
        for member in self._members:
            member.set_rng(generator)

    def stats(self) -> tuple[BufferStats, ...]:
        """Return the counters of each member."""
        return tuple(member.stats() for member in self._members)

    @seeds_in_turn()
    def state_dict(self) -> dict[str, Any]:
        """Return the members' states, that of the choices and of the ensemble's transforms: copies."""
        return self._state([member.state_dict() for member in self._members])

    def _state(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        with self._gate.lock:
            mixture = self._mixture.state_dict()
        return {"_members": members, "_mixture": mixture, "_transforms": self._transforms.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on exactly as the saved ensemble would have.

        Raises:
            SchemaError: a state that doesn't fit; nothing changed.
        """
        self._loading(state_dict)()

    def _loading(self, state: Any) -> Callable[[], None]:
        states = states_in(state, "_members", len(self._members))
        parts: list[Any] = [self._mixture, self._transforms, *(m.server.draws for m in self._members)]
        load = loading_all(parts, [state.get("_mixture"), state.get("_transforms", []), *states])

        def change() -> None:
            with self._gate.lock:
                load()

        return change

    @seeds_in_turn()
    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state, each member's records in the form of its storage's checkpointer."""
        return self._state([member.checkpointed_state() for member in self._members])

    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Return what goes on from what `checkpointed_state` returned, with whatever checkpointers; it can't fail."""
        members = states_in(state, "_members", len(self._members))
        return self._loading({**state, "_members": [with_records(member) for member in members]})

    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last stored step of trajectories that nobody goes on with as truncated, and done."""
        for member in self._members:
            member.end_trajectories(ids)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle everything; the copy has a lock of its own."""
        with self._gate.lock:
            return dict(self.__dict__)

    def __repr__(self) -> str:
        """Show the members."""
        members = "".join(f"\n    {member!r}," for member in self._members)
        return f"ReplayBufferEnsemble({members}\n    batch_size={self.batch_size})"
