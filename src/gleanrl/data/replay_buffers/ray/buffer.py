"""Replay buffers in a Ray actor, with the interface of local buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, overload

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.results import html_parts, laid_out
from gleanrl._checkpoint.folder import Folder
from gleanrl._os import clock
from gleanrl._process.ray import RayRuntime
from gleanrl._process.serialization import PickledBatch
from gleanrl._state.rng import new_seed
from gleanrl._util import key_list
from gleanrl.data.replay_buffers.checkpointers.base import in_memory
from gleanrl.data.replay_buffers.ensemble import ReplayBufferEnsemble
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.ray.actor import BufferHost, Dumping, Opened, Token
from gleanrl.data.replay_buffers.ray.client import Client
from gleanrl.data.replay_buffers.replay_buffer import ReplayBuffer
from gleanrl.data.replay_buffers.sampling import ChosenKeys, Served, Server
from gleanrl.errors import (
    ClosedError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedError,
    WorkerCrashedError,
)

_PARTS = ("sampler", "storage", "transform", "transforms", "writer")
_SECONDS_BETWEEN_LOOKS = 0.01
_UNSUPPORTED_CONFIG = {
    "max_concurrency": "the actor executes the buffer's calls one after another",
    "max_restarts": "a restarted actor has an empty buffer; make a new buffer and load a checkpoint",
    "max_task_retries": "a repeated call would store its records twice",
}


class RayReplayBuffer:
    """A replay buffer in a Ray actor, for collectors and learners in any process of the cluster.

    It takes the arguments of a local buffer and has all of its public methods and attributes; each access is a call to
    the actor. ``isinstance(buffer, ReplayBuffer)`` is True. A pickled copy refers to the same actor. Pass copies to
    Ray's tasks and actors, or as `replay_buffer=` to collectors there. These collectors then write into the buffer
    directly, and not through the learner's process.

    Results are copies in fresh memory. Errors are the errors that the buffer raised. `storage`, `sampler`, `writer` and
    `transforms` stay in the actor. Their attributes and methods are available here (``buffer.sampler.beta = 0.7``), and
    `set_storage` and similar methods return None. Paths refer to the actor's machine.

    With `prefetch`, that many batches are requested while the caller is busy. Small batches share a message, up to half
    of that number, so a larger number makes them cheaper. Batches have the order and random sequence of a local buffer.
    Changes by this process affect its next sample, as on a local buffer. Writes by other processes appear only after
    the batches that are already on their way. Every batch is complete, and its generations tell which records it
    contains. Each process prefetches for itself.

    The constructor takes a seed for the actor's global generator from torch's global generator of this process.

    The actor lives until `shutdown`, or until no process refers to it. If the actor dies, its records are lost and
    every call raises `WorkerCrashedError`. Continue from a checkpoint then (`dumps`, `loads`).

    Args:
        *args: positional arguments of the buffer.
        replay_buffer_cls: the buffer's class.
        ray_init_config: arguments of `ray.init`, if Ray isn't running in this process. Otherwise they are ignored, with
            a warning if gleanrl didn't start Ray with the same ones.
        remote_config: the actor's resources and other Ray options: ``num_cpus`` (default 0), ``memory`` in bytes,
            ``resources``, ``scheduling_strategy``, ``name``, ….
        **options: keyword arguments of the buffer's class, which are sent to the actor. Parts may be callables.
            `rate_limiter` and `pin_memory` aren't accepted.

    Raises:
        MissingLibraryError: Ray isn't installed.
        InvalidTypeError: `replay_buffer_cls` isn't a class of local buffers.
        InvalidArgumentError: an option of `remote_config` that buffers can't have.
        UnsupportedError: `pin_memory`, or a buffer with a rate limiter, also as a member of an ensemble.

    Errors of the buffer's constructor are raised here, too.

    Examples:
        >>> from gleanrl.data import LazyTensorStorage
        >>> buffer = RayReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)  # doctest: +SKIP
        >>> buffer.extend(torch.arange(10))  # doctest: +SKIP
        >>> buffer.sample().shape  # doctest: +SKIP
        torch.Size([4])
        >>> buffer.shutdown()  # doctest: +SKIP
    """

    _class: type[Any] = ReplayBuffer

    def __init__(
        self,
        *args: Any,
        replay_buffer_cls: type[Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        kind = self._class if replay_buffer_cls is None else replay_buffer_cls
        known = (ReplayBuffer, ReplayBufferEnsemble)
        if not (isinstance(kind, type) and issubclass(kind, known)) or issubclass(kind, RayReplayBuffer):
            raise InvalidTypeError(f"replay_buffer_cls: expected a class of local buffers, got {kind!r}")
        config = dict(remote_config or {})
        for name in config.keys() & _UNSUPPORTED_CONFIG:
            raise InvalidArgumentError(
                f"remote_config: {name!r} isn't supported: {_UNSUPPORTED_CONFIG[name]}; leave it out"
            )
        if options.get("pin_memory"):
            raise UnsupportedError(
                "pin_memory: batches are copied out of the actor's memory; call pin_memory() of each batch"
            )
        runtime = RayRuntime(ray_init_config)
        try:
            actor = runtime.ray.remote(BufferHost).options(**config).remote()
            client = Client(runtime, actor, Opened(0, None))
            making = actor.open.remote(PickledBatch((kind, args, options)), new_seed())
            client.opened = client.result(making)
        except BaseException:
            runtime.release()
            raise
        self._begin(kind, client, True)

    def _begin(self, kind: type[Any], client: Client, owns: bool) -> None:
        self._kind, self._client, self._owns = kind, client, owns
        self._server = _Server(client)
        self._iteration: Iterator[Any] | None = None

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, *, keys: ChosenKeys = None
    ) -> TensorDictBase: ...
    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[True] = ..., *, keys: ChosenKeys = None
    ) -> tuple[TensorDictBase, Any]: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        keys: ChosenKeys = None,
    ) -> Any: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        keys: ChosenKeys = None,
    ) -> Any:
        """Return a batch in fresh memory, or ``(batch, info)``; see the buffer's class."""
        served = self._client.serve(batch_size, None if keys is None else key_list(keys), return_info)
        return (served.batch, served.info) if return_info else served.batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one new epoch (forever with samplers without epochs)."""
        return self._server.epoch()

    def next(self) -> Any:
        """Return the next batch of an internal iteration; None once at the end of an epoch.

        The call after that None begins a new epoch. An error ends the iteration: the call after it returns None.
        """
        if self._iteration is None:
            self._iteration = iter(self)
        batch = next(self._iteration, None)
        if batch is None:
            self._iteration = None
        return batch

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Store many records; see the buffer's class.

        Args:
            data: the records, or a reference to a `serialization.PickledBatch` of them in Ray's object store. The
                latter goes to the actor directly, and not through this process.
            update_priority: see the buffer's class.

        Returns:
            The index of each record.
        """
        # Not passed on if it is None, since a user's class or an ensemble may not have it.
        options = {} if update_priority is None else {"update_priority": update_priority}
        index: torch.Tensor = self._client.call(("extend",), data, **options)
        return index

    def dumps(self, path: os.PathLike[str] | str, keep: int = 1, wait: bool = True) -> RemoteDump | None:
        """Write a checkpoint, in a folder of the actor's machine; see the buffer's class.

        A relative path is made absolute with this process's working directory.

        Returns:
            None; with ``wait=False`` a handle of the running dump.
        """
        dumping = self._client.call(("dumps",), str(Folder(path).path), keep, wait)
        return None if dumping is None else RemoteDump(self._client, dumping)

    def loads(self, path: os.PathLike[str] | str, verify: bool = True) -> None:
        """Load a checkpoint from a folder of the actor's machine; see `dumps` and the buffer's class."""
        self._client.call(("loads",), str(Folder(path).path), verify)

    dump, save, load = dumps, dumps, loads

    elsewhere = True

    def checkpointed_state(self) -> dict[str, Any]:
        """Return the state for a `Checkpoint`. The whole state, with the records, is copied into this process."""
        state: dict[str, Any] = self._client.call(("checkpointed_state",))
        return state

    def loading(self, state: dict[str, Any]) -> Callable[[], None]:
        """Make the actor check a state from `checkpointed_state`; return the callback that loads it.

        The actor keeps one checked state. If another one is checked before the callback runs, the callback raises
        `UnsupportedError`.

        Raises:
            CheckpointError: the state isn't one of such a buffer; nothing changed.
            SchemaError: the state doesn't fit; nothing changed.
        """
        return self._client.loading(in_memory(state))

    def load_checkpointed_state(self, state: dict[str, Any]) -> None:
        """Load a state from `checkpointed_state`."""
        self.loading(state)()

    def __len__(self) -> int:
        """Return the number of transitions stored."""
        return int(self._client.call(("__len__",)))

    def __getitem__(self, index: Any) -> Any:
        """Return copies of stored records, or of a column; see the buffer's class."""
        return self._client.call(("__getitem__",), index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace stored records, or a column; see the buffer's class."""
        self._client.call(("__setitem__",), index, value)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the buffer: a method that calls the actor, a `RemotePart`, or a copied value.

        Private names raise `AttributeError`.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _PARTS:
            return RemotePart(self._client, (name,))
        if callable(getattr(self._kind, name, None)):
            return partial(self._called, name)
        return _attribute(self._client, (name,), partial(self._called, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the buffer in the actor; a private one is set on this object only."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._client.set((name,), value)

    def _called(self, name: str, *args: Any, **options: Any) -> Any:
        value = self._client.call((name,), *args, **options)
        if value is Token.PART:
            return None
        return self if value is Token.BUFFER else value

    def shutdown(self) -> None:
        """End the actor if this object created it; a copy only disconnects. A second call does nothing.

        Ray is shut down if gleanrl started it and this was its last user in the process. Messages on their way are
        awaited for 10 seconds at most. Further use of this object raises `ClosedError`.
        """
        self._client.end(kill=self._owns)

    close = shutdown

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle as a reference to the same actor; `ClosedError` after `shutdown`."""
        return _joined, (type(self), self._kind, self._client.actor, self._client.opened)

    def __repr__(self) -> str:
        """Show the buffer, unless its actor has ended."""
        if self._client.runtime.ended:
            return f"{type(self).__name__}(shut down)"
        try:
            return laid_out(type(self).__name__, [self._client.call(("__repr__",))])
        except WorkerCrashedError:
            return f"{type(self).__name__}(its actor has ended)"

    def _repr_html_(self) -> str:
        try:
            return f"<b>{type(self).__name__}</b>{self._client.call(('_repr_html_',))}"
        except (ClosedError, WorkerCrashedError):
            return html_parts(type(self).__name__, {"actor": "ended"})


class RemoteTensorDictReplayBuffer(RayReplayBuffer):
    """A `TensorDictReplayBuffer` in a Ray actor.

    Args:
        *args: see `RayReplayBuffer`.
        **options: see `RayReplayBuffer` and `TensorDictReplayBuffer`.
    """

    _class = TensorDictReplayBuffer


ReplayBuffer.register(RayReplayBuffer)
TensorDictReplayBuffer.register(RemoteTensorDictReplayBuffer)


class RemotePart:
    """A part of a buffer in an actor (storage, sampler, writer or transforms) with its attributes and methods.

    Args:
        client: this process's client of the actor.
        path: the attribute names that lead from the buffer to the part.
    """

    _client: Client
    _path: tuple[str, ...]

    def __init__(self, client: Client, path: tuple[str, ...]) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the part: a method that calls the actor, a `RemotePart`, or a copied value.

        Private names raise `AttributeError`.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        return _attribute(self._client, (*self._path, name), partial(self._called, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the part in the actor."""
        self._client.set((*self._path, name), value)

    def _called(self, name: str, *args: Any, **options: Any) -> Any:
        value = self._client.call((*self._path, name), *args, **options)
        return None if isinstance(value, Token) else value

    def __len__(self) -> int:
        """Return the part's length."""
        return int(self._client.call((*self._path, "__len__")))

    def __getitem__(self, index: Any) -> Any:
        """Return copies of the part's items at an index."""
        return self._client.call((*self._path, "__getitem__"), index)

    def __call__(self, batch: Any) -> Any:
        """Return the result of the transforms for a batch."""
        return self._client.call((*self._path, "__call__"), batch)

    def __repr__(self) -> str:
        """Show the part."""
        return f"RemotePart({self._client.call((*self._path, '__repr__'))})"


def _attribute(client: Client, path: tuple[str, ...], call: Callable[..., Any]) -> Any:
    """Return an attribute in the actor: a `RemotePart` for a part, `call` for a method, or a copied value."""
    value = client.get(path)
    if value is Token.METHOD:
        return call
    return RemotePart(client, path) if isinstance(value, Token) else value


class RemoteDump:
    """A checkpoint that an actor writes in the background.

    Args:
        client: this process's client of the actor.
        dumping: the reference to the checkpoint.
    """

    def __init__(self, client: Client, dumping: Dumping) -> None:
        self._client, self._dumping = client, dumping

    def done(self) -> bool:
        """Return whether the checkpoint has ended, successfully or with an error."""
        return self._client.dump(self._dumping, wait=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the checkpoint (None for no limit), or raise its error.

        Returns:
            True if it is on disk, False if the time is over.
        """
        deadline = clock.Deadline(timeout)
        while not self._client.dump(self._dumping, wait=True):
            if deadline.passed():
                return False
            clock.sleep(_SECONDS_BETWEEN_LOOKS)
        return True


class _Server(Server):
    """Serves whole epochs of batches from an actor."""

    of = "a buffer"

    def __init__(self, client: Client) -> None:
        super().__init__(client.opened.batch_size)
        self._client = client

    def serve(self, size: int, keys: Any, wants_info: bool) -> Served:
        """Return a batch."""
        return self._client.serve(size, keys, wants_info)

    def new_epoch(self) -> None:
        """Begin a new epoch with the next batch."""
        self._client.new_epoch()


def _joined(cls: type[RayReplayBuffer], kind: type[Any], actor: Any, opened: Opened) -> RayReplayBuffer:
    """Return a buffer that refers to another process's actor."""
    buffer = cls.__new__(cls)
    buffer._begin(kind, Client(RayRuntime(), actor, opened), False)
    return buffer
