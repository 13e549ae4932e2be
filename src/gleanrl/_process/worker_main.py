"""The main function of a worker process: its set-up, and a loop that serves the owner.

The loop ends when the owner sends `STOP`, or when the owner is gone.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gleanrl._os import fork_server
from gleanrl._os.fork_server_main import dump_stacks_into
from gleanrl._os.proc import peak_memory
from gleanrl._process.pipes import DONE, MESSAGE, ChannelClosed, WorkerEnd, decode, encode
from gleanrl._process.remote_errors import Report
from gleanrl._process.shared_columns import MEMORY, WORK, SharedSegment

ENTRY = "gleanrl._process.worker_main:run"
STOP = "close"
"""The last request: the worker closes its service and ends."""
SYNC = "sync"
"""A request without an effect. Its answer arrives after the answers to everything that was sent before."""


class Service(Protocol):
    """The object that a worker runs. Each public method can be requested by name."""

    def signal(self, code: bytes) -> Any:
        """Act on a signal. The return value, usually None, is the answer."""

    def close(self) -> None:
        """Release all resources; no call follows."""


@dataclass(frozen=True)
class WorkerContext:
    """The data that a worker passes to the function that creates its service.

    Attributes:
        index: the worker's number in its pool.
        segment: the memory shared with the owner.
        progress: the worker's words in it; the service writes `ITEM` and `STEP`.
    """

    index: int
    segment: SharedSegment
    progress: memoryview


MakeService = Callable[[WorkerContext], Service]


def _has_accelerators() -> bool:
    """Return whether torch was built for devices other than the CPU."""
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # torch 2.6 raises if there is none.
        return False


def seed_globals(entropy: Sequence[int]) -> None:
    """Seed the global generators of torch, NumPy and Python with three different seeds computed from `entropy`.

    If torch was built for accelerators, their generators are seeded, too.
    """
    state = np.random.SeedSequence(entropy).generate_state(3, np.uint32).tolist()
    if _has_accelerators():
        torch.manual_seed(state[0])
    else:  # `torch.manual_seed` also records a stack to seed later devices, which takes 4 ms.
        torch.default_generator.manual_seed(state[0])
    np.random.seed(state[1])
    random.seed(state[2])


@dataclass(frozen=True)
class WorkerSetting:
    """The settings that give a worker the same environment as its owner.

    Attributes:
        number: the number of the request that creates the service.
        index: the worker's number.
        num_workers: the number of workers in the pool.
        path: `sys.path`.
        folder: the current folder.
        environ: the environment variables.
        entropy: the seed of the global generators of torch, NumPy and Python; it differs for each worker.
        num_threads: the number of torch threads.
    """

    number: int
    index: int
    num_workers: int
    path: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    entropy: Sequence[int]
    num_threads: int

    def apply(self) -> None:
        """Apply the settings to this process: path, folder, environment variables, threads and random generators."""
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        torch.set_num_threads(self.num_threads)
        seed_globals(self.entropy)


class WorkerRequest(NamedTuple):
    """A request of an owner.

    Attributes:
        number: the reply repeats it.
        name: the name of the service's method, or `SYNC`.
        arguments: the arguments of the method.
    """

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class WorkerReply(NamedTuple):
    """The answer to a request or a signal.

    Attributes:
        number: the number of the request; 0 for a signal.
        value: the return value of the method.
        report: the exception that was raised, or None.
    """

    number: int
    value: Any = None
    report: Report | None = None


def run(link: socket.socket, descriptors: Sequence[int]) -> int:
    """Serve as a worker. The fork server calls it in a new process.

    Args:
        link: a socket to the fork server, for this worker's own workers.
        descriptors: to read from, to write to, for stacks, and of the segment.

    Returns:
        The exit code: 0 after the owner stopped the worker or is gone, 1 if the service can't be created.
    """
    reading, writing, stacks, shared = descriptors
    dump_stacks_into(stacks)
    fork_server.adopt(link)
    channel = WorkerEnd(reading, writing)
    try:
        service = _set_up(channel, shared)
        return 1 if service is None else _serve(channel, *service)
    except (ChannelClosed, BrokenPipeError):  # The owner is gone, so there is no process to report to.
        return 0


def _answer(channel: WorkerEnd, reply: WorkerReply) -> None:
    try:
        data = encode(reply)
    except Exception as error:
        data = encode(WorkerReply(reply.number, report=Report.of(error)))
    channel.send(data)


def _set_up(channel: WorkerEnd, shared: int) -> tuple[Service, memoryview] | None:
    """Create the service; return it with the worker's words, or None on failure.

    The owner gets an answer in both cases.
    """
    number = 0
    try:
        assert channel.next_code() == MESSAGE
        setting: WorkerSetting
        setting, make_data = decode(channel.message())  # type: ignore[misc]
        number = setting.number
        setting.apply()
        segment = SharedSegment(setting.num_workers, shared)
        progress = segment.progress(setting.index)
        progress[WORK] += 1
        # Decoded after `apply`, because it may import modules from the owner's path.
        make: MakeService = decode(make_data)  # type: ignore[assignment, has-type]
        service = make(WorkerContext(setting.index, segment, progress))
    except ChannelClosed:
        raise
    except BaseException as error:
        _answer(channel, WorkerReply(number, report=Report.of(error)))
        return None
    _answer(channel, WorkerReply(number))
    return service, progress


def _serve(channel: WorkerEnd, service: Service, progress: memoryview) -> int:
    """Serve requests and signals until the owner stops the worker or is gone; return the exit code."""
    # Local names, because the loop runs for every step of an environment.
    read, write, reading, writing = os.read, os.write, channel.reading, channel.writing
    signal = service.signal
    while True:
        code = read(reading, 1)
        if code == MESSAGE:
            request: WorkerRequest = decode(channel.message())  # type: ignore[assignment]
            progress[WORK] += 1
            progress[MEMORY] = peak_memory()
            _answer(channel, _reply_to(service, request))
            if request.name == STOP:
                return 0
        elif not code:
            _close_quietly(service)
            return 0
        else:
            try:
                found = signal(code)
            except BaseException as error:
                _answer(channel, WorkerReply(0, report=Report.of(error)))
            else:
                if found is None:
                    write(writing, DONE)
                else:
                    _answer(channel, WorkerReply(0, found))


def _reply_to(service: Service, request: WorkerRequest) -> WorkerReply:
    """Call the requested method; return its result or its error as a reply."""
    number, name, arguments = request
    try:
        if name == SYNC:
            return WorkerReply(number)
        return WorkerReply(number, getattr(service, name)(*arguments))
    except BaseException as error:
        return WorkerReply(number, report=Report.of(error))


def _close_quietly(service: Service) -> None:
    """Close the service and ignore its errors, because the owner is gone and can't receive them."""
    try:
        service.close()
    except BaseException:
        return
