"""Buffers of TensorDicts, and buffers with a prioritized sampler."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.devices import outside_graphs
from gleanrl._arrays.tensordicts import NestedKey, as_key, key_argument
from gleanrl._util import is_native, is_ours
from gleanrl.data.replay_buffers.components import Parts
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.writers.round_robin import TensorDictRoundRobinWriter
from gleanrl.data.replay_buffers.writing import TensorDictInserter
from gleanrl.errors import InvalidArgumentError


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` with a `PrioritizedSampler`.

    Other arguments are documented in `PrioritizedSampler`.

    Args:
        **options: see `ReplayBuffer`; `sampler` isn't accepted.

    Examples:
        >>> import torch
        >>> from gleanrl.data import LazyTensorStorage
        >>> buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), seed=0)
        >>> index = buffer.extend(torch.arange(4))
        >>> buffer.update_priority(index, torch.tensor([0.0, 0.0, 3.0, 0.0]))
        >>> batch, info = buffer.sample(2, return_info=True)
        >>> batch, info["_weight"].shape
        (tensor([2, 2]), torch.Size([2]))
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(sampler=_prioritized(options, alpha, beta, eps, dtype), **options)


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of TensorDicts, whose batches carry their index.

    Batches carry ``index`` (``(n,)`` int64, or ``(n, ndim)`` coordinates) and the sampler's extra entries. These are
    the importance weights ``_weight`` and ``priority_weight`` with ``_generation``, or the flags of cut slices.
    `extend` leaves these keys out when a batch is written again, and never modifies its argument. Records must be
    TensorDicts: `add` and `extend` raise `InvalidArgumentError` for any others, also for tensorclasses.

    Args:
        priority_key: key of the priorities, for `add`, `extend` and `update_tensordict_priority`.
        **options: see `ReplayBuffer`. The default writer is a `TensorDictRoundRobinWriter`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, seed=0)
        >>> index = buffer.extend(TensorDict({"x": torch.arange(4) * 10}, [4]))
        >>> batch = buffer.sample()
        >>> bool((batch["x"] == batch["index"] * 10).all())
        True
    """

    _carries = True
    _intake: TensorDictInserter

    def __init__(self, *, priority_key: NestedKey = "td_error", **options: Any) -> None:
        self._priority_key = as_key(key_argument("priority_key", priority_key))
        if options.get("writer") is None:
            options["writer"] = TensorDictRoundRobinWriter()
        super().__init__(**options)

    def _make_inserter(self, gate: BufferLock, parts: Parts) -> TensorDictInserter:
        return TensorDictInserter(gate, parts, self._priority_key)

    @property
    def priority_key(self) -> NestedKey:
        """The key of the priorities."""
        return self._intake.priority_key

    @priority_key.setter
    def priority_key(self, key: NestedKey) -> None:
        self._intake.priority_key = as_key(key_argument("priority_key", key))

    @outside_graphs
    def add(self, data: Any) -> Any:
        """Store one TensorDict, with its priority at `priority_key` if it has one; see `extend`."""
        return self._intake.store(data, True, "add", True)

    @outside_graphs
    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Store many TensorDicts, the oldest first; see `ReplayBuffer.extend`.

        Their values at `priority_key`, if present, become the priorities of a prioritized sampler. A bad priority
        raises as in `update_tensordict_priority`, and nothing is stored.

        Args:
            data: see `ReplayBuffer.extend`.
            update_priority: False to ignore the priorities at `priority_key` and give records the priority of new ones.
                None and True use them.
        """
        return self._intake.store(data, False, "extend", update_priority is not False)

    @outside_graphs
    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a batch's records to the batch's values at `priority_key`.

        The sampler's `reduction` combines several values for one record. Without the entry the records get the priority
        of new ones. Does nothing if the sampler has no priorities.

        Args:
            data: a batch ``[n, ...]`` from `sample`, with ``index`` (and ``_generation``).

        Raises:
            MissingKeyError: no ``index``.
            IndexRangeError: see `update_priority`; nothing changed.
            SchemaError: the entry doesn't fit the batch; nothing changed.
            InvalidArgumentError: a priority that is negative, infinite or NaN; nothing changed.
        """
        self._intake.take_priorities(data, self.mark_update, self.update_priority)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`.

    Other arguments are documented in `PrioritizedSampler` and `TensorDictReplayBuffer`.

    Args:
        **options: see `ReplayBuffer`; `sampler` isn't accepted.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage
        >>> buffer = TensorDictPrioritizedReplayBuffer(
        ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=2, seed=0
        ... )
        >>> index = buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
        >>> batch = buffer.sample()
        >>> batch["td_error"] = torch.tensor([0.5, 2.0])
        >>> buffer.update_tensordict_priority(batch)
        >>> buffer.sample()["_weight"].shape
        torch.Size([2])
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: NestedKey = "td_error",
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        **options: Any,
    ) -> None:
        sampler = _prioritized(options, alpha, beta, eps, dtype, reduction)
        super().__init__(priority_key=priority_key, sampler=sampler, **options)


def copies_at_once(buffer: Any) -> bool:
    """Return whether `extend` of a buffer only copies its argument, so that a borrowed view of the data is safe.

    A user's override, writer, storage or transform could keep a reference to the data.
    """
    return (
        any(
            is_native(buffer, "extend", "_extend", of=kind) for kind in (ReplayBuffer, TensorDictReplayBuffer)
        )
        and isinstance(buffer.storage, TensorStorage)
        and is_ours(type(buffer.storage))
        and is_ours(type(buffer.writer))
        and not len(buffer.transforms)
    )


def _prioritized(options: dict[str, Any], *rule: Any) -> PrioritizedSampler:
    """Return the sampler of a preset and remove ``"sampler"`` from the options; `InvalidArgumentError` if it is set."""
    if options.pop("sampler", None) is not None:
        raise InvalidArgumentError(
            "sampler: this buffer creates its own PrioritizedSampler; leave sampler out, or use a ReplayBuffer or "
            "TensorDictReplayBuffer"
        )
    return PrioritizedSampler(None, *rule)
