"""A writer that keeps the best of all records offered so far, and the ranking that finds the worst stored ones."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gleanrl._arrays.results import Selection
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path, key_argument
from gleanrl._state.state import StateReader
from gleanrl.data.replay_buffers.change_log import Change, Follower, Version, slots_in
from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.slots import UNBOUNDED
from gleanrl.data.replay_buffers.storages.snapshots import StorageState
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.data.replay_buffers.writers.round_robin import check_collections
from gleanrl.errors import GleanError, InvalidArgumentError, MissingKeyError, NonFiniteError, SchemaError

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
Integers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

_TAIL = 1024  # records that a pass over all ranks puts in order


class Ranking:
    """The ranks and ages of the records in slots ``[0, size)``; of equal ranks the older record is the better one.

    The worst records are kept in order (the *tail*); every other record is better than each of them. When the tail is
    used up, one pass over all ranks finds the next one. So a replacement costs O(capacity / 1024) on average, in
    addition to the sorting of the written records.

    Memory: 16 bytes for each slot in use.

    Args:
        capacity: number of slots.
        ranks: ranks of the stored records, ``(size,)``; no NaN.
        ages: order of arrival, ``(size,)``, each number once; the smallest arrived first.
    """

    def __init__(self, capacity: int, ranks: Floats, ages: Integers) -> None:
        self.size = len(ranks)
        # Pages that are never written take no memory.
        self.ranks: Floats = np.empty(capacity, np.float64)
        self.ages: Integers = np.empty(capacity, np.int64)
        self.ranks[: self.size] = ranks
        self.ages[: self.size] = ages
        self._next_age = int(ages.max()) + 1 if self.size else 0
        self._tail: Integers = np.empty(0, np.int64)  # slots; the worst one is the last

    def worst(self, count: int) -> Integers:
        """Return the slots of the `count` worst records (at most `size`), the worst one first."""
        if len(self._tail) < count:
            self._find(max(count, min(_TAIL, self.size)))
        return self._tail[len(self._tail) - count :][::-1]

    def put(self, slots: Integers, ranks: Floats) -> None:
        """Record new records at `slots`, each once, in order of arrival; slots from `size` on extend the ranking."""
        if not len(slots):
            return
        tail = self._tail[~np.isin(self._tail, slots)]
        self.ranks[slots] = ranks
        self.ages[slots] = np.arange(self._next_age, self._next_age + len(slots))
        self._next_age += len(slots)
        self.size = max(self.size, int(slots.max()) + 1)
        if len(tail):
            # The newest of equal records is the worst one, so a new record that equals the tail's best belongs to it.
            among = slots[ranks <= self.ranks[tail[0]]]
            if len(among):
                tail = self._ordered(np.concatenate([tail, among]))[-2 * _TAIL :]
        self._tail = tail

    def _find(self, count: int) -> None:
        ranks = self.ranks[: self.size]
        if count < self.size:
            bound = np.partition(ranks, count - 1)[count - 1]
            slots = np.flatnonzero(ranks <= bound)
        else:
            slots = np.arange(self.size)
        self._tail = self._ordered(slots)[-count:]

    def _ordered(self, slots: Integers) -> Integers:
        """Return `slots` sorted, the best one first."""
        return slots[np.lexsort((self.ages[slots], -self.ranks[slots]))]

    def check_valid(self) -> None:
        """Raise AssertionError unless the invariants hold; for tests.

        The tail holds the worst records in order. The ages are unique and below the next age.
        """
        everything = self._ordered(np.arange(self.size))
        assert np.array_equal(everything[self.size - len(self._tail) :], self._tail)
        assert len(np.unique(self.ages[: self.size])) == self.size
        assert not self.size or self.ages[: self.size].max() < self._next_age


_REDUCTIONS = {
    "sum": lambda values: values.sum(-1),
    "mean": lambda values: values.mean(-1),
    "max": lambda values: values.amax(-1),
    "min": lambda values: values.amin(-1),
    "median": lambda values: values.median(-1).values,
}


class Ages(NamedTuple):
    """The order in which the stored records arrived."""

    ages: torch.Tensor
    """Position of each slot's record in that order, ``(records,)`` int64."""


class _Placed(NamedTuple):
    slots: Any  # (n,) int64, in the order of the records
    ranks: Floats  # (n,) of the records
    version: Version  # the storage's version after they are stored

    def fills(self, changes: list[Change]) -> bool:
        return np.array_equal(np.sort(self.slots), slots_in(changes).numpy())


