"""The writer that keeps the best records of all that were offered."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gleanrl.data.replay_buffers.storages.base import Prepared, Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.versions import Version
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.data.replay_buffers.writers.ranking import Floats, Ranking
from gleanrl.data.replay_buffers.writers.tensordict import check_collections
from gleanrl.errors import InvalidArgumentError, MissingKeyError, NonFiniteError, SchemaError
from gleanrl.records import Selection
from gleanrl.tree import NestedKey, as_key, as_path, key_argument

_REDUCTIONS = {
    "sum": lambda values: values.sum(-1),
    "mean": lambda values: values.mean(-1),
    "max": lambda values: values.amax(-1),
    "min": lambda values: values.amin(-1),
    "median": lambda values: values.median(-1).values,
}


class TensorDictMaxValueWriter(Writer):
    """Keeps the records of the highest rank: the storage's content is the top of everything ever offered.

    A record's rank is the value at `rank_key`, reduced to one number and compared as float64. A record whose
    rank equals that of a stored one doesn't replace it; where one of several equal ones has to go, the one
    that came last goes. `extend` returns -1 for a record that isn't stored once the call has ended.

    The ranks are those of the stored records: after the storage was written, cleared or loaded by itself they
    are read again (and of equal ones the lowest slot counts as the first that came).

    Memory: 16 bytes for each slot.

    Args:
        rank_key: where the value stands.
        reduction: how several values of a record become one number: ``"sum"``, ``"mean"``, ``"max"``,
            ``"min"`` or ``"median"``.

    Raises:
        InvalidArgumentError: another reduction; when a buffer takes the writer, a storage with more than one
            batch dimension.

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

    def __init__(self, rank_key: NestedKey = ("next", "reward"), reduction: str = "sum") -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise InvalidArgumentError(f"reduction: expected one of {sorted(_REDUCTIONS)}, got {reduction!r}")
        self.rank_key = as_key(key_argument("rank_key", rank_key))
        self.reduction = reduction
        self._ranking: Ranking | None = None
        self._ranked: Version | None = None  # what the ranks are of
        self._placed: tuple[Any, Floats] | None = None  # slots and ranks that wait for their confirmation
        self._ages: torch.Tensor | None = None  # of a pickle that has no storage yet

    # Taking a storage

    def check_storage(self, storage: Storage) -> None:
        """Raise unless the records of `storage` can be ranked one by one."""
        if storage.ndim > 1:
            raise InvalidArgumentError(
                f"a {type(self).__name__} ranks single records; the storage has ndim={storage.ndim}, use ndim=1 "
                "and flatten the batches on the way in (transform=lambda data: data.reshape(-1))"
            )
        self._read(storage)

    def _rank(self, storage: Storage, ages: torch.Tensor | None) -> Ranking:
        """Read the ranks of what is stored; without `ages` that fit, the slots' order stands for them."""
        ranks = self._read(storage)
        known = np.arange(len(ranks)) if ages is None or len(ages) != len(ranks) else ages.numpy()
        self._ranking = Ranking(storage.max_size, ranks, known)
        self._ranked = storage.version
        self._ages = None
        return self._ranking

    def _current(self) -> Ranking:
        """Return the ranks; they are read again if somebody else changed the storage."""
        storage = self.storage
        if self._ranking is None or self._ranked != storage.version:
            return self._rank(storage, self._ages)
        return self._ranking

    # Ranks

    def _read(self, storage: Storage) -> Floats:
        if not storage.num_steps:
            return np.empty(0, np.float64)
        return self._ranks(storage.get(slice(None)), len(storage), "writer")

    def _ranks(self, records: Any, count: int, where: str) -> Floats:
        """Return the ranks of `count` records: one collection ``[count, ...]``, a single one, or a list."""
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
                f"{where}: the rank key {self.rank_key!r} is no real tensor of the record, which has {keys}"
            )
        return value

    def _reduced(self, values: torch.Tensor, where: str) -> Floats:
        """Return one number for each row of ``(n, k)`` values."""
        if not values.shape[-1]:
            raise SchemaError(f"{where}: the rank key {self.rank_key!r} holds no value to rank by")
        ranks = _REDUCTIONS[self.reduction](values.detach().to("cpu", torch.float64))
        bad = ranks.isnan()
        if bad.any():
            raise NonFiniteError(
                f"{where}: the rank {self.rank_key!r} of record {int(bad.nonzero()[0])} is NaN; records are "
                "ranked by numbers, nothing was stored"
            )
        return ranks.numpy()

    # Writing

    def check_write(self, data: Any, where: str) -> None:
        """Raise unless `data` are TensorDicts with a rank each."""
        check_collections(self, data, where)
        count = len(data) if isinstance(data, list) or data.batch_dims else 1
        if count:
            self._ranks(data, count, where)

    def place(self, prepared: Prepared) -> Selection:
        """Return which of the records are among the best, and where they go."""
        storage, ranking = self.storage, self._current()
        ranks = self._offered(storage, prepared)
        capacity, stored, count = storage.max_size, len(storage), len(ranks)
        free = min(capacity - stored, count)
        best = np.argsort(-ranks, kind="stable")  # of equal ones the first comes first
        evicted = self._beaten(ranking, ranks[best[free:]])
        rows = np.sort(best[: free + len(evicted)])
        slots = np.concatenate([np.arange(stored, stored + free), evicted])
        returned = np.full(count, -1)
        returned[rows] = slots
        self._placed = slots, ranks[rows]
        return Selection(
            torch.from_numpy(rows), torch.from_numpy(slots), torch.from_numpy(returned), stored + free
        )

    @staticmethod
    def _beaten(ranking: Ranking, challengers: Floats) -> Any:
        """Return the slots that challengers, the best one first, take over from the worst ones stored."""
        if not len(challengers) or not ranking.size:
            return np.empty(0, np.int64)
        hopeful = int((challengers > ranking.ranks[ranking.worst(1)]).sum())
        worst = ranking.worst(min(hopeful, ranking.size))
        # Challengers fall and the worst ones rise: once one doesn't win, none that follows does.
        return worst[: int((challengers[: len(worst)] > ranking.ranks[worst]).sum())]

    def _offered(self, storage: Storage, prepared: Prepared) -> Floats:
        rows = prepared.rows
        if isinstance(storage, TensorStorage):
            leaf = rows[storage.format.schema.index(as_path(self.rank_key))]
            return self._reduced(leaf.reshape(prepared.num_steps, -1), "writer")
        return self._ranks(rows, prepared.num_steps, "writer")

    def confirm(self) -> None:
        """Learn that what was placed last is stored."""
        assert self._placed is not None and self._ranking is not None
        self._ranking.put(*self._placed)
        self._placed = None
        self._ranked = self.storage.version

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return in which order the stored records came; their ranks are read from the storage."""
        ranking = self._current()
        order = np.argsort(np.argsort(ranking.ages[: ranking.size]))
        return {"ages": torch.from_numpy(order)}

    def check_state(self, state_dict: dict[str, Any], num_steps: int, capacity_steps: int) -> None:
        """Raise `SchemaError` unless the state orders `num_steps` records."""
        ages = state_dict.get("ages")
        sound = isinstance(ages, torch.Tensor) and ages.dtype == torch.int64
        if not sound or sorted(ages.tolist()) != list(range(num_steps)):  # type: ignore[union-attr]
            raise SchemaError(
                f"load_state_dict: expected 'ages', each of [0, {num_steps}) once, as the state_dict() of a "
                f"{type(self).__name__} with {num_steps} records has it"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the records that the storage holds, in the order in which they had come.

        Raises:
            SchemaError: a state of another number of records; nothing changed.
        """
        storage = self.storage
        self.check_state(state_dict, storage.num_steps, storage.capacity_steps)
        self._rank(storage, state_dict["ages"])

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the storage, with the order of its records."""
        ages = self._ages if self._storage is None else self.state_dict()["ages"]
        return {**super().__getstate__(), "_ages": ages, "_ranking": None, "_ranked": None, "_placed": None}

    def check_valid(self) -> None:
        """Raise AssertionError unless the ranks are those of the stored records; for tests."""
        ranking = self._current()
        assert np.array_equal(ranking.ranks[: ranking.size], self._read(self.storage))
        ranking.check_valid()
