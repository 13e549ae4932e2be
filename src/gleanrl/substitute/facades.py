"""Modules as a program sees them that has been taken over: our classes, and theirs where we have none."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from gleanrl.errors import UnservedMemberError
from gleanrl.substitute import environments
from gleanrl.substitute.names import PACKAGES, ROOT, explanation, is_data_layer, same_as, served
from gleanrl.substitute.notes import NOTES


class Facade(ModuleType):
    """What a program gets in place of a module of theirs.

    Attributes are looked up at every access: first what we serve at this path, then theirs; a class of theirs that we
    serve at another path is replaced, too, and so are modules of the data layer. What a program assigns stays with
    the program: their modules never see it.

    Args:
        path: where the module stands.
        theirs: the module; None for a path of another release, which only we have.
    """

    def __init__(self, path: str, theirs: ModuleType | None) -> None:
        super().__init__(path)
        own = {} if theirs is None else theirs.__dict__
        for name in ("__doc__", "__file__", "__loader__", "__package__", "__path__", "__spec__"):
            if name in own:
                self.__dict__[name] = own[name]
        self.__dict__["_theirs"] = theirs

    def __getattr__(self, name: str) -> Any:
        path, theirs = self.__name__, self.__dict__["_theirs"]
        if name == "__all__":
            return sorted(self._names())
        ours = served(path)
        if name in ours:
            return NOTES.took(path, name, ours[name])
        if theirs is None or not hasattr(theirs, name):
            why = explanation(path, name)
            if why is None:
                raise AttributeError(f"module {path!r} has no attribute {name!r}", name=name)
            raise UnservedMemberError(f"{path}.{name} isn't in the installed torchrl, nor served: {why}")
        value = getattr(theirs, name)
        if isinstance(value, ModuleType):
            return as_seen(value.__name__)
        return NOTES.took(path, name, same_as(value))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names()})

    def __reduce__(self) -> tuple[Any, ...]:
        return as_seen, (self.__name__,)

    def _names(self) -> set[str]:
        theirs = self.__dict__["_theirs"]
        public = getattr(theirs, "__all__", None) or [name for name in dir(theirs) if name[0] != "_"]
        return {*public, *(name for name in served(self.__name__) if name[0] != "_")}


@functools.cache
def as_seen(path: str) -> ModuleType:
    """Return a module as a taken-over program sees it: a facade for what belongs to the data layer, and for its root.

    Raises:
        ModuleNotFoundError: there is no such module, there or here.
    """
    if path != ROOT and not is_data_layer(path):
        return importlib.import_module(path)
    _begin()
    try:
        theirs = importlib.import_module(path)
    except ModuleNotFoundError:
        if not served(path):
            raise
        parent, _, name = path.rpartition(".")
        facade = Facade(path, None)
        setattr(as_seen(parent), name, facade)
        return facade
    return Facade(path, theirs)


@functools.cache
def _begin() -> None:
    """Import all packages of theirs, since a class of one may be imported from another, before the first is seen."""
    theirs = [importlib.import_module(package) for package in PACKAGES]
    environments.adapt(theirs[0])
    NOTES.began()
