"""The reference of collectors with workers: processes that each run the recording loop, and know of nobody."""

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
"""What Python's forkserver imports, once for all that is measured with it."""


class FreeRunning:
    """n processes with a recording loop each. A run starts all of them at once and ends with the last one.

    Args:
        count: n.
        name: the environment's id.
        policy: builds the policy of each; None draws random actions. A function of a module.
        steps: steps of a batch.

    Raises:
        EOFError: in the first run, if a process couldn't start.
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
        self.run(1)  # all of them stand, and have made their environments

    def run(self, batches: int) -> None:
        """Let every process make so many batches."""
        for link in self._links:
            link.send(batches)
        for link in self._links:
            link.recv()


def _serve(link: Connection, name: str, policy: MakePolicy | None, steps: int) -> None:
    torch.set_num_threads(1)
    settle_allocator()
    loop = recording_loop(name, policy() if policy else None, steps=steps)
    settle_garbage()
    with link, suppress(EOFError):  # whoever started this may have ended
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
