"""A process's client of a buffer's actor, for calls and for batches requested ahead."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from gleanrl._os.clock import Deadline
from gleanrl._os.threads import Job, Workers
from gleanrl._process.ray import RayRuntime
from gleanrl._process.serialization import Arrived, PickledBatch
from gleanrl.data.replay_buffers.ray.actor import BufferReply, Caller, Dumping, Opened, leaves_draws
from gleanrl.data.replay_buffers.sampling import Served
from gleanrl.errors import WorkerCrashedError

_END_S = 10.0
"""Seconds that `Client.end` waits for messages on their way, at most."""
_MESSAGE_BYTES = 1 << 20
"""Size up to which several batches share a message. Larger batches are sent one by one."""


class Client:
    """Calls an actor, and requests batches ahead.

    Any thread may call any method.

    Args:
        runtime: this process's connection to Ray.
        actor: the handle of a `BufferHost`.
        opened: the buffer's properties.

    Attributes:
        opened: the buffer's properties; replies update its depth.
    """

    def __init__(self, runtime: RayRuntime, actor: Any, opened: Opened) -> None:
        self.runtime, self.opened = runtime, opened
        self._actor = actor
        self._name = os.urandom(12)
        self._last_consumed = 0
        self._lock = threading.RLock()
        self._thread = Workers(1, "gleanrl-ray")
        self._line = _Line(0)

    @property
    def actor(self) -> Any:
        """The actor's handle; raises `ClosedError` after the end."""
        self.runtime.check()  # a call would make Ray start again
        return self._actor

    def call(self, path: tuple[str, ...], *args: Any, **options: Any) -> Any:
        """Call a method of the buffer, or of one of its parts, and return its result or raise its error.

        The batches on their way are discarded first, unless the method leaves draws unchanged (`leaves_draws`).
        Warnings of the method are issued here again. A first argument that is an object reference goes directly from
        Ray's object store to the actor.
        """
        if not leaves_draws(path):
            self.throw_away()
        if args and isinstance(args[0], self.runtime.ray.ObjectRef):
            return self._request("call", path, PickledBatch((args[1:], options)), args[0])
        return self._request("call", path, PickledBatch((args, options)))

    def get(self, path: tuple[str, ...]) -> Any:
        """Return an attribute of the buffer, or of one of its parts; a `Token` for a callable or a part."""
        self._send_all()
        return _value(self.result(self.actor.get.remote(path)))

    def set(self, path: tuple[str, ...], value: Any) -> None:
        """Set an attribute of the buffer, or of one of its parts."""
        self._send_all()
        self.result(self.actor.set.remote(path, PickledBatch(value)))

    def dump(self, dumping: Dumping, wait: bool) -> bool:
        """Return whether a checkpoint in the background has ended or succeeded; see `BufferHost.dump`."""
        found: bool = self.result(self.actor.dump.remote(dumping, wait))
        return found

    def loading(self, state: Any) -> Callable[[], None]:
        """Make the actor check a buffer's state; return the callback that loads it.

        The batches on their way are discarded. The actor keeps one checked state only. After another call of `loading`,
        by any client, the earlier callback raises `UnsupportedError`.
        """
        self.throw_away()
        return partial(self._request, "adopt", self._request("prepare", PickledBatch(state)))

    def serve(self, size: int | None, keys: Any, wants_info: bool) -> Served:
        """Return a batch: the next one sent ahead, if that has this size and all columns.

        Otherwise the batches on their way are discarded, and the actor draws a batch now. A `size` of None is the
        buffer's batch size.
        """
        if self.opened.depth and keys is None and size in (None, self.opened.batch_size):
            return self._next()
        self.throw_away()
        served: Served = self._request("serve", size, keys, wants_info)
        return served

    def new_epoch(self) -> None:
        """Begin a new epoch with the next batch, and discard the batches on their way."""
        self.throw_away()
        self._request("new_epoch")

    def end(self, kill: bool) -> None:
        """Discard all requests, end the actor if `kill` is True, and disconnect from Ray.

        The call waits up to `_END_S` seconds for messages on their way. Later calls of other methods raise
        `ClosedError`; another call of this one has no effect.
        """
        if not self.runtime.ended:
            coming = self._line.coming
            self.throw_away()
            if kill:
                self.runtime.ray.kill(self._actor)
            jobs: list[Job[Any]] = [*coming, self._thread.start(_nothing)]
            end = Deadline(_END_S)
            for job in jobs:  # they read Ray's memory, which must stay mapped until they end
                job.wait(end.remaining() or 0.0)
        self.runtime.release()

    def caller(self) -> Caller:
        """Return this client's identification for the actor."""
        return Caller(self._name, self._line.era, self._last_consumed)

    def result(self, coming: Any) -> Any:
        """Wait for a call; return its result or raise its error.

        Raises:
            WorkerCrashedError: the actor, or a machine with its records, is gone.
            ClosedError: Ray or this connection was shut down.
        """
        self.runtime.check()
        return self._of(partial(self.runtime.ray.get, coming))

    def _of(self, value: Callable[[], Any]) -> Any:
        """Return the result of `value`, with Ray's errors translated."""
        exceptions = self.runtime.ray.exceptions
        try:
            return value()
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except exceptions.ObjectLostError as error:
            raise WorkerCrashedError(
                f"records were lost with the machine that held them: {error}. Send the data again"
            ) from error
        except exceptions.RayActorError as error:
            raise WorkerCrashedError(
                f"the buffer's actor is gone, and its records with it: {error}. Make a new buffer, and load a "
                "checkpoint of this one: new.loads(folder)"
            ) from error

    def _request(self, method: str, *args: Any) -> Any:
        self._send_all()
        reply: BufferReply = self.result(getattr(self.actor, method).remote(self.caller(), *args))
        if reply.void:
            self.throw_away()
        self._line.stale.update(reply.stale)
        self.opened = self.opened._replace(depth=reply.depth)
        for warning in reply.warnings:
            warnings.warn(warning, stacklevel=5)
        return _value(reply.value)

    def throw_away(self) -> None:
        """Discard all batches on their way.

        The actor cancels their draws at this client's next request for batches or call. `get`, `set` and `dump` don't
        count as calls.
        """
        with self._lock:
            self._line = _Line(self._line.era + 1)

    def _next(self) -> Served:
        with self._lock:
            while True:
                line, depth = self._line, self.opened.depth
                try:
                    line.fill(depth, self._last_consumed)
                    count = line.together(depth)
                    if line.here:
                        if len(line.to_send) >= count:
                            self._thread.start(partial(self._send, line, count))
                    else:
                        self._send(line, count if line.coming else 1)
                        # After the end no batch would arrive, and the wait would never end.
                        self.runtime.check()
                        line.arrived(line.coming.popleft().result())
                    found = line.take()
                    if found is None:
                        continue
                    number, served = found
                    if number in line.stale:
                        served = self._request("again", number)
                        if served is None:  # another client's call removed it
                            self.throw_away()
                            continue
                    self._last_consumed = number
                    return served
                except BaseException:
                    self.throw_away()  # later batches have the same error, and a new request may succeed
                    raise

    def _send_all(self) -> None:
        """Send all due requests, so that the next call of this client comes after them."""
        try:
            self._send(self._line, 1)
        except BaseException:
            self.throw_away()
            raise

    def _send(self, line: _Line, count: int) -> None:
        """Send the due requests in one message, if there are at least `count`."""
        with line.sending:
            due = tuple(line.to_send)
            if len(due) >= count:
                message = self.actor.ahead.remote(self._name, line.era, due).future()
                job = Job(partial(self._unpacked, message, len(due)))
                line.coming.append(job)
                del line.to_send[: len(due)]  # not all: another thread may have added requests meanwhile
                # The first callback starts the unpacking thread, before `_next` gives it other work.
                message.add_done_callback(lambda _: self._thread.start(job.run))

    def _unpacked(self, message: Future[Arrived], num_batches: int) -> _Message:
        arrived = self._of(message.result)
        return _Message(num_batches, arrived.num_bytes, arrived.open())


