"""What every collector offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from gleanrl.errors import UnsupportedError


class DataCollectorBase(IterableDataset, ABC):  # type: ignore[type-arg]
    """Abstract collector: an iterable of batches. Not thread-safe: one caller at a time."""

    _own_iterator: Iterator[TensorDictBase] | None = None

    @abstractmethod
    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is spent."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Release what the collector holds; calling it again does nothing."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and return the last seed that was used."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Take over a saved state."""

    @abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None) -> None:
        """Copy weights into the collector's own policy."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Iterate over batches; a new iteration goes on where the last one stopped."""
        return self.iterator()

    def next(self) -> TensorDictBase | None:
        """Return the next batch, without a device of its own, or None when the budget is spent."""
        if self._own_iterator is None:
            self._own_iterator = self.iterator()
        try:
            batch = next(self._own_iterator, None)
        except BaseException:
            self._own_iterator = None  # a generator that raised is spent; the collector isn't
            raise
        return batch.clear_device_() if isinstance(batch, TensorDictBase) else batch

    def __class_getitem__(cls, item: Any) -> Any:
        """Refuse: collectors aren't generic."""
        raise UnsupportedError(f"{cls.__name__}[{item!r}]: collectors can't be subscripted")

    def __getitem__(self, index: Any) -> Any:
        """Refuse: batches come in order only."""
        raise UnsupportedError("a collector can't be indexed; iterate over it")

    def __getstate__(self) -> Any:
        """Refuse: a running environment can't be copied."""
        raise UnsupportedError(
            f"{type(self).__name__} holds a running environment and can't be pickled or copied; save its state_dict()"
        )

    def __del__(self) -> None:
        """Shut down with the last reference."""
        if getattr(self, "_ready", False):
            self._abandoned()

    def _abandoned(self) -> None:
        """Release what the collector holds, now that nobody refers to it."""
        self.shutdown()
