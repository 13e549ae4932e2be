"""Lower bound of a vector step through processes: wake n workers, let each write a row, and wait for all of them."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

KINDS = ("pipe", "eventfd", "semaphore")


class Ping:
    """Forked processes that write one row each time they are woken. `step` wakes all of them and waits for all.

    Args:
        num_workers: number of processes.
        row_bytes: bytes of a row.
        kind: how processes wake each other, one of `KINDS`.
        before: called by a worker before it writes.
    """

    def __init__(
        self, num_workers: int, row_bytes: int, kind: str, before: Callable[[], Any] | None = None
    ) -> None:
        shared: Any = mmap.mmap(-1, num_workers * row_bytes)
        self.rows = np.frombuffer(shared, np.uint8).reshape(num_workers, row_bytes)
        self.out = np.empty_like(self.rows)
        wait, done, self._wake_all = _wakers(kind, num_workers)
        source = np.zeros(row_bytes, np.uint8)
        pids = []
        for i in range(num_workers):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the parent ends its workers
                with suppress(OSError):
                    while True:
                        wait(i)
                        if before is not None:
                            before()
                        self.rows[i] = source
                        done(i)
                os._exit(0)
            pids.append(pid)
        weakref.finalize(self, _end, pids)

    def step(self) -> None:
        """Wake all workers, wait for all, and copy the rows."""
        self._wake_all()
        self.out[...] = self.rows


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _wakers(kind: str, n: int) -> tuple[Callable[[int], Any], Callable[[int], Any], Callable[[], None]]:
    """Return three functions: worker i waits; worker i reports its end; the caller wakes all workers and waits."""
    if kind == "semaphore":
        context = multiprocessing.get_context("fork")
        go, back = [context.Semaphore(0) for _ in range(n)], context.Semaphore(0)

        def by_semaphore() -> None:
            for semaphore in go:
                semaphore.release()
            for _ in range(n):
                back.acquire()

        return (lambda i: go[i].acquire()), (lambda i: back.release()), by_semaphore
    if kind == "eventfd":
        begin, end = [os.eventfd(0) for _ in range(n)], [os.eventfd(0) for _ in range(n)]

        def by_eventfd() -> None:
            for descriptor in begin:
                os.eventfd_write(descriptor, 1)
            for descriptor in end:
                os.eventfd_read(descriptor)

        return (lambda i: os.eventfd_read(begin[i])), (lambda i: os.eventfd_write(end[i], 1)), by_eventfd
    orders, answers = [os.pipe() for _ in range(n)], [os.pipe() for _ in range(n)]

    def by_pipe() -> None:
        for _, writing in orders:
            os.write(writing, b"g")
        for reading, _ in answers:
            os.read(reading, 1)

    return (lambda i: os.read(orders[i][0], 1)), (lambda i: os.write(answers[i][1], b"d")), by_pipe
