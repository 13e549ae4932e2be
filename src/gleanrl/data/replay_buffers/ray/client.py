"""A process's dealings with a buffer's actor: calls, and batches that are asked for ahead."""

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
"""How long the end waits for messages that are on their way, at most."""
_MESSAGE_BYTES = 1 << 20
"""What batches that are sent together may come to: of large ones each is sent for itself."""


class Client:
    """Calls an actor, and has batches sent ahead.

    Any thread may call any method.

    Args:
        runtime: this process's part in Ray.
        actor: the handle of a `Host`.

    Attributes:
        opened: what is known of the buffer.
    """

    def __init__(self, runtime: RayRuntime, actor: Any, opened: Opened) -> None:
        self.runtime, self.opened = runtime, opened
        self._actor = actor
        self._name = os.urandom(12)
        self._taken = 0
        self._lock = threading.RLock()
        self._thread = Workers(1, "gleanrl-ray")
        self._line = _Line(0)

    # Calls

    @property
    def actor(self) -> Any:
        """The actor's handle; `ClosedError` where it can't be called any more."""
        self.runtime.check()  # Ray would start anew
        return self._actor

    def call(self, path: tuple[str, ...], *args: Any, **options: Any) -> Any:
        """Call a method of the buffer, or of one of its parts; raise what it raised.

        A first argument that is a reference goes from Ray's object store to the actor.
        """
        if not leaves_draws(path):
            self.throw_away()
        if args and isinstance(args[0], self.runtime.ray.ObjectRef):
            return self._asked("call", path, PickledBatch((args[1:], options)), args[0])
        return self._asked("call", path, PickledBatch((args, options)))

    def get(self, path: tuple[str, ...]) -> Any:
        """Return an attribute of the buffer, or of one of its parts."""
        self._send_all()
        return _value(self.result(self.actor.get.remote(path)))

    def set(self, path: tuple[str, ...], value: Any) -> None:
        """Set an attribute of the buffer, or of one of its parts."""
        self._send_all()
        self.result(self.actor.set.remote(path, PickledBatch(value)))

    def dump(self, dumping: Dumping, wait: bool) -> bool:
        """Return whether a checkpoint in the background has ended, or is there; see `Host.dump`."""
        found: bool = self.result(self.actor.dump.remote(dumping, wait))
        return found

    def loading(self, state: Any) -> Callable[[], None]:
        """Have the actor check a buffer's state; return what lets it go on from there."""
        self.throw_away()
        return partial(self._asked, "adopt", self._asked("prepare", PickledBatch(state)))

    def serve(self, size: int | None, keys: Any, wants_info: bool) -> Served:
        """Return a batch: the next one of those sent ahead if it's like them."""
        if self.opened.depth and keys is None and size in (None, self.opened.batch_size):
            return self._next()
        self.throw_away()
        served: Served = self._asked("serve", size, keys, wants_info)
        return served

    def new_epoch(self) -> None:
        """Begin a new epoch with the next batch."""
        self.throw_away()
        self._asked("new_epoch")

    def end(self, kill: bool) -> None:
        """Ask for nothing any more, end the actor if `kill` says so, and this part in Ray."""
        if not self.runtime.ended:
            coming = self._line.coming
            self.throw_away()
            if kill:
                self.runtime.ray.kill(self._actor)
            jobs: list[Job[Any]] = [*coming, self._thread.start(_nothing)]
            end = Deadline(_END_S)
            for job in jobs:  # batches are unpacked out of Ray's memory
                job.wait(end.remaining() or 0.0)
        self.runtime.release()

    def caller(self) -> Caller:
        """Return what the actor has to know of this client."""
        return Caller(self._name, self._line.era, self._taken)

    def result(self, coming: Any) -> Any:
        """Wait for a call's end; return what it returned, or raise what it raised.

        Raises:
            WorkerCrashedError: the actor is gone.
            ClosedError: Ray is, or this part in it.
        """
        self.runtime.check()
        return self._of(partial(self.runtime.ray.get, coming))

    def _of(self, value: Callable[[], Any]) -> Any:
        """Return what a call returned, or raise what it raised."""
        exceptions = self.runtime.ray.exceptions
        try:
            return value()
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except exceptions.ObjectLostError as error:
            raise WorkerCrashedError(f"records were lost with the machine that held them: {error}") from error
        except exceptions.RayActorError as error:
            raise WorkerCrashedError(
                f"the buffer's actor is gone, and its records with it: {error}. Make a new buffer, and go on from a "
                "checkpoint of this one: new.loads(folder)"
            ) from error

    def _asked(self, method: str, *args: Any) -> Any:
        self._send_all()
        reply: BufferReply = self.result(getattr(self.actor, method).remote(self.caller(), *args))
        if reply.void:
            self.throw_away()
        self._line.stale.update(reply.stale)
        self.opened = self.opened._replace(depth=reply.depth)
        for warning in reply.warnings:
            warnings.warn(warning, stacklevel=5)
        return _value(reply.value)

    # Batches ahead

    def throw_away(self) -> None:
        """Have nothing on its way any more; the actor takes it back with the next call."""
        with self._lock:
            self._line = _Line(self._line.era + 1)

    def _next(self) -> Served:
        with self._lock:
            while True:
                line, depth = self._line, self.opened.depth
                try:
                    line.fill(depth, self._taken)
                    count = line.together(depth)
                    if line.here:
                        if len(line.to_send) >= count:
                            self._thread.start(partial(self._send, line, count))
                    else:
                        self._send(line, count if line.coming else 1)
                        self.runtime.check()  # nothing would come any more
                        line.arrived(line.coming.popleft().result())
                    found = line.take()
                    if found is None:
                        continue
                    number, served = found
                    if number in line.stale:
                        served = self._asked("again", number)
                        if served is None:  # another client had it taken back
                            self.throw_away()
                            continue
                    self._taken = number
                    return served
                except BaseException:
                    self.throw_away()  # those behind it failed alike, and may not any more
                    raise

    def _send_all(self) -> None:
        """Send the requests that are due: whatever is asked for next comes behind them."""
        try:
            self._send(self._line, 1)
        except BaseException:
            self.throw_away()
            raise

    def _send(self, line: _Line, count: int) -> None:
        """Send the requests that are due, if there are so many."""
        with line.sending:
            due = tuple(line.to_send)
            if len(due) >= count:
                message = self.actor.ahead.remote(self._name, line.era, due).future()
                job = Job(partial(self._unpacked, message, len(due)))
                line.coming.append(job)
                del line.to_send[: len(due)]  # others may be due by now
                # The first one starts the thread, before the caller gives it anything to do.
                message.add_done_callback(lambda _: self._thread.start(job.run))

    def _unpacked(self, message: Future[Arrived], num_batches: int) -> _Message:
        arrived = self._of(message.result)
        return _Message(num_batches, arrived.num_bytes, arrived.open())


