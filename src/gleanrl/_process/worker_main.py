"""What a worker process runs: its set-up, then a loop that serves its owner until the owner lets it go or is gone."""

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
"""The last request: the servant is closed, and the process ends."""
SYNC = "sync"
"""The name of a request that does nothing: whatever was asked before has been answered before it is."""


class Service(Protocol):
    """What a worker works on; it lives in the worker. Every public method can be requested by name."""

    def signal(self, code: bytes) -> Any:
        """Do what a signal means; what is returned, None mostly, is the answer."""

    def close(self) -> None:
        """Let go of everything; nothing is asked afterwards."""


@dataclass(frozen=True)
class WorkerContext:
    """What a worker gives its servant.

    Attributes:
        index: the worker's number in its crew.
        segment: the memory shared with the owner.
        progress: the worker's words in it; the servant writes `PLACE` and `STEP`.
    """

    index: int
    segment: SharedSegment
    progress: memoryview


MakeServant = Callable[[WorkerContext], Service]


def _has_accelerators() -> bool:
    """Return whether torch was built for devices other than the CPU."""
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # what torch 2.6 says for no
        return False


def seed_globals(entropy: Sequence[int]) -> None:
    """Seed torch's, NumPy's and Python's global generators."""
    state = np.random.SeedSequence(entropy).generate_state(3, np.uint32).tolist()
    if _has_accelerators():
        torch.manual_seed(state[0])
    else:  # what the other one does for devices to come, noting stacks, takes 4 ms
        torch.default_generator.manual_seed(state[0])
    np.random.seed(state[1])
    random.seed(state[2])


@dataclass(frozen=True)
class WorkerSetting:
    """What makes a worker's surroundings those of its owner.

    Attributes:
        number: of the request to make the servant.
        index: the worker's number.
        num_workers: how many there are in the crew.
        path: `sys.path`.
        folder: the current folder.
        environ: the environment variables.
        entropy: seeds torch's, NumPy's and Python's global generators, which are no copies of anybody's.
        num_threads: torch threads.
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
        """Take it over into this process."""
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        torch.set_num_threads(self.num_threads)
        seed_globals(self.entropy)


class WorkerRequest(NamedTuple):
    """What an owner asks.

    Attributes:
        number: told with the answer.
        name: the servant's method, or `SYNC`.
        arguments: the method's.
    """

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class WorkerReply(NamedTuple):
    """What a request gave.

    Attributes:
        number: the request's; 0 for a signal that raised.
        value: what the method returned.
        report: of what was raised.
    """

    number: int
    value: Any = None
    report: Report | None = None


def run(link: socket.socket, descriptors: Sequence[int]) -> int:
    """Serve as a worker; the launcher calls it in a fresh process.

    Args:
        link: a socket to the launcher, for workers of this worker's own.
        descriptors: to read from, to write to, for stacks, and of the segment.

    Returns:
        The exit code.
    """
    reading, writing, stacks, shared = descriptors
    dump_stacks_into(stacks)
    fork_server.adopt(link)
    channel = WorkerEnd(reading, writing)
    try:
        servant = _set_up(channel, shared)
        return 1 if servant is None else _serve(channel, *servant)
    except (ChannelClosed, BrokenPipeError):  # the owner is gone: nobody is left to tell anything
        return 0


def _answer(channel: WorkerEnd, reply: WorkerReply) -> None:
    try:
        data = encode(reply)
    except Exception as error:
        data = encode(WorkerReply(reply.number, report=Report.of(error)))
    channel.send(data)


def _set_up(channel: WorkerEnd, shared: int) -> tuple[Service, memoryview] | None:
    """Return the servant and the worker's words, or None if that failed; the owner was told which of the two."""
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
        make: MakeServant = decode(make_data)  # type: ignore[assignment, has-type]
        servant = make(WorkerContext(setting.index, segment, progress))
    except ChannelClosed:
        raise
    except BaseException as error:
        _answer(channel, WorkerReply(number, report=Report.of(error)))
        return None
    _answer(channel, WorkerReply(number))
    return servant, progress


def _serve(channel: WorkerEnd, servant: Service, progress: memoryview) -> int:
    read, write, reading, writing = os.read, os.write, channel.reading, channel.writing
    signal = servant.signal
    while True:
        code = read(reading, 1)
        if code == MESSAGE:
            request: WorkerRequest = decode(channel.message())  # type: ignore[assignment]
            progress[WORK] += 1
            progress[MEMORY] = peak_memory()
            _answer(channel, _done(servant, request))
            if request.name == STOP:
                return 0
        elif not code:
            _close_quietly(servant)
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


def _done(servant: Service, request: WorkerRequest) -> WorkerReply:
    """Do what was requested."""
    number, name, arguments = request
    try:
        if name == SYNC:
            return WorkerReply(number)
        return WorkerReply(number, getattr(servant, name)(*arguments))
    except BaseException as error:
        return WorkerReply(number, report=Report.of(error))


def _close_quietly(servant: Service) -> None:
    """Close the servant of an owner that is gone; there's nobody to tell of an error."""
    try:
        servant.close()
    except BaseException:
        return
