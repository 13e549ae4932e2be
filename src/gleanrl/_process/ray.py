"""Ray in this process: started for whoever uses it first, and ended after the last one, if it was started here."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gleanrl import _util
from gleanrl.errors import ClosedError

_lock = threading.RLock()
_FREED_TOGETHER = "RAY_free_objects_batch_size"
"""The setting of Ray that says how many objects are freed together."""


@dataclass
class _Session:
    """A Ray that was started here."""

    name: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    users: int = 0


_started = _Session()


class RayRuntime:
    """One user's part in Ray. Any thread may make and release them.

    If Ray doesn't run in this process it is started, or the cluster that `init_config` or the environment variable
    ``RAY_ADDRESS`` names is joined. The last part that is released ends that again, and with it whatever runs there; a
    Ray that ran already is left as it is.

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
        with _lock:
            if not self.ray.is_initialized():
                with _memory_is_used_again():
                    self.ray.init(**config)
                _started = _Session(self._running, config)
            elif config and (self._running, config) != (_started.name, _started.config):
                warnings.warn("ray_init_config: Ray runs already, and is used as it is", stacklevel=3)
            self._session = self._running
            if self._session == _started.name:
                _started.users += 1

    @property
    def _running(self) -> Any:
        """A name of the Ray that runs in this process; None for none."""
        if not self.ray.is_initialized():
            return None
        context = self.ray.get_runtime_context()
        return context.gcs_address, context.get_job_id()

    @property
    def ended(self) -> bool:
        """Whether Ray, or this part in it, has ended."""
        return self._released or self._running != self._session

    @property
    def losses(self) -> tuple[type[Exception], ...]:
        """What Ray raises where an actor or an object was lost, with its process or its machine."""
        found = self.ray.exceptions
        return (
            found.RayActorError,
            found.ObjectLostError,
            found.WorkerCrashedError,
            found.OutOfMemoryError,
            found.LocalRayletDiedError,
        )

    def check(self) -> None:
        """Raise `ClosedError` if it has ended."""
        if self.ended:
            raise ClosedError("Ray was shut down, and with it all actors: make a new collector or buffer")

    def release(self) -> None:
        """Give the part back; a second call does nothing."""
        with _lock:
            if self.ended:
                return
            self._released = True
            if self._session == _started.name:
                _started.users -= 1
                if not _started.users:
                    self.ray.shutdown()


@contextmanager
def _memory_is_used_again() -> Iterator[None]:
    """Have a Ray that starts meanwhile free an object's memory as soon as nobody refers to it, unless told otherwise.

    Ray frees objects by the hundred, or once a second. Until then every batch is written to memory of the store that
    nobody has touched yet, which takes several times as long as copying it.
    """
    told = _FREED_TOGETHER in os.environ
    os.environ.setdefault(_FREED_TOGETHER, "1")
    try:
        yield
    finally:
        if not told:
            del os.environ[_FREED_TOGETHER]
