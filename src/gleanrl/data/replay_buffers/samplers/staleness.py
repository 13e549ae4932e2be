"""Draws by the age of the policy that collected a record."""

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
    """The rule as of one moment."""

    moment: tuple[Version, int, int]
    """The storage's version, `consumer_version` and `max_staleness`."""
    staleness: torch.Tensor
    """Of each row, ``(rows,)`` int64."""
    upto: torch.Tensor
    """Weights summed up, ``(rows,)`` float64, not falling."""


class StalenessAwareSampler(Sampler):
    """Draws records of newer policies more often, and those of old ones not at all, with replacement.

    Each record holds the version of the policy that collected it (see the collectors' `track_policy_version`); the
    learner sets `consumer_version`. The difference is a record's *staleness*, which batches of TensorDict buffers and
    infos carry as ``"staleness"``, ``(n,)`` float32. Batches that are drawn ahead (`prefetch`) go by the
    `consumer_version` at their draw.

    After a write, or with another `consumer_version`, a draw of n costs O(rows), else O(n log rows). Memory: 16 bytes
    for each row.

    Args:
        max_staleness: records that are staler are left out; -1 for none.
        staleness_weight_fn: maps the staleness of all rows, ``(rows,)`` int64, to weights, ``(rows,)``, finite and 0 or
            more: what records are drawn in proportion to. None for ``1 / (staleness + 1)``, 1 for records that are
            newer than `consumer_version`.
        version_key: where the version stands, an integer for each record.
        seed: see `Sampler`.

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
        """The largest staleness that is drawn; -1 for any."""
        self._weight = optional_callable("staleness_weight_fn", staleness_weight_fn) or _freshness
        self._path = key_argument("version_key", version_key)
        self._consumer = 0
        self._found: _Weights | None = None

    @property
    def consumer_version(self) -> int:
        """The version of the policy that learns."""
        return self._consumer

    @consumer_version.setter
    def consumer_version(self, version: int) -> None:
        self._consumer = integer("consumer_version", version)

    def increment_consumer_version(self) -> None:
        """Count the version of the policy that learns up by one."""
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
        # Rounding may lead behind the last row that has a weight.
        slots = slots.clamp_(max=int(torch.searchsorted(weights.upto, total)))
        return Draw(slots, {"staleness": weights.staleness[slots].float()})

    def _redraw(self, storage: Storage, draw: Draw, stale: torch.Tensor) -> Draw:
        return self._draw(storage, draw.slots.shape[0])

    def _weights(self, storage: Storage) -> _Weights:
        """Return the weights of what is stored now."""
        found, consumer = self._found, self._consumer
        moment = (storage.version, consumer, self.max_staleness)
        if found is not None and found.moment == moment:
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
                f"can't sample: no stored record has a weight with consumer_version={consumer} and max_staleness="
                f"{self.max_staleness}; the least staleness is {int(staleness.min())}. Send newer weights to the "
                "collector, or allow more"
            )
        self._found = _Weights(moment, staleness, upto)
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

    # State

    # Without `consumer_version`, which stays when a draw is taken back.
    place, parse_place = Sampler.snapshot, Sampler.parse

    def snapshot(self) -> SamplerState:
        """Return the place in the sequence of draws, and `consumer_version`."""
        return self.place()._replace(running=self._consumer)

    def parse(self, state: Any) -> SamplerState:
        """Return the value that a saved state stands for (see `Sampler.parse`)."""
        reader = StateReader(state, "a StalenessAwareSampler")
        if type(consumer := reader.get("running")) is not int:
            raise reader.wrong("running", "the consumer_version, an integer")
        return self.parse_place(state)._replace(running=consumer)

    def turned(self, value: SamplerState, by: int, rows: int) -> SamplerState:
        """Return the value: no slot is in it."""
        return value

    def adopt(self, value: SamplerState) -> None:
        """Go on from a place or a state."""
        super().adopt(value)
        if value.running is not None:
            self._consumer = value.running

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the weights, which are found again."""
        return {**super().__getstate__(), "_found": None}


def _freshness(staleness: torch.Tensor) -> torch.Tensor:
    return 1.0 / (staleness.clamp(min=0).double() + 1.0)
