"""How workers end: they are asked, then sent SIGTERM, then SIGKILL; all of them at once, within one time."""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from gleanrl.system.clock import Deadline
from gleanrl.workers.channel import DONE, ChannelClosed, ChannelFull, decode, encode
from gleanrl.workers.handle import Worker
from gleanrl.workers.main import STOP, Reply, Request

_TERM_S = 1.0
_STOPPING = -1


def ask_to_end(workers: Sequence[Worker], seconds: float) -> list[BaseException]:
    """Let every worker close its servant and end, those that don't by SIGTERM; return what the servants raised.

    Args:
        workers: of one owner.
        seconds: how long they have all together to end by themselves.
    """
    deadline = Deadline(seconds)
    for worker in workers:
        worker.halt()
    asked = [worker for worker in workers if _ask_to_stop(worker, deadline)]
    raised = [error for worker in asked if (error := _last_words(worker, deadline)) is not None]
    for worker in workers:
        worker.wait(deadline)
    _signal(workers, signal.SIGTERM)
    return raised


def kill(workers: Sequence[Worker]) -> None:
    """End every worker that still lives."""
    _signal(workers, signal.SIGKILL)


def _ask_to_stop(worker: Worker, deadline: Deadline) -> bool:
    if worker.has_ended or worker.loss is not None:
        return False
    try:
        worker.channel.send(encode(Request(_STOPPING, STOP)), deadline)
    except (ChannelClosed, ChannelFull):
        return False
    return True


def _last_words(worker: Worker, deadline: Deadline) -> BaseException | None:
    """Return what a worker's servant raised when it was closed; answers that were due before are dropped."""
    poller = select.poll()
    poller.register(worker.channel.reading, select.POLLIN)
    with suppress(ChannelClosed):
        while poller.poll((deadline.remaining() or 0.0) * 1000):
            worker.channel.pull()
            while (arrived := worker.channel.take()) is not None:
                reply = Reply(0) if arrived[0] == DONE else cast(Reply, decode(arrived[1]))
                if reply.number == _STOPPING and reply.report is not None:
                    return reply.report.error(f"worker {worker.index} (process {worker.pid})")
    return None


def _signal(workers: Sequence[Worker], number: int) -> None:
    """Send a signal to those that live and wait for them."""
    alive = [worker for worker in workers if not worker.has_ended]
    for worker in alive:
        worker.terminate(number)
    deadline = Deadline(_TERM_S)
    for worker in alive:
        worker.wait(deadline)
