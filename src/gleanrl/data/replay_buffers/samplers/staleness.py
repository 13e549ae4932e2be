"""A sampler that prefers records of newer policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gleanrl._arrays.results import Draw
from gleanrl._arrays.tensordicts import NestedKey, as_key, key_argument
from gleanrl._state.state import StateReader
from gleanrl._util import integer, optional_callable
from gleanrl.data.replay_buffers.change_log import Version
from gleanrl.data.replay_buffers.samplers.base import Sampler, SamplerState
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.errors import (
    EmptyBufferError,
    InvalidArgumentError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)


class _Weights(NamedTuple):
    """The weights of all rows, and the inputs that they were computed from."""

    cache_key: tuple[Version, int, int]
    """The storage's version, `consumer_version` and `max_staleness`: the weights are valid while these stay equal."""
    staleness: torch.Tensor
    """Staleness of each row, ``(rows,)`` int64."""
    upto: torch.Tensor
    """Cumulative sum of the weights, ``(rows,)`` float64, non-decreasing."""


class StalenessAwareSampler(Sampler):
    """Draws records of newer policies more often than records of older ones, with replacement.

    Each record holds the version of the policy that collected it (see the collectors' `track_policy_version`). The
    learner sets `consumer_version`. The difference is the record's *staleness*. Batches of TensorDict buffers and infos
    carry it as ``"staleness"``, ``(n,)`` float32. A batch that is drawn ahead (`prefetch`) uses the `consumer_version`
    at its draw.

    A draw of n rows costs O(rows) after a write and after a change of `consumer_version`. Otherwise it costs O(n log
    rows). Memory: 16 bytes for each row.

    Args:
        max_staleness: largest staleness that is drawn; -1 for no limit.
        staleness_weight_fn: maps the staleness of all rows, ``(rows,)`` int64, to weights, ``(rows,)``, finite and 0 or
            more. Records are drawn in proportion to these weights. None for ``1 / (staleness + 1)``, where a record
            newer than `consumer_version` has weight 1.
        version_key: key of the version, an integer for each record.
        seed: see `Sampler`.

    Raises:
        EmptyBufferError: at a draw, all stored records have weight 0.
        InvalidArgumentError: `max_staleness` is out of range. Also at a draw, if `staleness_weight_fn` returned other
            values than such weights.
        InvalidTypeError: `staleness_weight_fn` isn't callable, or `version_key` isn't a key.
        UnsupportedError: when a buffer takes the sampler, its storage has no columns.
        MissingKeyError: at a draw, `version_key` isn't stored.
        SchemaError: at a draw, the version isn't one integer for each record.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=50)
        >>> index = buffer.extend(TensorDict({"policy_version": torch.arange(6)}, [6]))
        >>> sampler.consumer_version = 5
        >>> buffer.sample()["policy_version"].unique()
        tensor([4, 5])
    """

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: NestedKey = "policy_version",
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        self.max_staleness = integer("max_staleness", max_staleness, -1)
        """The largest staleness that is drawn; -1 for no limit."""
        self._weight = optional_callable("staleness_weight_fn", staleness_weight_fn) or _freshness
        self._path = key_argument("version_key", version_key)
        self._consumer = 0
        self._found: _Weights | None = None

    @property
    def consumer_version(self) -> int:
        """Version of the policy that the learner trains, an integer; 0 at first."""
        return self._consumer

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        self._consumer = integer("consumer_version", version)

    def increment_consumer_version(self) -> None:
        """Increase `consumer_version` by one."""
        self._consumer += 1

    def check_storage(self, storage: Storage) -> None:
        """Raise `UnsupportedError` for a storage without columns."""
        if not isinstance(storage, TensorStorage):
            raise UnsupportedError(
                f"StalenessAwareSampler: versions are read from a column, a {type(storage).__name__} holds single "
                "objects; use LazyTensorStorage"
            )

    def _draw(self, storage: Storage, batch_size: int) -> Draw:
        weights = self._weights(storage)
        total = weights.upto[-1]
        slots = torch.searchsorted(weights.upto, self.random.uniforms(batch_size) * total, right=True)
        # Rounding can give `total` itself, which lies behind the last row with a weight: draw that row instead.
        slots = slots.clamp_(max=int(torch.searchsorted(weights.upto, total)))
        return Draw(slots, {"staleness": weights.staleness[slots].float()})

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        return self._draw(storage, draw.slots.shape[0])

    def _weights(self, storage: Storage) -> _Weights:
        """Return the weights of the stored rows.

        They are cached, because computing them costs O(rows). The cache is valid while the storage's version,
        `consumer_version` and `max_staleness` don't change.
        """
        found, consumer = self._found, self._consumer
        cache_key = (storage.version, consumer, self.max_staleness)
        if found is not None and found.cache_key == cache_key:
            return found
        staleness = consumer - self._versions(storage)
        weight = self._weight(staleness)
        fits = isinstance(weight, torch.Tensor) and weight.shape == staleness.shape
        if not fits or not bool((weight.isfinite() & (weight >= 0)).all()):
            raise InvalidArgumentError(
                f"staleness_weight_fn: expected finite weights {tuple(staleness.shape)}, 0 or more, got {weight!r:.99}"
            )
        weight = weight.to("cpu", torch.float64)
        if self.max_staleness >= 0:
            weight = weight.masked_fill(staleness > self.max_staleness, 0.0)
        if (masked := storage.masked(torch.arange(len(storage), device="cpu"))) is not None:
            weight = weight.masked_fill(masked, 0.0)
        upto = weight.cumsum(0)
        if not upto[-1] > 0:
            raise EmptyBufferError(
                f"can't sample: all stored records have weight 0 with consumer_version={consumer} and max_staleness="
                f"{self.max_staleness}; the smallest staleness is {int(staleness.min())}. Send newer weights to the "
                "collector, or raise max_staleness"
            )
        self._found = _Weights(cache_key, staleness, upto)
        return self._found

    def _versions(self, storage: Storage) -> torch.Tensor:
        """Return the version of each stored row, ``(rows,)`` int64."""
        assert isinstance(storage, TensorStorage)
        schema, key = storage.format.schema, as_key(self._path)
        if self._path not in schema:
            raise MissingKeyError(
                f"version_key: {key!r} isn't stored; have the collector count versions (track_policy_version=True), or "
                f"name one of {[as_key(path) for path in schema.paths]}"
            )
        column = storage.column(self._path)[: len(storage)]
        if column.dtype.is_floating_point or column.dtype.is_complex or column[:1].numel() != 1:
            raise SchemaError(
                f"version_key: expected one integer for each record at {key!r}, got {tuple(column.shape[1:])} "
                f"{column.dtype}"
            )
        return column.reshape(-1).to("cpu", torch.int64)

    # A position excludes `consumer_version`: the learner's version stays when a draw is taken back.
    draw_position, parse_draw_position = Sampler.snapshot, Sampler.parse

    def snapshot(self) -> SamplerState:
        """Return the position in the sequence of draws, and `consumer_version`."""
        return self.draw_position()._replace(running=self._consumer)

    def parse(self, state: Any) -> SamplerState:
        """Return the value of a saved state (see `Sampler.parse`)."""
        reader = StateReader(state, "a StalenessAwareSampler")
        if type(consumer := reader.get("running")) is not int:
            raise reader.wrong("running", "the consumer_version, an integer")
        return self.parse_draw_position(state)._replace(running=consumer)

    def turned(self, value: SamplerState, by: int, rows: int) -> SamplerState:
        """Return the value unchanged: it refers to no slot."""
        return value

    def adopt(self, value: SamplerState) -> None:
        """Continue from a position or a state."""
        super().adopt(value)
        if value.running is not None:
            self._consumer = value.running

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: without the weights, which the copy computes again."""
        return {**super().__getstate__(), "_found": None}


def _freshness(staleness: torch.Tensor) -> torch.Tensor:
    return 1.0 / (staleness.clamp(min=0).double() + 1.0)