class _Message(NamedTuple):
    """An arrived message."""

    num_batches: int
    num_bytes: int
    batches: list[tuple[int, Served] | None]


class _Line:
    """A queue of batches requested ahead, the oldest first: arrived, on their way, or not requested yet.

    One message carries several small batches. Requests are collected until half of the batches ahead are due. All due
    requests are sent before any other call of the client. So the batches are the same as if they were requested one by
    one. If the client discards a line, its pending results are ignored, and the actor draws no more batches for it.

    Attributes:
        era: see `Caller`.
        here: arrived batches with their numbers; None for a request that got no batch.
        coming: messages on their way.
        to_send: requests not sent yet, each with the client's last handed-out number at that time.
        sending: lock of the thread that sends the requests, which keeps messages in order.
        stale: numbers of batches whose records were overwritten. Each is drawn again before it is handed out, as in a
            local buffer.
    """

    def __init__(self, era: int) -> None:
        self.era = era
        self.here: deque[tuple[int, Served] | None] = deque()
        self.coming: deque[Job[_Message]] = deque()
        self.to_send: list[int] = []
        self.sending = threading.Lock()
        self.stale: set[int] = set()
        self._ahead = 0
        self._most = 1

    def fill(self, depth: int, last_consumed: int) -> None:
        """Add requests until `depth` batches are requested in addition to the next one."""
        while self._ahead <= depth:
            self.to_send.append(last_consumed)
            self._ahead += 1

    def together(self, depth: int) -> int:
        """Return how many requests to send in one message."""
        return min((depth + 1) // 2, self._most)

    def arrived(self, message: _Message) -> None:
        """Add a message's batches, and adjust how many batches of that size share a message."""
        self._most = max(1, _MESSAGE_BYTES * message.num_batches // max(message.num_bytes, 1))
        self.here.extend(message.batches)

    def take(self) -> tuple[int, Served] | None:
        """Return the oldest batch and its number; None if the actor had no batch for the request."""
        self._ahead -= 1
        return self.here.popleft()


def _nothing() -> None:
    """Do nothing. The job of this call ends after all earlier jobs of the thread."""


def _value(value: Any) -> Any:
    """Return a reply's value, unpickled into private memory."""
    return value.open() if isinstance(value, Arrived) else value
