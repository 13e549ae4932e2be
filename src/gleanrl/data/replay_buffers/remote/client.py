"""A process's dealings with a buffer's actor: calls, and batches that are asked for ahead."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from typing import Any

from gleanrl.data.replay_buffers.remote.messages import Caller, Dumping, Opened, Reply
from gleanrl.data.replay_buffers.server import Served
from gleanrl.errors import WorkerCrashedError
from gleanrl.parcels import Arrived, Parcel
from gleanrl.ray_runtime import RayRuntime
from gleanrl.system.threads import Job, Workers

_END_S = 10.0
"""How long the end waits for batches that are on their way, at most."""


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
        self._workers = Workers(1, "gleanrl-ray")
        self._line = _Line(self, 0)

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
        if args and isinstance(args[0], self.runtime.ray.ObjectRef):
            return self._asked("call", path, Parcel((args[1:], options)), args[0])
        return self._asked("call", path, Parcel((args, options)))

    def get(self, path: tuple[str, ...]) -> Any:
        """Return an attribute of the buffer, or of one of its parts."""
        self._line.send()
        return _value(self.result(self.actor.get.remote(path)))

    def set(self, path: tuple[str, ...], value: Any) -> None:
        """Set an attribute of the buffer, or of one of its parts."""
        self._line.send()
        self.result(self.actor.set.remote(path, Parcel(value)))

    def dump(self, dumping: Dumping, wait: bool) -> bool:
        """Return whether a checkpoint in the background has ended, or is there; see `Host.dump`."""
        found: bool = self.result(self.actor.dump.remote(dumping, wait))
        return found

    def serve(self, size: int | None, keys: Any, wants_info: bool) -> Served:
        """Return a batch: the next one of those sent ahead if it's like them."""
        if self.opened.depth and keys is None and size in (None, self.opened.batch_size):
            return self._next()
        served: Served = self._asked("serve", size, keys, wants_info)
        return served

    def new_epoch(self) -> None:
        """Begin a new epoch with the next batch."""
        self._asked("new_epoch")

    def end(self, kill: bool) -> None:
        """Ask for nothing any more, end the actor if `kill` says so, and this part in Ray."""
        if not self.runtime.ended:
            self.throw_away()
            if kill:
                self.runtime.ray.kill(self._actor)
            self._workers.start(_nothing).wait(_END_S)  # behind what the thread is doing: it needs Ray
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
        ray = self.runtime.ray
        self.runtime.check()
        try:
            return ray.get(coming)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.ObjectLostError as error:
            raise WorkerCrashedError(f"records were lost with the machine that held them: {error}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerCrashedError(
                f"the buffer's actor is gone, and its records with it: {error}. Make a new buffer, and go on from a "
                "checkpoint of this one: new.loads(folder)"
            ) from error

    def _asked(self, method: str, *args: Any) -> Any:
        self._line.send()
        reply: Reply = self.result(getattr(self.actor, method).remote(self.caller(), *args))
        if reply.void:
            self.throw_away()
        self.opened = self.opened._replace(depth=reply.depth)
        for warning in reply.warnings:
            warnings.warn(warning, stacklevel=5)
        return _value(reply.value)

    # Batches ahead

    def throw_away(self) -> None:
        """Have nothing on its way any more; the actor takes it back with the next call."""
        with self._lock:
            self._line = _Line(self, self._line.era + 1)

    def _next(self) -> Served:
        with self._lock:
            while True:
                line = self._line
                try:
                    line.fill(self.opened.depth, self._workers)
                    found = line.take()
                    if found is not None:
                        self._taken, served = found
                        return served
                except BaseException:
                    self.throw_away()  # those behind it failed alike, and may not any more
                    raise


class _Line:
    """Requests for batches, the oldest first: a thread sends them, and unpacks what comes.

    What belongs to a line that was given up is of no interest: the actor doesn't draw for it any more.
    """

    def __init__(self, client: Client, era: int) -> None:
        self.era = era
        self._client = client
        self._jobs: deque[Job[tuple[int, Served] | None]] = deque()
        self._sending = threading.Lock()
        self._to_send: deque[Caller] = deque()
        self._coming: deque[Any] = deque()

    def fill(self, depth: int, workers: Workers) -> None:
        """Ask for so many batches beside the next one."""
        while len(self._jobs) <= depth:
            self._to_send.append(self._client.caller())
            self._jobs.append(workers.start(self._receive))

    def take(self) -> tuple[int, Served] | None:
        """Wait for the oldest one, its number and itself; None if there was none to send at that moment."""
        return self._jobs.popleft().result()

    def send(self) -> None:
        """Send what hasn't been sent yet: whatever is asked for next comes behind it."""
        with self._sending:
            while self._to_send:
                self._coming.append(self._client.actor.ahead.remote(self._to_send[0]))
                self._to_send.popleft()

    def _receive(self) -> tuple[int, Served] | None:
        self.send()
        found: tuple[int, Served] | None = _value(self._client.result(self._coming.popleft()))
        return found


def _nothing() -> None:
    """Come to an end at once."""


def _value(value: Any) -> Any:
    """Return what arrived, in memory of its own."""
    return value.open() if isinstance(value, Arrived) else value
