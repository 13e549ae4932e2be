"""Several replay buffers that are sampled as one mixture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import starmap
from typing import Any, Literal, NoReturn, overload

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.results import BufferStats, html_parts, laid_out
from gleanrl._arrays.tensordicts import mark_rows
from gleanrl._state.rng import distinct_seeds
from gleanrl._util import key_list
from gleanrl.data.replay_buffers.checkpointers.buffers import Checkpointed, with_records
from gleanrl.data.replay_buffers.describe import BufferDescription, StoredEpisodes
from gleanrl.data.replay_buffers.draws import DrawPosition, Keys
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.ensemble import Mixture, SamplerEnsemble, all_or_none, join_infos
from gleanrl.data.replay_buffers.sampling import ChosenKeys, Served, Server
from gleanrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from gleanrl.data.replay_buffers.storages.indexing import is_key, members_at
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline, none_returned
from gleanrl.data.replay_buffers.utils import loading_all, stack_samples, states_in
from gleanrl.data.replay_buffers.verify import AuditReport
from gleanrl.data.replay_buffers.writers.ensemble import WriterEnsemble, refuse
from gleanrl.data.trajectories import marks_among
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


class EnsembleServer(Server):
    """Builds batches from parts that the members serve. It never holds two locks at a time.

    If a member fails or the call is interrupted, the parts already drawn are returned to their members, so no
    transition is lost. A member that served another thread meanwhile can't take its part back. The choice of members
    isn't undone.

    Args:
        gate: the lock for the choice of members.
        members: the buffers.
        mixture: chooses the members of each batch.
        transforms: transforms of the whole batch.
        batch_size: see `Server`.
        collate_fn: turns the list of the members' samples into a batch; None stacks them.
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
        """Return a batch. It ends an epoch if it ends the epoch of a member; its `epoch` is always 0.

        Raises:
            InvalidArgumentError: the parts can't divide `size`. Nothing was drawn.
        """
        each = self._mixture.share(size)
        with self._gate.lock:
            chosen = self._mixture.choose()
        numbers, parts = chosen.tolist(), list[Served]()
        draws = {number: self._members[number].server.draws for number in numbers}
        positions = {
            number: position
            for number, member in draws.items()
            if (position := member.position()) is not None
        }

        def go_back(number: int, position: DrawPosition) -> None:
            draws[number].go_back(position, numbers[: len(parts)].count(number))

        with all_or_none(positions, go_back):
            for number in numbers:
                parts.append(self._members[number].server.as_user(each, keys, True))
                # Transforms need the ends of slices, which a member's batch may lack.
                if self._transforms.reads:
                    mark_rows(parts[-1].batch, marks_among(parts[-1].info), each)
            info = join_infos(chosen, [part.info for part in parts])
            index = info.get("index") if keys is None else None
            batch = self.finish([part.batch for part in parts], numbers, index)
        return Served(batch, info if wants_info else None, any(part.ran_out for part in parts), 0)

    def finish(self, samples: list[Any], members: Sequence[int], index: Any = None) -> Any:
        """Return the members' samples as one transformed batch.

        `index` names the member and slot of each row. It becomes an entry of a TensorDict whose batch size begins with
        the size of `index`.
        """
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
        """Begin a new epoch in every member."""
        for member in self._members:
            member.server.new_epoch()


def assemble(storages: Any, samplers: Any, writers: Any, collate_fns: Any) -> tuple[ReplayBuffer, ...]:
    """Return one buffer for each storage, made of the parts at the same position of each argument.

    Each argument is an ensemble or a sequence; all have the same length. A writer that another buffer uses stays with
    that buffer, which continues to write to the storage. The new member only reads and gets its own writer. If a
    sampler and its storage belong to one existing buffer with the same transform, that buffer becomes the member. This
    needs a collate function of None.

    Raises:
        InvalidArgumentError: no storages or samplers, sequences of different lengths, or a sampler of another buffer.
    """
    if storages is None or samplers is None:
        raise InvalidArgumentError(
            "rbs: expected ReplayBuffers, got none; pass some, or pass storages= and samplers= to create them"
        )
    all_storages = storages.storages if isinstance(storages, StorageEnsemble) else tuple(storages)
    transforms = storages.transforms if isinstance(storages, StorageEnsemble) else (None,) * len(all_storages)
    columns = {
        "samplers": tuple(samplers),
        "writers": (None,) * len(all_storages) if writers is None else tuple(writers),
        "collate_fns": (None,) * len(all_storages) if collate_fns is None else tuple(collate_fns),
    }
    for name, column in columns.items():
        if len(column) != len(all_storages):
            raise InvalidArgumentError(
                f"{name}: expected {len(all_storages)}, one for each storage, got {len(column)}"
            )
    return tuple(starmap(_member, zip(all_storages, transforms, *columns.values(), strict=True)))


