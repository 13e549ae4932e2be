"""What a worker process runs: its set-up, then a loop that serves its owner until the owner lets it go or is gone."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from gleanrl.system import launcher
from gleanrl.system.launch_server import dump_stacks_into
from gleanrl.system.proc import peak_memory
from gleanrl.workers.channel import DONE, MESSAGE, ChannelClosed, WorkerEnd, decode, encode
from gleanrl.workers.reports import Report
from gleanrl.workers.segment import MEMORY, WORK, Segment

ENTRY = "gleanrl.workers.main:run"
PRELOAD = ("gleanrl.workers.main", "gleanrl.collectors")
"""What the launcher imports: the whole library, and with it torch, tensordict and gymnasium."""


class Servant(Protocol):
    """What a worker works on; it lives in the worker. Every public method can be requested by name."""

    def signal(self, code: bytes) -> None:
        """Do what a signal means."""

    def close(self) -> None:
        """Let go of everything; nothing is asked afterwards."""


@dataclass(frozen=True)
class Station:
    """What a worker gives its servant.

    Attributes:
        index: the worker's number in its crew.
        segment: the memory shared with the owner.
        progress: the worker's words in it; the servant writes `PLACE` and `STEP`.
    """

    index: int
    segment: Segment
    progress: memoryview


MakeServant = Callable[[Station], Servant]


@dataclass(frozen=True)
class Setting:
    """What makes a worker's surroundings those of its owner.

    Attributes:
        index: the worker's number.
        num_workers: how many there are in the crew.
        path: `sys.path`.
        folder: the current folder.
        environ: the environment variables.
        entropy: seeds torch's, NumPy's and Python's global generators, which are no copies of anybody's.
        num_threads: torch threads.
    """

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
        state = np.random.SeedSequence(self.entropy).generate_state(3, np.uint32).tolist()
        torch.manual_seed(state[0])
        np.random.seed(state[1])
        random.seed(state[2])


@dataclass(frozen=True)
class Answer:
    """What a request gave: a value, or a report of what it raised."""

    value: Any = None
    report: Report | None = None


Request = tuple[str, tuple[Any, ...]]
STOP: Request = ("stop", ())
SYNC = "sync"
"""A request that is answered by its own argument."""


def run(link: socket.socket, descriptors: Sequence[int]) -> int:
    """Serve as a worker; the launcher calls it in a fresh process.

    Args:
        link: a socket to the launcher, for workers of this worker's own.
        descriptors: to read from, to write to, for stacks, and of the segment.

    Returns:
        The exit code.
    """
    reading, writing, stacks, memory = descriptors
    dump_stacks_into(stacks)
    launcher.adopt(link)
    channel = WorkerEnd(reading, writing)
    try:
        servant = _set_up(channel, memory)
        return 1 if servant is None else _serve(channel, *servant)
    except ChannelClosed:  # the owner is gone: nobody is left to tell anything
        return 0


def _receive(channel: WorkerEnd) -> Any:
    code = channel.next_code()
    assert code == MESSAGE
    return decode(channel.message())


def _answer(channel: WorkerEnd, answer: Answer) -> None:
    try:
        data = encode(answer)
    except Exception as error:
        data = encode(Answer(report=Report.of(error)))
    channel.send(data)


def _set_up(channel: WorkerEnd, memory: int) -> tuple[Servant, memoryview] | None:
    """Return the servant and the worker's words, or None if that failed; the owner was told which of the two."""
    try:
        setting: Setting = _receive(channel)
        setting.apply()
        segment = Segment(setting.num_workers, memory)
        progress = segment.progress(setting.index)
        progress[WORK] += 1
        make: MakeServant = _receive(channel)
        servant = make(Station(setting.index, segment, progress))
    except ChannelClosed:
        raise
    except BaseException as error:
        _answer(channel, Answer(report=Report.of(error)))
        return None
    _answer(channel, Answer())
    return servant, progress


def _serve(channel: WorkerEnd, servant: Servant, progress: memoryview) -> int:
    read, write, reading, writing = os.read, os.write, channel.reading, channel.writing
    signal = servant.signal
    while True:
        code = read(reading, 1)
        if code == MESSAGE:
            request: Request = decode(channel.message())  # type: ignore[assignment]
            progress[WORK] += 1
            progress[MEMORY] = peak_memory()
            _answer(channel, _done(servant, request))
            if request == STOP:
                return 0
        elif not code:
            _close_quietly(servant)
            return 0
        else:
            try:
                signal(code)
            except BaseException as error:
                _answer(channel, Answer(report=Report.of(error)))
            else:
                write(writing, DONE)


def _done(servant: Servant, request: Request) -> Answer:
    """Do what was requested."""
    name, arguments = request
    try:
        if request == STOP:
            servant.close()
            return Answer()
        if name == SYNC:
            return Answer(arguments[0])
        return Answer(getattr(servant, name)(*arguments))
    except BaseException as error:
        return Answer(report=Report.of(error))


def _close_quietly(servant: Servant) -> None:
    """Close the servant of an owner that is gone; there's nobody to tell of an error."""
    try:
        servant.close()
    except BaseException:
        return
