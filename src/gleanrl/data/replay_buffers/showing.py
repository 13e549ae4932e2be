"""Reprs that show what an object was made with."""

from __future__ import annotations

import inspect
from pathlib import PurePath
from typing import Any

import torch
from typing_extensions import Self


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
