"""A fixed data set and a growing buffer, sampled in a fixed proportion."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import is_tensor_collection
from torch.utils import _pytree

from gleanrl._util import non_negative, positive, positive_or_none
from gleanrl.compat import bind_unserved
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.storages.base import Storage
from gleanrl.data.replay_buffers.storages.tensor import LazyTensorStorage
from gleanrl.data.replay_buffers.transform_pipeline import Pipeline
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, UnsupportedError


@runtime_checkable
class Dataset(Protocol):
    """What transitions are drawn from: a replay buffer, of another library, too."""

    def sample(self, batch_size: int, /) -> Any:
        """Return a batch of so many."""

    def __len__(self) -> int:
        """Return how many there are."""


class OfflineToOnlineReplayBuffer:
    """Batches of which a fixed part comes from a data set, and the rest from a buffer that grows.

    Every batch has ``round(offline_fraction * batch_size)`` transitions of the data set, then those of the buffer, and
    is flat, ``[batch_size]``. As long as the buffer is empty all come from the data set. The records of both have the
    same keys and shapes. Each is drawn from by its own sampler and has its own state, which `offline_buffer` and
    `online_buffer` show; `extend` writes to the buffer alone.

    Args:
        offline_dataset: a `ReplayBuffer`, or a data set of another library with `sample` and `len`.
        online_storage: where new records are kept; a `ReplayBuffer` over it is made, one that carries indices where
            `offline_dataset` does.
        online_capacity: instead of it, how many: a `LazyTensorStorage` of that size.
        offline_fraction: the part of a batch that comes from the data set, above 0 and below 1.
        batch_size: transitions in a batch where `sample` isn't told otherwise.
        transform: acts on whole batches; see `ReplayBuffer`.
        **dataset_kwargs: of data sets by name, which aren't served.

    Raises:
        InvalidArgumentError: a bad value, or both or none of `online_storage` and `online_capacity`.
        UnsupportedError: a data set by its name.

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
                f"offline_dataset: {offline_dataset!r}: data sets aren't found by name here; load it, by TorchRL say, "
                "and give the object"
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
            raise InvalidArgumentError("online_storage, online_capacity: give one of them")
        kind = TensorDictReplayBuffer if isinstance(offline_dataset, TensorDictReplayBuffer) else ReplayBuffer
        self._offline = offline_dataset
        self._online = kind(
            storage=LazyTensorStorage(positive("online_capacity", online_capacity))
            if online_storage is None
            else online_storage
        )
        self._initial = self._fraction = float(offline_fraction)
        self._batch_size = positive_or_none("batch_size", batch_size)
        self._transforms = Pipeline()
        if transform is not None:
            self._transforms.insert(0, transform, False)

    @property
    def offline_fraction(self) -> float:
        """The part of a batch that comes from the data set now."""
        return self._fraction

    @property
    def offline_buffer(self) -> Any:
        """The data set."""
        return self._offline

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The buffer that grows."""
        return self._online

    def __len__(self) -> int:
        """Return the number of transitions in both."""
        return len(self._offline) + len(self._online)

    def extend(self, data: Any) -> torch.Tensor:
        """Write records to the buffer that grows; see `ReplayBuffer.extend`."""
        return self._online.extend(data)

    def anneal(self, step: int, total_steps: int) -> None:
        """Let the part of the data set fall in a straight line, from the one at construction to 0.

        Args:
            step: where on the line, 0 for its beginning.
            total_steps: where it ends; 0 from there on.
        """
        done = min(non_negative("step", step) / positive("total_steps", total_steps), 1.0)
        self._fraction = self._initial * (1.0 - done)

    def sample(self, batch_size: int | None = None) -> Any:
        """Return a batch.

        Args:
            batch_size: transitions; None for the one given at construction.

        Raises:
            UnsupportedError: no batch size, here or at construction.
            EmptyBufferError: nothing is stored.
            SchemaError: the records of the two differ.
        """
        size = self._batch_size if batch_size is None else positive("batch_size", batch_size)
        if size is None:
            raise UnsupportedError("sample: no batch_size was given, to this call or at construction")
        offline = size if not len(self._online) else round(self._fraction * size)
        counts = ((self._offline, offline), (self._online, size - offline))
        parts = [_drawn(source, count) for source, count in counts if count]
        return self._transforms.read(parts[0] if len(parts) == 1 else _joined(*parts))

    def __repr__(self) -> str:
        """Show both buffers and the proportion."""
        return (
            f"OfflineToOnlineReplayBuffer(offline={self._offline!r}, online={self._online!r}, "
            f"offline_fraction={self._fraction}, batch_size={self._batch_size})"
        )


def _drawn(source: Any, count: int) -> Any:
    # A buffer's `sample` would warn of a size that isn't its own.
    return (
        source.server.as_user(count, None, False).batch
        if isinstance(source, ReplayBuffer)
        else source.sample(count)
    )


def _joined(offline: Any, online: Any) -> Any:
    """Return the records of both, one behind the other."""
    if is_tensor_collection(offline) and is_tensor_collection(online):
        keys = [set(part.keys(True, True)) for part in (offline, online)]
        if keys[0] != keys[1]:
            raise SchemaError(
                f"sample: the data set's records alone have {sorted(map(str, keys[0] - keys[1]))}, those of the online "
                f"buffer alone {sorted(map(str, keys[1] - keys[0]))}; leave these out in a transform of either"
            )
        return torch.cat([offline, online])
    try:
        return _pytree.tree_map(lambda *leaves: torch.cat(leaves), offline, online)
    except (ValueError, TypeError) as cause:
        raise SchemaError(f"sample: the records of the two buffers differ: {cause}") from cause


bind_unserved(__name__, globals())
