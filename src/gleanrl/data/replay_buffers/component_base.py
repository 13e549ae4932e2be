"""Base class of storages, samplers and writers: owning buffer, checkpoints of one part, and reprs."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import PurePath
from typing import Any

import torch
from typing_extensions import Self

from gleanrl._checkpoint.folder import Folder, expecting
from gleanrl.data.replay_buffers.lock import BufferLock
from gleanrl.errors import InvalidArgumentError

_OF_BUFFERS = ("_gate", "_users", "_written_by")


def living(references: tuple[weakref.ref[Any], ...]) -> list[Any]:
    """Return the objects that still exist among weakly held ones."""
    return [found for reference in references if (found := reference()) is not None]


class Part:
    """A storage, sampler or writer, or an ensemble of these.

    A part belongs to at most one buffer; further buffers may read a storage.

    Two buffers that write to one storage would lose track of each other's records, so a buffer refuses a part that
    another buffer owns. A buffer takes its parts at construction and in `set_storage`, `set_sampler` and `set_writer`,
    which release the old part. The part refers to its buffers weakly: a deleted buffer releases its parts. Copies and
    pickles have no owner.

    The repr shows the constructor's arguments. Only their text is kept, so that the part keeps no argument alive.
    """

    _told = ""
    _users: tuple[weakref.ref[Any], ...] = ()  # several for a storage: all of them have the same lock
    _gate: BufferLock | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the object and record its constructor's arguments as text."""
        made = super().__new__(cls)
        if args or kwargs:
            made._told = ", ".join(_in_words(cls, args, kwargs))
        return made

    def __repr__(self) -> str:
        """Return the class name and the recorded arguments."""
        return f"{type(self).__name__}({self._told})"

    @property
    def unwrapped(self) -> Any:
        """The user's object if the part is an adapter of it (see `adapters.py`), otherwise the part itself."""
        return self

    @property
    def owner(self) -> Any:
        """The first buffer that uses the part; None if there is none."""
        return next(iter(living(self._users)), None)

    @property
    def gate(self) -> BufferLock | None:
        """The lock of the owning buffer; None without an owner."""
        return None if self.owner is None else self._gate

    def guard(self) -> AbstractContextManager[Any]:
        """Return the owning buffer's lock, for direct changes to the part by the user.

        Without a lock, the returned context manager does nothing.
        """
        return nullcontext() if self._gate is None else self._gate.lock

    def check_free(self, name: str, taker: Any) -> None:
        """Raise `InvalidArgumentError` if another buffer than `taker` uses the part.

        Args:
            name: the part's name in the error message.
            taker: the buffer that is about to take the part.
        """
        others = [buffer for buffer in living(self._users) if buffer is not taker]
        if others:
            raise InvalidArgumentError(
                f"{name}: this {type(self).__name__} belongs to another {type(others[0]).__name__} that is still "
                f"in use; pass another {name}, or first replace it in that buffer (set_{name}()) or delete that buffer"
            )

    def join_buffer(self, owner: Any, gate: BufferLock) -> None:
        """Register `owner`, a buffer with the lock `gate`. All buffers of a storage share one lock."""
        others = [one for one in self._users if one() is not None and one() is not owner]
        self._users, self._gate = (*others, weakref.ref(owner)), gate

    def leave_buffer(self, owner: Any) -> None:
        """Unregister `owner`. The last buffer releases the lock."""
        self._users = tuple(one for one in self._users if one() is not None and one() is not owner)
        if not self._users:
            self._gate = None

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[Any], None]

    def dumps(self, path: os.PathLike[str] | str) -> None:
        """Write a checkpoint of this part alone to the folder `path`, and remove the folder's earlier checkpoints.

        It may not match the other parts' checkpoints; `ReplayBuffer.dumps` writes all parts at one moment.
        """
        with self.guard():
            state = self.state_dict()
        Folder(path).commit(type(self).__name__, state)

    def loads(self, path: os.PathLike[str] | str) -> None:
        """Load the newest checkpoint of a part of this class; see `ReplayBuffer.loads` for the errors."""

        def take(state: dict[str, Any]) -> None:
            with self.guard():
                self.load_state_dict(state)

        Folder(path).load(True, expecting(path, type(self).__name__, take))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without the owner."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_BUFFERS}


def _in_words(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    code = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    names = () if code is None else code.co_varnames[1 : code.co_argcount]
    named = [f"{name}={_word(value)}" for name, value in zip(names, args, strict=False)]
    rest = [_word(value) for value in args[len(names) :]]
    return [*named, *rest, *(f"{name}={_word(value)}" for name, value in kwargs.items())]


def _word(value: Any) -> str:
    """Return the text of one argument.

    Plain values and parts show their repr, functions and classes their name, other objects the name of their class.
    """
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_word, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, Part):
        # The base's method: subclasses may show their present content, which isn't an argument.
        return Part.__repr__(value)
    plain = (str, int, float, torch.dtype, torch.device, PurePath)
    if value is None or isinstance(value, plain):
        return repr(value)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else f"<{type(value).__name__}>"