class TensorDictMaxValueWriter(Writer, Follower[Storage]):
    """Keeps the records of the highest ranks among all records ever offered.

    A record's rank is the value at `rank_key`, reduced to one number and compared as float64. A record whose rank
    equals that of a stored one doesn't replace it. If one of several equal records has to be evicted, it is the one
    that arrived last. `extend` returns -1 for a record that isn't stored when the call returns.

    The ranks always belong to the stored records. They are read again after any change of the storage by other means
    than this writer, for example ``buffer[index] = ...``. Of equal records, the one in the lowest slot then counts as
    the oldest. `load_state_dict` of the buffer restores the order of arrival.

    A write raises and stores nothing if a record isn't a TensorDict, lacks the value or has the rank NaN.

    Memory: 16 bytes for each slot in use.

    Args:
        rank_key: key of the value.
        reduction: how several values of a record are reduced to one number: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``
            or ``"median"``.
        compilable: has no effect, see `Writer`.

    Raises:
        InvalidArgumentError: another reduction. Also when a buffer takes the writer and the storage has several batch
            dimensions or no size limit.
        InvalidTypeError: `rank_key` isn't a key.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(
        ...     storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="score")
        ... )
        >>> buffer.extend(TensorDict({"score": torch.tensor([1.0, 3.0, 2.0, 2.0])}, [4]))
        tensor([-1,  0,  1, -1])
        >>> buffer[:]["score"]
        tensor([3., 2.])
    """

    def __init__(
        self, rank_key: NestedKey = ("next", "reward"), reduction: str = "sum", compilable: bool = False
    ) -> None:
        super().__init__(compilable)
        if reduction not in _REDUCTIONS:
            raise InvalidArgumentError(f"reduction: expected one of {sorted(_REDUCTIONS)}, got {reduction!r}")
        self.rank_key = as_key(key_argument("rank_key", rank_key))
        self.reduction = reduction
        self._ranking: Ranking | None = None
        self._placed: _Placed | None = None  # the records that are about to be stored, or were stored last
        self._ages: torch.Tensor | None = None  # the loaded ages, until the next `sync` reads the records

    def check_storage(self, storage: Storage) -> None:
        """Raise unless the storage is bounded, has one dimension, and all stored records have ranks.

        Raises:
            InvalidArgumentError: several batch dimensions, or no size limit.
            SchemaError: a stored record isn't a TensorDict, or has no value at the rank key.
            MissingKeyError: a stored record has no tensor of real numbers at the rank key.
            NonFiniteError: the rank of a stored record is NaN.
        """
        if storage.ndim > 1:
            raise InvalidArgumentError(
                f"a {type(self).__name__} ranks single records; the storage has ndim={storage.ndim}, use ndim=1 "
                "and flatten the batches on the way in (transform=lambda data: data.reshape(-1))"
            )
        if storage.max_size == UNBOUNDED:
            raise InvalidArgumentError(
                f"a {type(self).__name__} evicts the worst record when the storage is full, but this storage has no "
                "limit; give it a max_size"
            )
        self._read(storage)

    def sync(self, storage: Storage) -> None:
        """Bring the ranks in sync with the records of `storage`, and forget the ages of a loaded state."""
        super().sync(storage)
        self._ages = None

    def _look_at_all(self, storage: Storage) -> None:
        """Read the ranks of all stored records; without ages that fit, the slots' order gives their ages."""
        ranks, ages = self._read(storage), self._ages
        known = np.arange(len(ranks)) if ages is None or len(ages) != len(ranks) else ages.numpy()
        self._ranking = Ranking(storage.max_size, ranks, known)

    def _look_at(self, storage: Storage, changes: list[Change]) -> None:
        """Add the records that this writer placed last; if anything else changed, read all ranks again."""
        placed, ranking = self._placed, self._ranking
        is_own = placed is not None and placed.version == storage.version
        if ranking is None or placed is None or not is_own or not placed.fills(changes):
            self._look_at_all(storage)
        else:
            ranking.put(placed.slots, placed.ranks)

    def _current(self) -> Ranking:
        self.sync(self.storage)
        assert self._ranking is not None
        return self._ranking

    def _read(self, storage: Storage) -> Floats:
        if not storage.num_steps:
            return np.empty(0, np.float64)
        return self._ranks(storage.get(slice(None)), len(storage), "writer")

    def _ranks(self, records: Any, count: int, where: str) -> Floats:
        """Return the ranks of `count` records: one collection ``[count, ...]``, a single record, or a list.

        Raises `SchemaError`, `MissingKeyError` or `NonFiniteError` (see `check_storage`).
        """
        check_collections(self, records, where)
        if isinstance(records, list):
            values = [self._value(record, where).reshape(1, -1) for record in records]
            return np.concatenate([self._reduced(value, where) for value in values])
        return self._reduced(self._value(records, where).reshape(count, -1), where)

    def _value(self, record: Any, where: str) -> torch.Tensor:
        value = record.get(self.rank_key, None)
        if not isinstance(value, torch.Tensor) or value.is_complex():
            keys = [as_key(as_path(key)) for key in record.keys(True, True)]
            raise MissingKeyError(
                f"{where}: expected a tensor of real numbers at the rank key {self.rank_key!r}, the record has {keys}"
            )
        return value

    def _reduced(self, values: torch.Tensor, where: str) -> Floats:
        """Return one number for each row of ``(n, k)`` values; raise if k is 0 or a result is NaN."""
        if not values.shape[-1]:
            raise SchemaError(f"{where}: the rank key {self.rank_key!r} holds no value to rank by")
        ranks = _REDUCTIONS[self.reduction](values.detach().to("cpu", torch.float64))
        bad = ranks.isnan()
        if bad.any():
            raise NonFiniteError(
                f"{where}: the rank {self.rank_key!r} of record {int(bad.nonzero()[0])} is NaN; expected a "
                "number, nothing was stored"
            )
        return ranks.numpy()

    def check_write(self, data: Any, where: str) -> None:
        """Raise unless `data` are TensorDicts or tensorclasses and each has a rank (errors: see `check_storage`)."""
        check_collections(self, data, where)
        count = len(data) if isinstance(data, list) or data.batch_dims else 1
        if count:
            self._ranks(data, count, where)

    def place(self, prepared: Prepared) -> Selection:
        """Return which of the records are among the best, and their slots.

        The ranking takes the records over once they are stored: the call keeps their ranks until then.
        """
        storage, ranking = self.storage, self._current()
        ranks = self._offered(storage, prepared)
        capacity, stored, count = storage.max_size, len(storage), len(ranks)
        free = min(capacity - stored, count)
        best = np.argsort(-ranks, kind="stable")  # stable: of equal ranks the first record is the better one
        evicted = self._beaten(ranking, ranks[best[free:]])
        rows = np.sort(best[: free + len(evicted)])
        slots = np.concatenate([np.arange(stored, stored + free), evicted])
        returned = np.full(count, -1)
        returned[rows] = slots
        version = storage.version
        after = version._replace(changes=version.changes + len(slots))
        self._placed = _Placed(slots, ranks[rows], after)
        return Selection(
            torch.from_numpy(rows), torch.from_numpy(slots), torch.from_numpy(returned), stored + free
        )

    @staticmethod
    def _beaten(ranking: Ranking, challengers: Floats) -> Any:
        """Return the slots of the worst stored records that the challengers (the best one first) replace."""
        if not len(challengers) or not ranking.size:
            return np.empty(0, np.int64)
        hopeful = int((challengers > ranking.ranks[ranking.worst(1)]).sum())
        worst = ranking.worst(min(hopeful, ranking.size))
        # The ranks of challengers fall and those to beat rise: once a challenger doesn't win, no later one does.
        return worst[: int((challengers[: len(worst)] > ranking.ranks[worst]).sum())]

    def _offered(self, storage: Storage, prepared: Prepared) -> Floats:
        rows = prepared.rows
        if isinstance(storage, TensorStorage) and storage.unwrapped is storage:
            leaf = rows[storage.format.schema.index(as_path(self.rank_key))]
            return self._reduced(leaf.reshape(prepared.num_steps, -1), "writer")
        return self._ranks(rows, prepared.num_steps, "writer")

    def snapshot(self) -> Ages:
        """Return the order in which the stored records arrived; the state holds no ranks."""
        ranking = self._current()
        order = np.argsort(np.argsort(ranking.ages[: ranking.size]))
        return Ages(torch.from_numpy(order))

    def parse(self, state: Any, stored: Storage | StorageState | None = None) -> Ages:
        """Return a saved order of arrival; raise `SchemaError` unless it fits the number of records.

        If `stored` is a `StorageState`, each of its records must have a rank.
        """
        stored = self.storage if stored is None else stored
        count = stored.num_steps
        if count and isinstance(stored, StorageState):
            content, size = stored.content, torch.Size([count])
            try:
                records = content
                if not isinstance(content, list):
                    records = content.form.build(content.columns, size, content.columns[0].device)
                self._ranks(records, count, "load_state_dict")
            except GleanError as cause:
                raise SchemaError(str(cause)) from cause
        reader = StateReader(state, f"a {type(self).__name__}")
        ages = reader.tensor("ages", torch.int64, (count,))
        if not torch.equal(ages.sort().values, torch.arange(count, device="cpu")):
            raise reader.wrong("ages", f"each of [0, {count}) once")
        return Ages(ages)

    def adopt(self, value: Ages) -> None:
        """Use the saved order of arrival; the next `sync` reads all ranks again."""
        self._ages = value.ages
        self.unfollow()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: without the storage, with the order of its records."""
        ages = self._ages if self._ranking is None else self.snapshot().ages
        return {**super().__getstate__(), "_ages": ages, "_ranking": None, "followed": None, "_placed": None}

    def check_valid(self) -> None:
        """Raise AssertionError unless the ranking is valid and has the ranks of the stored records; for tests."""
        ranking = self._current()
        assert np.array_equal(ranking.ranks[: ranking.size], self._read(self.storage))
        ranking.check_valid()
