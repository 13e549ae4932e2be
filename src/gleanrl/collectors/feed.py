"""Where batches go instead of to the user: a replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from gleanrl.data.replay_buffers import RayReplayBuffer, ReplayBuffer
from gleanrl.data.replay_buffers.presets import copies_at_once
from gleanrl.errors import InvalidTypeError
from gleanrl.overrides import is_native
from gleanrl.system.interrupts import to_the_end


class Feed:
    """Puts batches into a buffer.

    Args:
        buffer: has `extend` and `add`; other threads may sample from it meanwhile if it allows that, as ours do.
        whole: whether a batch goes in by one `extend`; else step by step, by `add` for one environment, or several and
            a storage with their dimensions, by `extend` for several otherwise.

    Raises:
        InvalidTypeError: if `buffer` isn't one.
    """

    def __init__(self, buffer: Any, whole: bool = True) -> None:
        try:
            self._adders = buffer.add, buffer.extend
        except AttributeError as cause:
            raise InvalidTypeError(
                f"replay_buffer: expected a replay buffer, got {type(buffer).__name__}"
            ) from cause
        self.buffer, self._whole = buffer, whole

    @property
    def copies(self) -> bool:
        """Whether the buffer copies what it is given, and nobody else sees that."""
        return self._whole and (isinstance(self.buffer, RayReplayBuffer) or copies_at_once(self.buffer))

    @property
    def slot_dims(self) -> int:
        """The batch dimensions that the buffer's records stand in."""
        return self.buffer.storage.ndim if isinstance(self.buffer, ReplayBuffer) else 1

    def put(self, batch: Any, arrived: Callable[[], Any]) -> None:
        """Put a batch in, or what the buffer's `extend` takes in place of one, and call `arrived`, maybe twice.

        An interrupt comes before the batch is in, or after both; that holds for buffers of ours, whose writes end
        whatever comes.
        """
        if isinstance(batch, TensorDictBase) and not batch.batch_size.numel():
            arrived()
            return
        before = self._written()
        try:
            self._put(batch)
            arrived()
        except BaseException:
            try:
                self._settle(before, arrived)
            except BaseException:  # a second interrupt
                to_the_end(lambda: self._settle(before, arrived))
            raise

    def _settle(self, before: int | None, arrived: Callable[[], Any]) -> None:
        """Call `arrived` if a batch is in, given how many rows had been written before it."""
        if before is not None and self._written() != before:
            arrived()

    def _put(self, batch: TensorDictBase) -> None:
        if self._whole:
            self._adders[1](batch)
            return
        # To a storage of several batch dimensions a step of all environments is one record.
        put = self._adders[batch.ndim > self.slot_dims]
        for record in batch.unbind(-1):
            put(record)

    def _written(self) -> int | None:
        buffer = self.buffer
        return buffer.stats().rows_written if is_native(buffer, "stats", of=ReplayBuffer) else None
