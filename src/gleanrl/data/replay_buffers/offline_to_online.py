"""Batches from a fixed data set and a growing buffer, mixed in a fixed proportion."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.results import BufferStats, html_parts, parts_text
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl._util import non_negative, positive, positive_or_none
from gleanrl.compat import bind_unserved
from gleanrl.data.replay_buffers.describe import BufferDescription, StoredEpisodes
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.record_formats import ADDED_KEYS
from gleanrl.data.replay_buffers.storages.tensor import LazyTensorStorage
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline
from gleanrl.data.replay_buffers.verify import AuditReport
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


@runtime_checkable
class Dataset(Protocol):
    """The protocol of a data set: a replay buffer, which may come from another library."""

    def sample(self, batch_size: int, /) -> Any:
        """Return a batch of `batch_size` transitions."""

    def __len__(self) -> int:
        """Return the number of transitions."""


class OfflineToOnlineReplayBuffer:
    """A buffer that mixes transitions of a data set with transitions of a growing buffer.

    Each batch is flat, ``[batch_size]``. It has ``round(offline_fraction * batch_size)`` transitions of the data set,
    followed by transitions of the growing buffer. While the growing buffer is empty, all transitions come from the data
    set. The records of both must have the same keys and shapes. The constructor and the first `extend` check the keys
    of two `ReplayBuffer`s without transforms. `sample` checks all others, and entries that samplers add, such as
    importance weights.

    Each source has its own sampler and state, accessible as `offline_buffer` and `online_buffer`. `extend` writes to
    the growing buffer only.

    Args:
        offline_dataset: a `ReplayBuffer`, or a data set of another library with `sample` and `len`.
        online_storage: the storage of the growing buffer. The constructor makes a `ReplayBuffer` over it, or a
            `TensorDictReplayBuffer` if `offline_dataset` is one.
        online_capacity: instead of `online_storage`, the capacity of a new `LazyTensorStorage`.
        offline_fraction: the fraction of a batch that comes from the data set, above 0 and below 1.
        batch_size: the default number of transitions in a batch.
        transform: a transform of whole batches; see `ReplayBuffer`. It never acts on writes.
        **dataset_kwargs: arguments of data sets by name, which aren't supported.

    Raises:
        InvalidTypeError: `offline_dataset` has no `sample` or no length, or there are `dataset_kwargs`.
        InvalidArgumentError: a bad value, or not exactly one of `online_storage` and `online_capacity`.
        UnsupportedError: `offline_dataset` is a name.
        SchemaError: the records of the data set and of `online_storage` have other keys.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage, ReplayBuffer
        >>> offline = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> index = offline.extend(TensorDict({"x": torch.zeros(100)}, [100]))
        >>> buffer = OfflineToOnlineReplayBuffer(offline, online_capacity=50, offline_fraction=0.25, batch_size=8)
        >>> index = buffer.extend(TensorDict({"x": torch.ones(5)}, [5]))
        >>> buffer.sample()["x"]
        tensor([0., 0., 1., 1., 1., 1., 1., 1.])
    """

    def __init__(
        self,
        offline_dataset: Dataset | str,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        **dataset_kwargs: Any,
    ) -> None:
        if isinstance(offline_dataset, str):
            raise UnsupportedError(
                f"offline_dataset: expected a buffer or data set, got the name {offline_dataset!r}; load the data set "
                "first, for example with TorchRL, and pass the object"
            )
        if dataset_kwargs:
            raise InvalidTypeError(
                f"OfflineToOnlineReplayBuffer: unexpected arguments {sorted(dataset_kwargs)}"
            )
        if not isinstance(offline_dataset, Dataset):
            raise InvalidTypeError(
                f"offline_dataset: expected a buffer with sample() and len(), got {offline_dataset!r:.99}"
            )
        if not 0.0 < offline_fraction < 1.0:
            raise InvalidArgumentError(
                f"offline_fraction: expected a number in (0, 1), got {offline_fraction!r}"
            )
        if (online_storage is None) == (online_capacity is None):
            found = "none" if online_storage is None else "both"
            raise InvalidArgumentError(f"online_storage, online_capacity: expected one of them, got {found}")
        kind = TensorDictReplayBuffer if isinstance(offline_dataset, TensorDictReplayBuffer) else ReplayBuffer
        self._offline = offline_dataset
        self._online = kind(
            storage=LazyTensorStorage(positive("online_capacity", online_capacity))
            if online_storage is None
            else online_storage
        )
        _require_same_keys("offline_dataset", _keys_of(self._offline), _keys_of(self._online))
        self._initial = self._fraction = float(offline_fraction)
        self._batch_size = positive_or_none("batch_size", batch_size)
        self._transforms = Pipeline()
        if transform is not None:
            self._transforms.insert(0, transform, False)

    @property
    def offline_fraction(self) -> float:
        """The fraction of a batch that presently comes from the data set."""
        return self._fraction

    @property
    def offline_buffer(self) -> Any:
        """The data set."""
        return self._offline

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The growing buffer."""
        return self._online

    def __len__(self) -> int:
        """Return the sum of the lengths of both."""
        return len(self._offline) + len(self._online)

    def extend(self, data: Any) -> torch.Tensor:
        """Write records to the growing buffer; see `ReplayBuffer.extend`.

        Raises:
            SchemaError: the first records have other keys than the data set's; nothing is written.
        """
        if not len(self._online) and not len(self._online.transforms) and is_tensor_collection(data):
            found = set(data.keys(True, True))
            # The buffer leaves out the entries that it added to a batch.
            _require_same_keys("extend", _keys_of(self._offline), found - set(ADDED_KEYS))
        return self._online.extend(data)

    def anneal(self, step: int, total_steps: int) -> None:
        """Reduce the data set's fraction linearly, from its value at construction to 0.

        Args:
            step: the present step, 0 or more. Only this number counts, not the earlier calls.
            total_steps: the step at which the fraction reaches 0; it stays 0 afterwards.
        """
        done = min(non_negative("step", step) / positive("total_steps", total_steps), 1.0)
        self._fraction = self._initial * (1.0 - done)

    def sample(self, batch_size: int | None = None) -> Any:
        """Return a batch.

        Args:
            batch_size: number of transitions; None for the constructor's.

        Raises:
            UnsupportedError: no batch size, in this call or at construction.
            EmptyBufferError: a source that is drawn from is empty.
            SchemaError: the records of the two sources differ.
        """
        size = self._batch_size if batch_size is None else positive("batch_size", batch_size)
        if size is None:
            raise UnsupportedError(
                "sample: no batch_size was given; pass it to sample() or to the constructor"
            )
        offline = size if not len(self._online) else round(self._fraction * size)
        counts = ((self._offline, offline), (self._online, size - offline))
        parts = [_drawn(source, count) for source, count in counts if count]
        return self._transforms.read(parts[0] if len(parts) == 1 else _joined(*parts))

    def stats(self) -> tuple[BufferStats, BufferStats]:
        """Return the counters of the data set and of the growing buffer.

        Raises:
            UnsupportedError: the data set isn't a `ReplayBuffer`. The same holds for the next three methods.
        """
        return self._readable("stats").stats(), self._online.stats()

    def describe(self) -> tuple[BufferDescription, BufferDescription]:
        """Return the statistics of the stored keys of both buffers; see `ReplayBuffer.describe`."""
        return self._readable("describe").describe(), self._online.describe()

    def episodes(self) -> tuple[StoredEpisodes, StoredEpisodes]:
        """Return the stored trajectories of both buffers; see `ReplayBuffer.episodes` for the errors."""
        return self._readable("episodes").episodes(), self._online.episodes()

    def verify(self) -> tuple[AuditReport, AuditReport]:
        """Check the stored records of both buffers; see `ReplayBuffer.verify`."""
        return self._readable("verify").verify(), self._online.verify()

    def _readable(self, method: str) -> ReplayBuffer:
        """Return the data set if it is a `ReplayBuffer`."""
        if not isinstance(self._offline, ReplayBuffer):
            raise UnsupportedError(
                f"{method}: expected a ReplayBuffer as data set, got a {type(self._offline).__name__}; call "
                f"online_buffer.{method}() for the growing buffer alone"
            )
        return self._offline

    def __repr__(self) -> str:
        """Show both buffers and the fraction."""
        return parts_text("OfflineToOnlineReplayBuffer", self._repr_parts())

    def _repr_html_(self) -> str:
        return html_parts("OfflineToOnlineReplayBuffer", self._repr_parts())

    def _repr_parts(self) -> dict[str, object]:
        sources = {"offline": self._offline, "online": self._online}
        return {**sources, "offline_fraction": self._fraction, "batch_size": self._batch_size}


