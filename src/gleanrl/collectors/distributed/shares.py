"""How batches travel from a node to its owner: lent, or through the object store. Nobody else has to know which."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from tensordict import TensorDictBase

from gleanrl.block import Block
from gleanrl.parcels import Arrived
from gleanrl.pool import BufferPool
from gleanrl.schema import Schema
from gleanrl.tree import flatten


class Share(ABC):
    """A batch that is here, in memory that isn't its owner's: only to be read, and only until the node's next order."""

    @abstractmethod
    def view(self) -> TensorDictBase:
        """Return the batch where it stands."""

    @abstractmethod
    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return the batch in memory of its own."""

    @abstractmethod
    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns where they stand, and what it says of its device."""


class StoredShare(Share):
    """A batch in the object store.

    Args:
        parcel: it.
    """

    def __init__(self, parcel: Arrived) -> None:
        self._parcel = parcel

    def view(self) -> TensorDictBase:
        """Return the batch where it stands."""
        batch: TensorDictBase = self._parcel.view()
        return batch

    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return the batch in memory of its own, that of the parcels' own pool."""
        batch: TensorDictBase = self._parcel.open()
        return batch

    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns where they stand, and what it says of its device."""
        batch = self.view()
        columns, size = [*flatten(batch).values()], batch.batch_size
        return Block(Schema.of(batch), size[:-1], size[-1], columns=columns, borrowed=True), batch.device


class LentShare(Share):
    """A batch in memory that its node has lent.

    Args:
        block: it.
        device: what it says of its device.
    """

    def __init__(self, block: Block, device: torch.device | None) -> None:
        self._block, self._device = block, device

    def view(self) -> TensorDictBase:
        """Return the batch where it stands."""
        batch: TensorDictBase = self._block.batch(None, self._device)
        return batch

    def own(self, pool: BufferPool) -> TensorDictBase:
        """Return the batch in memory of its own."""
        batch: TensorDictBase = self._block.copied(pool).batch(None, self._device)
        return batch

    def block(self) -> tuple[Block, torch.device | None]:
        """Return the batch's columns where they stand, and what it says of its device."""
        return self._block, self._device
