"""TorchRL's modules and losses take our specs.

Programs hand `env.action_spec` to actors, exploration modules and losses of that library, which look the classes of
specs up in tables and call their private methods: only a spec of its own will do. So each function of
`torchrl.modules` and `torchrl.objectives` with a parameter that is named after specs (constructors, `register_spec`,
setters) is wrapped, in place, in one that first converts our specs among the arguments (`to_torchrl`), also those in
dictionaries, lists and tuples. Whoever holds the class, under whatever path, has the wrapped one.

It happens right after such a module has been imported, whoever does it: a finder in front of the others
(`sys.meta_path`) lets them find the module and adds this last step to its execution. Modules that are there already
get it at once. Nothing is imported for it; where TorchRL isn't installed nothing happens at all.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from gleanrl.data.specs.base import TensorSpec
from gleanrl.data.specs.bridge import to_torchrl

PACKAGES = ("torchrl.modules", "torchrl.objectives")
WORDS = ("spec", "action_space")


def install() -> None:
    """Convert from now on; called once, when the specs are imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            adapt(module)
    sys.meta_path.insert(0, _Finder())


def adapt(module: ModuleType) -> None:
    """Wrap the functions of the classes that a module defines, and its own functions, where they take specs."""
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, FunctionType) and _takes_specs(value):
            setattr(module, name, _converting(value))
        elif isinstance(value, type):
            _adapt_class(value)


def _adapt_class(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and _takes_specs(member):
            setattr(cls, name, _converting(member))
        elif isinstance(member, property) and member.fset is not None and "spec" in name:
            setattr(cls, name, member.setter(_converting(member.fset)))


def _takes_specs(function: FunctionType) -> bool:
    return any(word in name for name in inspect.signature(function).parameters for word in WORDS)


def _converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with our specs among its arguments converted."""

    @functools.wraps(function)
    def converting(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_converted, args), **{name: _converted(arg) for name, arg in kwargs.items()})

    return converting


def _converted(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return to_torchrl(value)
    if type(value) is dict:
        return {key: _converted(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_converted, value))
    return value


class _Finder(MetaPathFinder):
    """Finds what the others find, and has it adapted once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PACKAGES):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = next(
            (spec for f in others if (spec := f.find_spec(fullname, path, target)) is not None), None
        )
        if found is not None and found.loader is not None:
            found.loader.exec_module = _adapting(found.loader.exec_module)  # type: ignore[assignment, method-assign]
        return found


def _adapting(run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        run(module)
        adapt(module)

    return exec_module
