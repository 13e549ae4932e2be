"""Helpers for processes that share a buffer. Rows name their writer and reveal tearing."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import torch
from tensordict import TensorDict

from gleanrl._os import fault_points
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer

WIDTH = 257


def rows(writer: int, first: int, count: int) -> TensorDict:
    """Return numbered rows of a writer; every value identifies the writer and the row."""
    t = torch.arange(first, first + count)
    key = t + 100_000 * writer
    done = (t % 5 == 4)[:, None]
    return TensorDict(
        {"key": key, "wide": key[:, None].repeat(1, WIDTH), "next": {"done": done, "key": key.double()}},
        [count],
    )


def check(batch: TensorDict) -> None:
    """Raise unless `rows` made every row."""
    key = batch["key"]
    assert (batch["wide"] == key[:, None]).all() and (batch["next", "key"] == key.double()).all(), (
        "a torn row"
    )
    assert torch.equal(batch["next", "done"][:, 0], key % 5 == 4)


def made(capacity: int, stored: int = 0, **options: object) -> ReplayBuffer:
    """Return a shared buffer with rows of writer 0."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=16, shared=True, **options)
    for first in range(0, stored, capacity):
        buffer.extend(rows(0, first, min(capacity, stored - first)))
    return buffer


def work(buffer: ReplayBuffer, writer: int, writes: int, count: int) -> None:
    """Extend and sample alternately."""
    for turn in range(writes):
        buffer.extend(rows(writer, turn * count, count))
        check(buffer.sample())


def write_for_ever(buffer: ReplayBuffer, writer: int, begun: int) -> None:
    """Write until killed; report the third write."""
    turn = 0
    while True:
        buffer.extend(rows(writer, turn * 7, 7))
        turn += 1
        if turn == 3:
            os.write(begun, b"x")


def forked(act: Callable[[], object]) -> int:
    """Start a process that exits with 0 if `act` raises nothing, else with 1; return its number."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn about forks of processes with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        act()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def ended(child: int) -> int:
    """Wait for a process; return its exit code, or the negative number of its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(act: Callable[[], object]) -> int:
    """Run `act` in a forked child; return its exit status as `ended` does."""
    return ended(forked(act))


def die() -> None:
    """Kill this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(point: str, act: Callable[[], object], spoil: Callable[[], object] | None = None) -> int:
    """Run `act` in a child that is killed at a fault point, after `spoil`; return its exit status."""

    def end() -> None:
        if spoil is not None:
            spoil()
        die()

    def acting() -> None:
        with fault_points.inject({point: end}):
            act()

    return in_child(acting)
