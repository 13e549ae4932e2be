"""Storage for TensorDicts that differ in shapes or keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection

from gleanrl.arguments import integer
from gleanrl.data.replay_buffers.storages.lists import ListStorage, collate, unshared


class LazyStackStorage(ListStorage):
    """A `ListStorage` of TensorDicts whose batches are lazy stacks: records may differ in shapes and in keys.

    What all records of a batch have, in one shape, is stacked when it is asked for; the rest is in the records
    (``batch.unbind(0)``), or padded by ``batch.get(key, as_padded_tensor=True)``.

    Args:
        max_size: records that fit; see `ListStorage`.
        compilable: see `ListStorage`.
        stack_dim: where the dimension of the records goes; negative ones count from the end.
        device: see `ListStorage`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
        >>> index = rb.extend([TensorDict(words=torch.arange(n), text="a" * n) for n in (1, 2, 3)])
        >>> batch = rb.sample()
        >>> all(len(record["words"]) == len(record["text"]) for record in batch.unbind(0))
        True
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        stack_dim: int = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        self.stack_dim = integer("stack_dim", stack_dim)
        self.collate = self._collated

    def collated_by(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what makes a batch of fetched records by a user's function, which gets the lazy stack."""
        return lambda items: collate_fn(self._collated(items))

    def _collated(self, items: Any) -> Any:
        """Return a batch of copies of records in a list, or of what is stacked already."""
        batch = self._together(items) if isinstance(items, list) else items
        return unshared(batch) if is_tensor_collection(batch) else batch

    def _together(self, items: list[Any]) -> Any:
        """Return a lazy stack of TensorDicts; of other objects what a `ListStorage` gives."""
        if not items:
            return items
        if is_tensor_collection(items[0]):
            return LazyStackedTensorDict.lazy_stack(items, self.stack_dim)
        return collate(items)