def _drawn(source: Any, count: int) -> Any:
    # `ReplayBuffer.sample` would warn about a size other than the buffer's batch size.
    return (
        source.server.as_user(count, None, False).batch
        if isinstance(source, ReplayBuffer)
        else source.sample(count)
    )


def _keys_of(source: Any) -> set[NestedKey] | None:
    """Return the keys of a buffer's records; None if they are unknown, or a transform may change them."""
    if not isinstance(source, ReplayBuffer) or not len(source) or len(source.transforms):
        return None
    record = source[:1]
    return set(record.keys(True, True)) if is_tensor_collection(record) else None


def _require_same_keys(where: str, offline: set[NestedKey] | None, online: set[NestedKey] | None) -> None:
    """Raise `SchemaError` if both sets of keys are known and differ."""
    if offline is not None and online is not None and offline != online:
        only_offline, only_online = (sorted(map(str, keys)) for keys in (offline - online, online - offline))
        raise SchemaError(
            f"{where}: only the data set's records have {only_offline}, and only the online buffer's have "
            f"{only_online}; remove these keys in a transform of either"
        )


def _joined(offline: Any, online: Any) -> Any:
    """Return the records of both sources, concatenated."""
    if is_tensor_collection(offline) and is_tensor_collection(online):
        _require_same_keys("sample", set(offline.keys(True, True)), set(online.keys(True, True)))
        try:
            return torch.cat([offline, online])
        except RuntimeError:
            for key in offline.keys(True, True):
                shapes = [tuple(part.get(key).shape[1:]) for part in (offline, online)]
                if shapes[0] != shapes[1]:
                    raise SchemaError(
                        f"sample: {key!r} has shape {shapes[0]} in the data set's records, and {shapes[1]} in the "
                        "online buffer's; make them equal in a transform of either"
                    ) from None
            raise
    try:
        return _pytree.tree_map(lambda *leaves: torch.cat(leaves), offline, online)
    except (ValueError, TypeError, RuntimeError):
        # Without the cause, whose text contains all values.
        raise SchemaError(
            f"sample: the records of the two buffers differ: {_form(offline)} and {_form(online)}; make them equal in "
            "a transform of either"
        ) from None


def _form(records: Any) -> str:
    """Return a description of records without their values."""
    if is_tensor_collection(records):
        return f"a {type(records).__name__} with the keys {list(records.keys(True, True))}"
    if isinstance(records, dict):
        return f"a dict with the keys {list(records)}"
    if isinstance(records, (tuple, list)):
        return f"a {type(records).__name__} of ({', '.join(map(_form, records))})"
    return f"a tensor {tuple(records.shape)}" if isinstance(records, torch.Tensor) else type(records).__name__


bind_unserved(__name__, globals())
