"""The options that batches of environments share, and what the old keywords among them mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.arguments import positive_or_none
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from gleanrl.workers.handle import Timeouts

_REFUSED = ("pin_memory", "policy_proof", "allow_step_when_done")


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
    def of(cls, arguments: Mapping[str, Any]) -> BatchOptions:
        """Return those of a constructor, which calls this first of all with its ``locals()``.

        Raises:
            InvalidArgumentError: for an argument that only its default will do for, a bad number or a start method that
                there isn't.
            UnsupportedError: if both kinds of memory are asked for (also a RuntimeError).
        """
        for name in _REFUSED:
            if arguments[name]:
                raise InvalidArgumentError(f"{name}: {arguments[name]!r} isn't supported; leave it out")
        if arguments["memmap"] and arguments["shared_memory"]:
            raise UnsupportedError("memmap: pass shared_memory=False with it; neither has an effect")
        start_method = arguments["mp_start_method"]
        if start_method not in (None, "fork", "forkserver", "spawn"):
            raise InvalidArgumentError(
                f"mp_start_method: expected 'fork', 'forkserver' or 'spawn', got {start_method!r}"
            )
        num_threads = positive_or_none("num_threads", arguments["num_threads"])
        return cls(arguments["device"], num_threads, arguments["share_individual_td"])


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
