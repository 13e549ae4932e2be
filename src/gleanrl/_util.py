"""Argument checks, imports of optional libraries, and detection of methods that a user's class overrides."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gleanrl._arrays.tensordicts import NestedKey
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingLibraryError, UnsupportedError


def positive(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 1 or more; otherwise raise `InvalidArgumentError` naming the argument."""
    return integer(name, value, 1)


def positive_or_none(name: str, value: Any) -> int | None:
    """Return `value` if it is None or an integer of 1 or more; otherwise raise, like `positive`."""
    return None if value is None else positive(name, value)


def non_negative(name: str, value: Any) -> int:
    """Return `value` if it is an integer of 0 or more; otherwise raise `InvalidArgumentError` naming the argument."""
    return integer(name, value, 0)


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; otherwise raise `InvalidTypeError` naming the argument."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name}: expected True or False, got {value!r}")
    return value


def named(name: str, value: str) -> str:
    """Return the path `value`; raise `InvalidArgumentError` naming the argument if it is empty."""
    if not value:
        raise InvalidArgumentError(f"{name}: expected the name of a file or folder, got {value!r}")
    return value


def optional_callable(name: str, value: Any) -> Any:
    """Return `value` if it is callable or None; otherwise raise `InvalidTypeError` naming the argument."""
    if value is not None and not callable(value):
        raise InvalidTypeError(f"{name}: expected a callable, got {type(value).__name__}")
    return value


def key_list(keys: Any) -> tuple[NestedKey, ...]:
    """Return the `keys` argument of `sample`, one key or several, as a tuple; the keys themselves aren't checked.

    A string is one key. A tuple holds several keys, so a single nested key must be inside a list.

    Raises:
        InvalidTypeError: `keys` isn't iterable.
    """
    if isinstance(keys, str):
        return (keys,)
    if not isinstance(keys, Iterable):
        raise InvalidTypeError(f"keys: expected a list of keys, got {keys!r}")
    return tuple(keys)


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return `value` as an int if it is an integer (not a bool) of at least `least`.

    Raises:
        InvalidArgumentError: otherwise, also for a value of another type; the message names the argument.
    """
    if type(value) is int and (least is None or value >= least):  # the common case, without `operator.index`
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of {least} or more"
        raise InvalidArgumentError(f"{name}: expected an integer{bound}, got {value!r}")
    return number


def _optional(library: str, extra: str, who_needs: str) -> Callable[[], Any]:
    """Return a function that imports and returns a library of an extra.

    The function raises `MissingLibraryError` if the library can't be imported; the message names the extra.
    """

    def imported() -> Any:
        try:
            return importlib.import_module(library)
        except ImportError as cause:
            raise MissingLibraryError(
                f"{who_needs} {library}, which can't be imported: pip install 'gleanrl[{extra}]'"
            ) from cause

    return imported


h5py = _optional("h5py", "h5", "HDF5 files need")
ray = _optional("ray", "ray", "collectors and buffers on Ray need")
pyarrow = _optional("pyarrow", "parquet", "Parquet and Arrow files need")
pyarrow_parquet = _optional("pyarrow.parquet", "parquet", "Parquet files need")
pandas = _optional("pandas", "parquet", "tables of pandas need")
pyplot = _optional("matplotlib.pyplot", "plot", "plots need")
pillow = _optional("PIL.Image", "parquet", "encoded images need")


def video_decoder(where: str) -> Any:
    """Import torchcodec and return its class `VideoDecoder`.

    Raises:
        UnsupportedError: torchcodec or one of its libraries can't be loaded; the message begins with `where`.
    """
    try:
        library = importlib.import_module("torchcodec")  # from 0.14 on, PyPI's needs a torch with CUDA
        if library.ffmpeg_major_version is None:  # later releases decode images without FFmpeg
            raise ImportError("FFmpeg's libraries can't be loaded")
        return importlib.import_module("torchcodec.decoders").VideoDecoder
    except (ImportError, OSError, RuntimeError) as cause:
        package = "'gleanrl[video]'" + ("" if torch.version.cuda else " torchcodec==0.13.0")
        raise UnsupportedError(
            f"{where}: videos need torchcodec (pip install {package}) and FFmpeg's libraries (Debian, Ubuntu: apt "
            "install ffmpeg). Or pass video=False to from_lerobot, which leaves out videos. The import "
            f"failed: {str(cause.__cause__ or cause).strip().splitlines()[0]}"
        ) from cause


def rich_progress() -> Any:
    """Import and return `rich.progress`; None if it can't be imported, for callers that print plain lines then."""
    try:
        return importlib.import_module("rich.progress")
    except ImportError:
        return None


_MISSING = object()
_HOUSE = __name__.partition(".")[0] + "."


def is_ours(definition: Any) -> bool:
    """Return whether gleanrl defines a class or function, as opposed to a user or another library."""
    return str(definition.__module__).startswith(_HOUSE)


def overridden(subject: Any, *names: str, of: type[Any]) -> tuple[str, ...]:
    """Return the attributes among `names` that `subject` doesn't take from the class `of`.

    An attribute is overridden if a subclass or another base class replaces it, or the object itself has one
    (``env.step = ...``). Methods, properties and class attributes are compared. A name that `of` lacks counts as
    overridden if `subject` has it. A lookup costs about a microsecond: call this at construction or once a batch, not
    at every step.

    Args:
        subject: a class, or an object.
        names: names of attributes.
        of: the class that should define the attributes.

    Examples:
        >>> class Base:
        ...     def step(self): ...
        ...     def reset(self): ...
        >>> class Derived(Base):
        ...     def step(self): ...
        >>> overridden(Derived, "step", "reset", of=Base), overridden(Base(), "step", of=Base)
        (('step',), ())
    """
    cls = subject if isinstance(subject, type) else type(subject)
    own = {} if subject is cls else getattr(subject, "__dict__", {})
    # A shortcut without a lookup, because a class can't override itself. Rollouts check policies once a batch.
    if cls is of:
        return tuple(name for name in names if name in own)
    return tuple(name for name in names if name in own or _found(cls, name) is not _found(of, name))


def is_native(subject: Any, *names: str, of: type[Any]) -> bool:
    """Return whether a class or object derives from `of` and overrides none of `names`; see `overridden`."""
    cls = subject if isinstance(subject, type) else type(subject)
    return issubclass(cls, of) and not overridden(subject, *names, of=of)


def _found(cls: type[Any], name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _MISSING
