"""Import hook that gives a program facade modules in place of TorchRL's data layer.

A facade serves gleanrl's classes, and TorchRL's where gleanrl has none. The result of an import depends on the
importing module. The program, and every library except TorchRL, tensordict and gleanrl, gets facades. TorchRL's own
modules, such as losses and networks, get the real modules. `sys.modules` doesn't change, because pickle finds classes
in it.

Finders and loaders of the import system don't know the importing module. `builtins.__import__`, the function behind the
``import`` statement, does: it gets that module's globals. So the hook wraps `builtins.__import__`. It also wraps
`importlib.import_module`, because programs use it to look up class names from configuration files.

Processes that the program starts by `multiprocessing` (spawn, forkserver) are taken over before they import the main
module: the data that prepares them holds an object whose unpickling installs the hook. gleanrl's fork server imports
the hook before it forks workers. Any other forked process inherits it.
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
    """A module that a program gets in place of a TorchRL module.

    Every access looks up the attribute, first among gleanrl's names for this path, then in TorchRL's module. If gleanrl
    serves a TorchRL class at another path, the facade returns gleanrl's class, too. A module of the data layer is
    returned as its facade. An attribute that a program assigns is stored in the facade only, so TorchRL's modules never
    see it.

    Args:
        path: import path of the module.
        original: TorchRL's module; None for a path of another release, which only gleanrl serves.
    """

    def __init__(self, path: str, original: ModuleType | None) -> None:
        super().__init__(path)
        own = {} if original is None else original.__dict__
        for name in ("__doc__", "__file__", "__loader__", "__package__", "__path__", "__spec__"):
            if name in own:
                self.__dict__[name] = own[name]
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        path, original = self.__name__, self.__dict__["_original"]
        if name == "__all__":
            return sorted(self._names())
        ours = served(path)
        if name in ours:
            return NOTES.took(path, name, ours[name])
        if original is None or not hasattr(original, name):
            why = explanation(path, name)
            if why is None:
                raise AttributeError(f"module {path!r} has no attribute {name!r}", name=name)
            raise UnservedMemberError(f"{path}.{name} isn't in the installed torchrl, nor served: {why}")
        value = getattr(original, name)
        if isinstance(value, ModuleType):
            return as_seen(value.__name__)
        return NOTES.took(path, name, same_as(value))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names()})

    def __reduce__(self) -> tuple[Any, ...]:
        return as_seen, (self.__name__,)

    def _names(self) -> set[str]:
        original = self.__dict__["_original"]
        public = getattr(original, "__all__", None) or [name for name in dir(original) if name[0] != "_"]
        return {*public, *(name for name in served(self.__name__) if name[0] != "_")}


@functools.cache
def as_seen(path: str) -> ModuleType:
    """Return a module for a taken-over program: a facade for `torchrl` and modules of the data layer.

    Other modules are imported and returned unchanged. Each path gives the same object at every call. The first facade
    imports the whole data layer of TorchRL (see `_begin`).

    Raises:
        ModuleNotFoundError: neither TorchRL nor gleanrl has the module.
    """
    if path != ROOT and not is_data_layer(path):
        return importlib.import_module(path)
    _begin()
    try:
        original = importlib.import_module(path)
    except ModuleNotFoundError:
        if not served(path):
            raise
        # A path of another release, which only gleanrl serves. The import system sets a submodule as an attribute of
        # its package; here the hook has to do it
        parent, _, name = path.rpartition(".")
        facade = Facade(path, None)
        setattr(as_seen(parent), name, facade)
        return facade
    return Facade(path, original)


@functools.cache
def _begin() -> None:
    """Import all packages of TorchRL's data layer before the program gets the first facade.

    A package can re-export classes of another one, and `same_as` must know the replaced classes of all of them.
    """
    packages = [importlib.import_module(package) for package in PACKAGES]
    environments.adapt(packages[0])
    NOTES.began()


_THEMSELVES = (ROOT, "tensordict", "gleanrl", "importlib")
_LENGTH = len(ROOT)
_CHILD = "gleanrl._takeover.child"

_installed = False


def install(silent: bool = False) -> None:
    """Install the import hook in this process; further calls have no effect.

    The call replaces `builtins.__import__` and `importlib.import_module`, and prepares processes that start later. An
    error changes nothing.

    Args:
        silent: whether to print no messages.

    Raises:
        TakeoverError: TorchRL isn't installed; or it has been imported before, so that the program may hold classes
            which can't be replaced any more.
    """
    global _installed
    if _installed:
        return
    if ROOT in sys.modules:
        raise TakeoverError(
            "takeover: torchrl has been imported already, and the classes that the program got from it can't be "
            "replaced; make `import gleanrl.takeover` its first import, or start it by `python -m gleanrl run`"
        )
    if importlib.util.find_spec(ROOT) is None:
        raise TakeoverError(
            "takeover: torchrl isn't installed here, and its programs need its networks and losses; install it, or "
            "import gleanrl.collectors, gleanrl.data and gleanrl.envs in place of torchrl's"
        )
    _installed = True
    NOTES.silent = silent
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
        # This check comes first and is as cheap as possible, because libraries execute import statements at every step.
        strange = name[:_LENGTH] != ROOT or level or not _is_torchrl(name)
        if strange or _is_themselves(globals or sys._getframe(1).f_globals):
            return real(name, globals, locals, fromlist, level)
        seen = as_seen(name)
        if not fromlist:
            return as_seen(ROOT)
        if name in sys.modules:  # otherwise only gleanrl has this path
            # The names in `fromlist` may be submodules that aren't imported yet: the real function imports them
            real(name, globals, locals, fromlist, level)
        _check(seen, fromlist)
        return seen

    return import_


def _check(seen: ModuleType, names: Sequence[str]) -> None:
    """Raise an ImportError with advice for names that a module lacks and `compat.unserved` knows.

    At ``from module import name`` Python would replace the text of the `AttributeError` by its own.
    """
    for name in names:
        if name != "*":
            try:
                getattr(seen, name)
            except UnservedMemberError as error:
                raise not_served(seen.__name__, name, str(error)) from None
            except AttributeError:
                pass  # the import statement raises its own ImportError


def _function(real: Callable[..., ModuleType]) -> Callable[..., ModuleType]:
    @functools.wraps(real)
    def import_module(name: str, package: str | None = None) -> ModuleType:
        relative = isinstance(package, str) and name.startswith(".")
        full_name = importlib.util.resolve_name(name, package) if relative else name
        if not _is_torchrl(full_name) or _is_themselves(sys._getframe(1).f_globals):
            return real(name, package)
        return as_seen(full_name)

    return import_module


def _is_torchrl(module: str) -> bool:
    return module.startswith(ROOT) and module[len(ROOT) : len(ROOT) + 1] in ("", ".")


def _is_themselves(importer: Mapping[str, Any]) -> bool:
    return str(importer.get("__name__")).partition(".")[0] in _THEMSELVES


class _TakesOver:
    """An object whose unpickling installs the import hook in the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, (True,)


def _prepare_children() -> None:
    spawn, server = multiprocessing.spawn, multiprocessing.forkserver
    prepared, preload = spawn.get_preparation_data, server.set_forkserver_preload

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepared(name), "gleanrl": _TakesOver()}

    def set_forkserver_preload(modules_names: Sequence[str]) -> None:
        # The fork server would import a preloaded main module first, before the hook. So the children import it.
        preload([_CHILD, *(name for name in modules_names if name != "__main__")])

    spawn.get_preparation_data = get_preparation_data
    server.set_forkserver_preload = set_forkserver_preload
    set_forkserver_preload([])
