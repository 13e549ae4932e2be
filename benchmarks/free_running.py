"""Reference for collectors with workers: independent processes that each run the recording loop."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from benchmarks.recording_loop import recording_loop
from benchmarks.settle import settle_allocator, settle_garbage

MakePolicy = Callable[[], Callable[[Tensor], Tensor]]
PRELOAD = ["gleanrl.envs"]
"""Modules that Python's forkserver imports once, for all measurements that use it."""


class FreeRunning:
    """Independent processes with a recording loop each. A run starts all of them at once and ends with the last one.

    Args:
        count: number of processes.
        name: the environment's id.
        policy: builds the policy in each process; None draws random actions. It must be defined in a module.
        steps: steps of a batch.

    Raises:
        EOFError: or ConnectionResetError, if a process could not make its environment or policy.
    """

    def __init__(self, count: int, name: str, policy: MakePolicy | None, steps: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._links: list[Connection] = []
        processes: list[BaseProcess] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, name, policy, steps), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            processes.append(process)
        self.close = weakref.finalize(self, _end, self._links, processes)
        self.run(1)  # returns after all processes have made their environments

    def run(self, batches: int) -> None:
        """Let every process make `batches` batches, and wait for all processes."""
        for link in self._links:
            link.send(batches)
        for link in self._links:
            link.recv()


def _serve(link: Connection, name: str, policy: MakePolicy | None, steps: int) -> None:
    torch.set_num_threads(1)
    settle_allocator()
    loop = recording_loop(name, policy() if policy else None, steps=steps)
    settle_garbage()
    with link, suppress(EOFError):  # the parent process may have ended
        while batches := link.recv():
            for _ in islice(loop, batches):
                pass
            link.send(None)


def _end(links: list[Connection], processes: list[Any]) -> None:
    for link in links:
        with link, suppress(BrokenPipeError):
            link.send(0)
    for process in processes:
        process.join()
        process.close()
