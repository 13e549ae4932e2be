"""No writer at all: a dataset that is only read."""

from __future__ import annotations

from typing import Any, NoReturn

from gleanrl.data.replay_buffers.storages.direct import Prepared
from gleanrl.data.replay_buffers.writers.base import NoState, Writer
from gleanrl.errors import UnsupportedError


class ImmutableDatasetWriter(Writer):
    """Refuses every write and `empty`: what the storage holds stays as it is.

    Restoring a saved state is no write: `load_state_dict` of the buffer works, also with the state of a buffer
    that had another writer.

    Examples:
        >>> import torch
        >>> from gleanrl.data.replay_buffers import ReplayBuffer, TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(4)), writer=ImmutableDatasetWriter())
        >>> len(buffer), buffer[1]
        (4, tensor(1))
    """

    def check_write(self, data: Any, where: str) -> None:
        """Raise `UnsupportedError`."""
        self._refuse(where)

    def place(self, prepared: Prepared) -> NoReturn:
        """Raise `UnsupportedError`."""
        self._refuse("place")

    def check_clear(self) -> None:
        """Raise `UnsupportedError`."""
        self._refuse("empty")

    def _refuse(self, where: str) -> NoReturn:
        raise UnsupportedError(
            f"{where}: the buffer has an ImmutableDatasetWriter and can't be changed; for a buffer that can, use "
            "another writer (set_writer)"
        )

    def parse(self, state: Any, stored: Any = None) -> NoState:
        """Accept every state: whatever position it names isn't needed."""
        return NoState()
