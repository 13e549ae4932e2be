"""Who imports decides what is found.

TorchRL's own modules, its losses and networks among them, go on with their own classes, and pickles find classes by
`sys.modules`: so that stays as it is. A program, and every library but torchrl and tensordict, gets facades in place of
the modules of the data layer. Finders and loaders of the import system aren't told who imports; the function behind the
``import`` statement is, since it gets the importing module's globals. So that is what is wrapped
(`builtins.__import__`), and with it `importlib.import_module`, by which configuration files name classes.

Processes that the program starts by `multiprocessing` (spawn, forkserver) are taken over before they import the
program's main module: what they are prepared with holds a value whose unpickling does it. The library's own workers
are, too, and forks are as the process that they come from.

Modules as a program sees them that has been taken over: our classes, and theirs where we have none.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import multiprocessing.forkserver
import multiprocessing.spawn
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from gleanrl._os import fork_server
from gleanrl._takeover import environments
from gleanrl._takeover.names import PACKAGES, ROOT, explanation, is_data_layer, same_as, served
from gleanrl._takeover.report import NOTES
from gleanrl.compat.paths import not_served
from gleanrl.errors import TakeoverError, UnservedMemberError


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


_THEMSELVES = (ROOT, "tensordict", "gleanrl", "importlib")
_LENGTH = len(ROOT)
_CHILD = "gleanrl._takeover.child"

_installed = False


def install(quiet: bool = False) -> None:
    """Take this process over; once it is, nothing happens.

    Args:
        quiet: whether it says nothing about it.

    Raises:
        TakeoverError: torchrl isn't installed; or it has been imported before, and what the program holds of it
            can't be replaced any more.
    """
    global _installed
    if _installed:
        return
    if ROOT in sys.modules:
        raise TakeoverError(
            "takeover: torchrl has been imported already, and what the program got from it would stay torchrl's; "
            "make `import gleanrl.takeover` its first import, or start it by `python -m gleanrl run`"
        )
    if importlib.util.find_spec(ROOT) is None:
        raise TakeoverError(
            "takeover: torchrl isn't installed here, and its programs need its networks and losses; install it, or "
            "import gleanrl.collectors, gleanrl.data and gleanrl.envs in place of torchrl's"
        )
    _installed = True
    NOTES.quiet = quiet
    builtins.__import__ = _statement(builtins.__import__)
    importlib.import_module = _function(importlib.import_module)
    _prepare_children()
    fork_server.preload(_CHILD)


def _statement(real: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    @functools.wraps(real)
    def import_(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        # Asked first, in the fewest words: libraries import in the middle of what they do at every step.
        strange = name[:_LENGTH] != ROOT or level or not _is_theirs(name)
        if strange or _is_themselves(globals or sys._getframe(1).f_globals):
            return real(name, globals, locals, fromlist, level)
        seen = as_seen(name)
        if not fromlist:
            return as_seen(ROOT)
        if name in sys.modules:  # else it's a path that only we have
            real(
                name, globals, locals, fromlist, level
            )  # what is listed may be modules that nobody has imported
        _check(seen, fromlist)
        return seen

    return import_


def _check(seen: ModuleType, names: Sequence[str]) -> None:
    """Raise for a name that a module hasn't and of which it's known what to use instead.

    Python drops the text of an `AttributeError` at ``from module import name``.
    """
    for name in names:
        if name != "*":
            try:
                getattr(seen, name)
            except UnservedMemberError as error:
                raise not_served(seen.__name__, name, str(error)) from None
            except AttributeError:
                pass  # the statement raises an ImportError itself


def _function(real: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    @functools.wraps(real)
    def import_module(name: str, package: str | None = None) -> ModuleType:
        relative = isinstance(package, str) and name.startswith(".")
        whole = importlib.util.resolve_name(name, package) if relative else name
        if not _is_theirs(whole) or _is_themselves(sys._getframe(1).f_globals):
            return real(name, package)
        return as_seen(whole)

    return import_module


def _is_theirs(module: str) -> bool:
    return module.startswith(ROOT) and module[len(ROOT) : len(ROOT) + 1] in ("", ".")


def _is_themselves(importer: Mapping[str, Any]) -> bool:
    return str(importer.get("__name__")).partition(".")[0] in _THEMSELVES


class _TakesOver:
    """Takes over the process that it is unpickled in."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, (True,)


def _prepare_children() -> None:
    spawn, server = multiprocessing.spawn, multiprocessing.forkserver
    prepared, preload = spawn.get_preparation_data, server.set_forkserver_preload

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepared(name), "gleanrl": _TakesOver()}

    def set_forkserver_preload(modules_names: Sequence[str]) -> None:
        # A main module that is preloaded comes before all others: it is left to the children.
        preload([_CHILD, *(name for name in modules_names if name != "__main__")])

    spawn.get_preparation_data = get_preparation_data
    server.set_forkserver_preload = set_forkserver_preload
    set_forkserver_preload([])
