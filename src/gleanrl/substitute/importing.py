"""Who imports decides what is found.

TorchRL's own modules, its losses and networks among them, go on with their own classes, and pickles find classes by
`sys.modules`: so that stays as it is. A program, and every library but torchrl and tensordict, gets facades in place of
the modules of the data layer. Finders and loaders of the import system aren't told who imports; the function behind the
``import`` statement is, since it gets the importing module's globals. So that is what is wrapped
(`builtins.__import__`), and with it `importlib.import_module`, by which configuration files name classes.

Processes that the program starts by `multiprocessing` (spawn, forkserver) are taken over before they import the
program's main module: what they are prepared with holds a value whose unpickling does it. The library's own workers
are, too, and forks are as the process that they come from.
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

from gleanrl.compat.paths import not_served
from gleanrl.errors import TakeoverError, UnservedMemberError
from gleanrl.substitute.facades import as_seen
from gleanrl.substitute.names import ROOT
from gleanrl.substitute.notes import NOTES
from gleanrl.system import launcher

_THEMSELVES = (ROOT, "tensordict", "gleanrl", "importlib")
_LENGTH = len(ROOT)
_CHILD = "gleanrl.substitute.child"

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
    launcher.preload(_CHILD)


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
