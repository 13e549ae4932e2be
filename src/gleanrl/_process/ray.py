"""The Ray runtime of this process: started for its first user, and shut down after its last one.

A runtime that the program started itself is left running.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gleanrl import _util
from gleanrl._os.interrupts import ForkSafeLock
from gleanrl.errors import ClosedError

# Reentrant: a garbage collection in the thread that holds it may close a collector, which releases its share.
_lock = ForkSafeLock()
_FREE_BATCH_SIZE = "RAY_free_objects_batch_size"
"""The environment variable that tells Ray how many objects to free together."""


@dataclass
class _Session:
    """A Ray runtime that was started here."""

    name: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    users: int = 0


_started = _Session()


class RayRuntime:
    """One user's share in Ray. Any thread may create and release shares.

    If Ray doesn't run in this process, the first share starts it, or joins a cluster. `init_config` or the environment
    variable ``RAY_ADDRESS`` names the cluster. The release of the last share shuts Ray down again, with everything that
    runs there. A Ray runtime that was already running is never shut down. If Ray runs already, another `init_config`
    than that of its start has no effect and gives a warning.

    Args:
        init_config: arguments of `ray.init`; None for none.

    Attributes:
        ray: the module.

    Raises:
        MissingLibraryError: Ray isn't installed.
    """

    def __init__(self, init_config: Mapping[str, Any] | None = None) -> None:
        global _started
        self.ray = _util.ray()
        self._released = False
        config = dict(init_config or {})
        with _lock.lock:
            if not self.ray.is_initialized():
                with _freeing_each_object_at_once():
                    self.ray.init(**config)
                _started = _Session(self._running, config)
            elif config and (self._running, config) != (_started.name, _started.config):
                warnings.warn("ray_init_config: Ray runs already, so this has no effect", stacklevel=3)
            self._session = self._running
            if self._session == _started.name:
                _started.users += 1

    @property
    def _running(self) -> Any:
        """An identifier of the Ray runtime in this process; None if there is none."""
        if not self.ray.is_initialized():
            return None
        context = self.ray.get_runtime_context()
        return context.gcs_address, context.get_job_id()

    @property
    def ended(self) -> bool:
        """Whether Ray was shut down or restarted, or this share was released."""
        return self._released or self._running != self._session

    @property
    def losses(self) -> tuple[type[Exception], ...]:
        """The exceptions that Ray raises when an actor or an object is lost with its process or its machine."""
        found = self.ray.exceptions
        return (
            found.RayActorError,
            found.ObjectLostError,
            found.WorkerCrashedError,
            found.OutOfMemoryError,
            found.LocalRayletDiedError,
        )

    def check(self) -> None:
        """Raise `ClosedError` if Ray or this share has ended."""
        if self.ended:
            raise ClosedError("Ray was shut down, and with it all actors: make a new collector or buffer")

    def release(self) -> None:
        """Release the share; the last one shuts down a Ray runtime that was started here. Further calls do nothing."""
        with _lock.lock:
            if self.ended:
                return
            self._released = True
            if self._session == _started.name:
                _started.users -= 1
                if not _started.users:
                    self.ray.shutdown()


@contextmanager
def _freeing_each_object_at_once() -> Iterator[None]:
    """Make a Ray runtime that starts within the block free each object as soon as its last reference is gone.

    By default, Ray frees objects by the hundred, or once a second. Each new batch would then be written to untouched
    memory of the store, which takes several times as long as copying it. An environment variable of the user takes
    precedence.
    """
    is_set = _FREE_BATCH_SIZE in os.environ
    os.environ.setdefault(_FREE_BATCH_SIZE, "1")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_FREE_BATCH_SIZE]