class _Message(NamedTuple):
    """One that has arrived."""

    num_batches: int
    num_bytes: int
    batches: list[tuple[int, Served] | None]


class _Line:
    """Batches that were asked for ahead, the oldest first: here, on their way, or still to be asked for.

    One message brings several small ones. Requests wait for each other until half of those ahead are due; they are
    sent before whatever else the client asks for, so that batches are those that would be drawn one by one. What
    belongs to a line that was given up is of no interest: the actor doesn't draw for it any more.

    Attributes:
        era: see `Caller`.
        here: batches with their numbers; None for one that there was none of to send.
        coming: messages on their way.
        to_send: requests; what the client had taken when each one was due.
        sending: held by whoever sends them.
        stale: numbers of batches whose records were overwritten: each is drawn again once its turn comes, as in a local
            buffer.
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

    def fill(self, depth: int, taken: int) -> None:
        """Ask for so many batches beside the next one."""
        while self._ahead <= depth:
            self.to_send.append(taken)
            self._ahead += 1

    def together(self, depth: int) -> int:
        """Return how many requests are sent together."""
        return min((depth + 1) // 2, self._most)

    def arrived(self, message: _Message) -> None:
        """Take in what a message brought."""
        self._most = max(1, _MESSAGE_BYTES * message.num_batches // max(message.num_bytes, 1))
        self.here.extend(message.batches)

    def take(self) -> tuple[int, Served] | None:
        """Return the oldest batch and its number; None if there was none to send at that moment."""
        self._ahead -= 1
        return self.here.popleft()


def _nothing() -> None:
    """Come to an end at once."""


def _value(value: Any) -> Any:
    """Return what arrived, in memory of its own."""
    return value.open() if isinstance(value, Arrived) else value
