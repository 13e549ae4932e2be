"""What storages, samplers and writers have in common: the buffer that they belong to, and files of their own.

Two buffers that wrote to one storage would lose track of each other's records.

Reprs that show what an object was made with.
"""

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


class Shown:
    """Its repr shows what its constructor was told, whatever class defines that; only words are kept of it."""

    _told = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the object, and note what its constructor is told."""
        made = super().__new__(cls)
        if args or kwargs:
            made._told = ", ".join(_in_words(cls, args, kwargs))
        return made

    def __repr__(self) -> str:
        """Show the class, and what it was made with."""
        return f"{type(self).__name__}({self._told})"


def _in_words(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    code = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    names = () if code is None else code.co_varnames[1 : code.co_argcount]
    named = [f"{name}={_word(value)}" for name, value in zip(names, args, strict=False)]
    rest = [_word(value) for value in args[len(names) :]]
    return [*named, *rest, *(f"{name}={_word(value)}" for name, value in kwargs.items())]


def _word(value: Any) -> str:
    """Show plain values and parts as they show themselves, of functions the name, of anything else the class."""
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_word, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, Shown):
        return Shown.__repr__(value)  # what a storage holds now isn't what it was made with
    plain = (str, int, float, torch.dtype, torch.device, PurePath)
    if value is None or isinstance(value, plain):
        return repr(value)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else f"<{type(value).__name__}>"


_OF_BUFFERS = ("_owner", "_gate", "_users", "_written_by")


class Part(Shown):
    """A storage, sampler or writer: it belongs to at most one buffer at a time, save storages that others only read.

    A buffer takes its parts at construction and by `set_storage`, `set_sampler` and `set_writer`, which give
    the old part free. The part refers to its buffer weakly: a buffer that is gone leaves its parts free.
    Copies (pickles included) belong to nobody.
    """

    _owner: weakref.ref[Any] | None = None
    _gate: BufferLock | None = None

    @property
    def given(self) -> Any:
        """What the user gave, where the part is a view of that (see `familiar.py`); else the part itself."""
        return self

    @property
    def owner(self) -> Any:
        """The buffer that the part belongs to; None if it is free."""
        return None if self._owner is None else self._owner()

    @property
    def gate(self) -> BufferLock | None:
        """The gate of that buffer; None if the part is free."""
        return None if self.owner is None else self._gate

    def guard(self) -> AbstractContextManager[Any]:
        """Return the lock of the buffer that the part belongs to, for changes that users make to the part itself."""
        return nullcontext() if self._gate is None else self._gate.lock

    def check_free(self, name: str, taker: Any) -> None:
        """Raise `InvalidArgumentError` if the part belongs to another buffer than `taker`.

        Args:
            name: what the message calls the part.
            taker: the buffer that is about to take it.
        """
        owner = self.owner
        if owner is not None and owner is not taker:
            raise taken(name, self, owner)

    def join_buffer(self, owner: Any, gate: BufferLock) -> None:
        """Belong to `owner`, a buffer with that gate, from now on."""
        self._owner, self._gate = weakref.ref(owner), gate

    def leave_buffer(self, owner: Any) -> None:
        """Belong to `owner` no longer."""
        self._owner = self._gate = None

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[Any], None]

    def dumps(self, path: os.PathLike[str] | str) -> None:
        """Write a checkpoint of this part alone; see `ReplayBuffer.dumps`, whose checkpoints hold all of one moment."""
        with self.guard():
            state = self.state_dict()
        Folder(path).commit(type(self).__name__, state)

    def loads(self, path: os.PathLike[str] | str) -> None:
        """Go on from the newest checkpoint of such a part; see `ReplayBuffer.loads`."""

        def take(state: dict[str, Any]) -> None:
            with self.guard():
                self.load_state_dict(state)

        Folder(path).load(True, expecting(path, type(self).__name__, take))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the owner."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_BUFFERS}


def taken(name: str, part: Part, owner: Any) -> InvalidArgumentError:
    """Return what says that a part, which the message calls `name`, belongs to a buffer already."""
    return InvalidArgumentError(
        f"{name}: this {type(part).__name__} belongs to another {type(owner).__name__} that is still "
        f"in use; give each buffer a {name} of its own, or take it from the other one first (its "
        f"set_{name}, or drop that buffer)"
    )