def _member(storage: Any, transform: Any, sampler: Any, writer: Any, collate: Any) -> ReplayBuffer:
    """Return the existing buffer that has these parts, or a new buffer made of them."""
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
    """Several replay buffers, sampled as one mixture. Records are written to the members directly.

    A batch has `num_buffer_sampled` parts of equal size. One member samples each part with its own sampler and
    transforms. The batch has shape ``[num_buffer_sampled, batch_size // num_buffer_sampled, ...]``. The ensemble's
    transforms act on the whole batch. An ensemble isn't a `ReplayBuffer`, because it doesn't accept records.

    Threads: any thread may call `sample` or index the ensemble, in parallel to any use of the members. Each member
    draws and fetches its part under its own lock and rate limiter. `sample` never holds two locks at a time. State is
    saved one member after another.

    Args:
        rbs: the members. A buffer may be a member of several ensembles.
        storages: the storages of new members, instead of `rbs`: a `StorageEnsemble` or a sequence.
        samplers: their samplers: a `SamplerEnsemble`, whose `Mixture` the ensemble then uses itself, or a sequence.
        writers: their writers: a `WriterEnsemble` or a sequence. None for `RoundRobinWriter`.
        transform: a transform of batches, after the members' own transforms.
        batch_size: the default number of transitions in a batch; iteration requires it.
        collate_fn: turns the list of the members' samples into a batch; None stacks them.
        collate_fns: for each storage, a function that turns the storage's result into a sample; only with `storages`.
        p: the probability of each member (see `SamplerEnsemble`).
        sample_from_all: whether each batch has one part from every member.
        num_buffer_sampled: the number of parts in a batch; None for the number of members.
        generator: source of random numbers for the choices and the members' draws (see `ReplayBuffer`). None keeps the
            present ones.
        seed: seed of the choices; the members get the following numbers. None keeps the present sequences.

    Raises:
        InvalidArgumentError: a bad value.
        UnsupportedError: arguments that exclude each other, for example `p` and `sample_from_all`.

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
        elif conflicting := [name for name, part in parts.items() if part is not None]:
            raise UnsupportedError(
                f"{', '.join(conflicting)}: got ReplayBuffers as well, which have their own; pass one or the other"
            )
        for member in rbs:
            if isinstance(member, ReplayBufferEnsemble):
                raise InvalidArgumentError(
                    "rbs: expected ReplayBuffers, got an ensemble; pass its members instead"
                )
            if ReplayBuffer not in type(member).__mro__:  # isinstance() is also True for a RayReplayBuffer
                raise InvalidArgumentError(
                    f"rbs: expected ReplayBuffers of this process, got {member!r:.200}"
                )
        if not isinstance(samplers, SamplerEnsemble):
            self._mixture = Mixture(len(rbs), p, sample_from_all, num_buffer_sampled)
        elif p is None and not sample_from_all and num_buffer_sampled is None:
            self._mixture = samplers.mixture
        else:
            raise UnsupportedError(
                "p, sample_from_all, num_buffer_sampled: got a SamplerEnsemble as well; pass them to its constructor"
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

    @property
    def storage(self) -> StorageEnsemble:
        """A new ensemble of the members' storages, with the members' present transforms."""
        return StorageEnsemble(
            *(member.storage for member in self._members),
            transforms=[
                member.transforms.read if len(member.transforms) else None for member in self._members
            ],
        )

    @property
    def sampler(self) -> SamplerEnsemble:
        """A new ensemble of the members' samplers, with the mixture that chooses this ensemble's members."""
        samplers = SamplerEnsemble(*(member.sampler for member in self._members))
        samplers.mixture = self._mixture
        return samplers

    @property
    def writer(self) -> WriterEnsemble:
        """A new ensemble of the members' writers."""
        return WriterEnsemble(*(member.writer for member in self._members))

    _storage, _sampler, _writer = storage, sampler, writer

    @property
    def server(self) -> EnsembleServer:
        """The server of the ensemble's batches."""
        return self._server

    @property
    def batch_size(self) -> int | None:
        """The default number of transitions in a batch."""
        return self._server.batch_size

    def __len__(self) -> int:
        """Return the sum of the members' lengths."""
        return sum(len(member) for member in self._members)

    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of some members, or records of members.

        Args:
            index: an int selects the member itself. A slice, list, tensor or mask selects a new ensemble of these
                members, with their `p`, the ensemble's transforms and an unseeded choice. A tuple selects records: its
                first element selects the members, ``...`` for all. The other elements are the index in each member.

        Returns:
            For a tuple that begins with an int, the member's result. For other tuples, the members' records, combined
            and transformed like samples.

        Raises:
            IndexRangeError: no such member, none selected, or a record outside the stored part.
            InvalidTypeError: a key. Members may differ in length, so their columns can't be stacked.
            SchemaError: the members' records can't be combined.
        """
        if is_key(index):
            raise InvalidTypeError(
                f"index: expected members, got the key {index!r}, which reads a whole buffer; use "
                f"ensemble[0][{index!r}], or ensemble[:, i]"
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
        """Return an ensemble of some members, with this one's transforms and, if divisible, its batch size."""
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

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, *, keys: ChosenKeys = None
    ) -> TensorDictBase: ...
    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[True] = ..., *, keys: ChosenKeys = None
    ) -> tuple[TensorDictBase, TensorDictBase]: ...
    @overload
    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, keys: ChosenKeys = None
    ) -> Any: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        keys: ChosenKeys = None,
    ) -> Any:
        """Return a batch of parts that members sampled, in fresh memory.

        Args:
            batch_size: number of transitions, a multiple of `num_buffer_sampled`. None for the constructor's.
            return_info: whether to return ``(batch, info)``.
            keys: the only columns to fetch, as in `ReplayBuffer.sample`; None for all.

        Returns:
            The batch ``[num_buffer_sampled, n]``; a lazy stack if the members differ in keys. Without `keys`, a
            TensorDict also holds ``("index", "buffer_ids")``, the member of each row, and ``("index", "index")``, its
            index there. The latter has shape ``(parts, n)`` or ``(parts, n, ndim)``.

            ``info`` is a TensorDict of the same size with the index, ``"generation"``, and each entry that all parts
            have, for example weights.

        Raises:
            EmptyBufferError: a chosen member holds no records.
            RateLimiterTimeoutError: the timeout of a member's rate limiter passed.
            MissingKeyError: one of `keys` isn't stored in a chosen member.
            UnsupportedError: no batch size, in this call or at construction.
            InvalidArgumentError: a batch size that the parts can't divide.
            SchemaError: samples differ in a shape, dtype or device at a common key, and there is no `collate_fn`.
        """
        server = self._server
        served = server.serve(
            server.size_of(batch_size), None if keys is None else key_list(keys), return_info
        )
        return (served.batch, served.info) if return_info else served.batch

    def __iter__(self) -> Iterator[Any]:
        """Begin a new epoch in every member, and yield batches until the epoch of a member ends.

        With samplers without epochs, the iteration never ends. The first step raises `UnsupportedError` without a
        default batch size.
        """
        return self._server.epoch()

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
        """Set the priorities of records in their members' samplers, part by part.

        Parts of members whose sampler has no priorities are skipped. If a member raises, the parts before its part are
        updated already (errors: see `ReplayBuffer.update_priority`).

        Args:
            index: ``info["index"]``, or the batch's ``"index"``, from `sample`.
            priority: one number, or one for each record, ``(parts, n)``.
            generation: ``info["generation"]``, or None (see `ReplayBuffer.update_priority`).

        Raises:
            SchemaError: the number of priorities or generations differs from the number of parts; nothing changed.
        """
        members, inside = index["buffer_ids"][:, 0].tolist(), index["index"]
        priorities = torch.as_tensor(priority)
        for name, values in (("priority", priorities), ("generation", generation)):
            if values is not None and values.ndim and len(values) != len(members):
                raise SchemaError(
                    f"update_priority: expected {len(members)} parts in {name}, as in the index, got {len(values)}"
                )
        for part, number in enumerate(members):
            if self._members[number].sampler.takes_priorities:
                self._members[number].update_priority(
                    inside[part],
                    priorities[part] if priorities.ndim else priorities,
                    None if generation is None else generation[part],
                )

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBufferEnsemble:
        """Add a transform after the others and return the ensemble; see `insert_transform`."""
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> ReplayBufferEnsemble:
        """Add a transform before the one at `index`, and return the ensemble. A module is put into evaluation mode.

        Args:
            index: its position in the order in which batches pass the transforms.
            transform: a callable on batches, or an object with `forward` (and `inv`).
            invert: whether `inv` acts on batches instead.

        Raises:
            UnsupportedError: a plain callable with `invert`, which would act on writes only.
            InvalidArgumentError: `index` isn't in ``[-n, n]`` for `n` transforms.
            InvalidTypeError: the transform is neither callable nor has `forward`.
        """
        if invert and not callable(getattr(transform, "inv", None)):
            raise UnsupportedError(
                "invert: True makes a callable without inv act on writes, but an ensemble isn't written to; add the "
                "transform to a member"
            )
        self._transforms.insert(index, transform, invert)
        return self

    def set_seed(self, seed: int) -> int:
        """Seed the choices with `seed`, and the members with the numbers after it.

        Returns:
            The last seed used.
        """
        with self._gate.lock:
            self._mixture.set_seed(seed)
        for offset, member in enumerate(self._members, 1):
            member.set_seed(seed + offset)
        return seed + len(self._members)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw choices, and make members draw, from `generator`; None for the parts' own generators."""
        with self._gate.lock:
            self._mixture.set_rng(generator)
        for member in self._members:
            member.set_rng(generator)

    def stats(self) -> tuple[BufferStats, ...]:
        """Return the counters of each member."""
        return tuple(member.stats() for member in self._members)

    def describe(self) -> tuple[BufferDescription, ...]:
        """Return the statistics of each member's stored keys, one member after another."""
        return tuple(member.describe() for member in self._members)

    def episodes(self) -> tuple[StoredEpisodes, ...]:
        """Return the stored trajectories of each member; see `ReplayBuffer.episodes` for the errors."""
        return tuple(member.episodes() for member in self._members)

    def verify(self) -> tuple[AuditReport, ...]:
        """Check the stored records of each member; see `ReplayBuffer.verify`."""
        return tuple(member.verify() for member in self._members)

    @distinct_seeds()
    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of the members, one after another, of the choices and the transforms."""
        return self._state([member.state_dict() for member in self._members])

    def _state(self, members: list[dict[str, Any]]) -> dict[str, Any]:
        with self._gate.lock:
            mixture = self._mixture.state_dict()
        return {"_members": members, "_mixture": mixture, "_transforms": self._transforms.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state and continue exactly as the saved ensemble would have.

        Each member claims its storage (see `Draws.parse`).

        Raises:
            SchemaError: the state doesn't fit; nothing changed.
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

    @distinct_seeds()
    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; each storage's checkpointer determines the form of its records."""
        return self._state([member.checkpointed_state() for member in self._members])

    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Check a state from `checkpointed_state` and return the callback that loads it, which can't fail.

        The records may have the form of any checkpointer.
        """
        members = states_in(state, "_members", len(self._members))
        return self._loading({**state, "_members": [with_records(member) for member in members]})

    def end_trajectories(self, ids: Collection[int]) -> None:
        """Mark the last step of abandoned trajectories, stored or held back by a transform, as truncated and done."""
        for member in self._members:
            member.end_trajectories(ids)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling; the copy has its own lock and copies of the members."""
        with self._gate.lock:
            return dict(self.__dict__)

    def __repr__(self) -> str:
        """Show the members."""
        return laid_out("ReplayBufferEnsemble", (*map(repr, self._members), f"batch_size={self.batch_size}"))

    def _repr_html_(self) -> str:
        members = {f"member {number}": member for number, member in enumerate(self._members)}
        return html_parts("ReplayBufferEnsemble", {**members, "batch_size": self.batch_size})
