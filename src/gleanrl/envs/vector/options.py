"""The options that batches of environments share, and what the old keywords among them mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.arguments import positive_or_none
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from gleanrl.workers.handle import Timeouts


@dataclass(frozen=True)
class BatchOptions:
    """Options of a batch of environments.

    Attributes:
        device: where its TensorDicts live; None for where the environments' do.
        num_threads: torch threads of this process while the batch lives; None leaves them.
        share_individual_td: False asks for data that can be stacked densely.
    """

    device: Any = None
    num_threads: int | None = None
    share_individual_td: bool | None = None

    @classmethod
    def of(
        cls,
        device: Any,
        num_threads: Any,
        share_individual_td: bool | None,
        shared_memory: bool,
        memmap: bool,
        start_method: str | None,
        **refused: Any,
    ) -> BatchOptions:
        """Check the keywords.

        Args:
            device: see the attributes.
            num_threads: likewise.
            share_individual_td: likewise.
            shared_memory: no effect, unless with `memmap`.
            memmap: no effect, unless with `shared_memory`.
            start_method: no effect; one of Python's ways to start processes, or None.
            **refused: arguments that nothing but their default will do for.

        Raises:
            InvalidArgumentError: for a refused argument, a bad number or a start method that there isn't.
            UnsupportedError: if both kinds of memory are asked for (also a RuntimeError).
        """
        for name, value in refused.items():
            if value:
                raise InvalidArgumentError(f"{name}: {value!r} isn't supported; leave it out")
        if memmap and shared_memory:
            raise UnsupportedError("memmap: pass shared_memory=False with it; neither has an effect")
        if start_method not in (None, "fork", "forkserver", "spawn"):
            raise InvalidArgumentError(
                f"mp_start_method: expected 'fork', 'forkserver' or 'spawn', got {start_method!r}"
            )
        return cls(device, positive_or_none("num_threads", num_threads), share_individual_td)


def as_timeouts(timeouts: Any) -> Timeouts:
    """Return `timeouts`, the defaults for None.

    Raises:
        InvalidTypeError: for something else.
    """
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        raise InvalidTypeError(f"timeouts: expected Timeouts(…), got {type(timeouts).__name__}")
    return timeouts or Timeouts()


class ThreadCap:
    """Torch's number of threads in this process while a batch lives.

    Args:
        num_threads: the number; None leaves it.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._before: int | None = None

    def apply(self) -> None:
        """Set the number and remember the one before."""
        if self._num_threads is not None:
            self._before = torch.get_num_threads()
            torch.set_num_threads(self._num_threads)

    def lift(self) -> None:
        """Set the number that was there before."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
