"""gleanrl serves every public name, module and keyword of TorchRL's data layer, or a table names a replacement.

The inventory is read from the installed TorchRL. A name that a later release adds fails here until the table has it.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import pkgutil
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest

pytest.importorskip("torchrl", minversion="0.14")

from gleanrl.compat.binding import _rows, _served
from gleanrl.compat.names import KEYWORDS, UNSERVED_KEYWORDS
from gleanrl.compat.unserved import UNSERVED, UNSERVED_MODULES, unserved_module, unserved_name
from gleanrl.errors import UnservedKeywordError, UnservedMemberError, UnservedModuleError, UnservedNameError

pytestmark = pytest.mark.filterwarnings("ignore")

OF_BOTH = ("gleanrl", "torchrl")
ROOTS = ("collectors", "data", "envs", "services", "weight_update")


def modules() -> dict[str, types.ModuleType]:
    """Return the importable public modules of TorchRL's data layer by their paths below the root."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for root in ROOTS:
            package = importlib.import_module(f"torchrl.{root}")
            found[root] = package
            for each in pkgutil.walk_packages(package.__path__, f"{root}.", onerror=lambda _: None):
                if "._" not in each.name:
                    with suppress(ImportError):  # it needs a library that isn't installed
                        found[each.name] = importlib.import_module(f"torchrl.{each.name}")
    return found


MODULES = modules()


def public_names(module: types.ModuleType) -> set[str]:
    """Return the names in a module's `__all__`, and the public classes and functions that it defines."""
    defined = {
        name
        for name, value in vars(module).items()
        if name[0] != "_"
        and getattr(value, "__module__", None) == module.__name__
        and not isinstance(value, TypeVar)
    }
    return {*getattr(module, "__all__", ()), *defined}


def nearest_unserved(path: str) -> str | None:
    """Return the path, or the nearest package above it, that the table of unserved modules lists."""
    while path:
        if unserved_module(path) is not None:
            return path
        path = path.rpartition(".")[0]
    return None


@pytest.mark.parametrize("path", MODULES)
def test_each_public_name_is_served_or_listed(path):
    ours = f"gleanrl.{path}"
    if nearest_unserved(ours) is not None:
        with pytest.raises(UnservedModuleError, match="isn't served: "):
            importlib.import_module(ours)
        return
    module = importlib.import_module(ours)
    missing = [name for name in public_names(MODULES[path]) if not hasattr(module, name)]
    assert [name for name in missing if unserved_name(ours, name) is None] == []
    for name in missing:
        with pytest.raises(UnservedNameError, match="isn't served: "):
            exec(f"from {ours} import {name}")


def test_unserved_attributes_of_packages_name_a_replacement():
    for path in ("collectors", "data", "envs"):
        module = importlib.import_module(f"gleanrl.{path}")
        for name in public_names(MODULES[path]) - {*dir(module)}:
            with pytest.raises(UnservedMemberError, match=f"{name} isn't served: "):
                getattr(module, name)


def test_the_tables_list_only_modules_and_names_that_are_not_served():
    for row in UNSERVED:
        module = importlib.import_module(row.module)
        assert [name for name in row.names.split() if hasattr(module, name)] == []
    for row in UNSERVED_MODULES:
        for name in row.names.split():
            assert importlib.util.find_spec(f"{row.package}.{name}") is None


COMPARED_ELSEWHERE = {
    "BaseCollector": "abstract; the classes that derive from it are compared",
    "TensorSpec": "abstract; the classes that derive from it are compared",
    "MultiCollector": "makes one of two classes, which are compared",
    "RayReplayBuffer": "passes keywords to a buffer, which is compared",
    "RemoteTensorDictReplayBuffer": "passes keywords to a buffer, which is compared",
    "CloudpickleWrapper": "gymnasium's",
    "Composite": "any keyword is an entry",
}
NOT_TAKEN = {
    **dict.fromkeys(("Bounded", "Unbounded", "UnboundedContinuous", "UnboundedDiscrete"), {"space"}),
    "NonTensor": {"domain", "space"},
    "Collector": {"launcher"},
    "Compose": {"in_keys", "in_keys_inv", "out_keys", "out_keys_inv"},
    **dict.fromkeys(("GymEnv", "GymLikeEnv"), {"run_type_checks"}),
    "GymWrapper": {"env_name", "run_type_checks"},
    "ParallelEnv": {"auto_wrap_envs"},
    "ReplayBufferEnsemble": {"sampler", "storage", "writer"},
}
"""Keywords in the code of TorchRL's constructors that raise a TypeError in TorchRL too."""
OF_ACTORS = {"ray_actor_options"}
"""Keywords that TorchRL creates itself and passes to an actor."""


# Keywords. TorchRL's metaclasses and `__new__`s consume some before the constructor, and make another class.


def keywords_of(function: Any) -> tuple[set[str], bool]:
    """Return the keywords of a function, including its look-ups in `**kwargs`, and whether it has `**kwargs`."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        return set(), True
    named, rest = set(), None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = parameter.name
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            named.add(parameter.name)
    code = [
        i
        for i in dis.get_instructions(function)
        if i.opname not in ("PRECALL", "CACHE", "LOAD_METHOD", "LOAD_ATTR")
    ]
    for one, other in zip(code, code[1:], strict=False):  # kwargs.pop("key"), "key" in kwargs, kwargs["key"]
        for key, place in ((one, other), (other, one)):
            if (
                rest
                and place.argval == rest
                and key.opname == "LOAD_CONST"
                and str(key.argval).isidentifier()
            ):
                named.add(key.argval)
    return named - {"self", "cls"}, rest is not None


def constructor_keywords(cls: type) -> set[str]:
    """Return the keywords that a class accepts."""
    found, passes_on = set(), True
    for base in cls.__mro__:
        own = vars(base)
        if base.__module__.partition(".")[0] in OF_BOTH:
            if "__init__" in own and passes_on:
                keywords, passes_on = keywords_of(own["__init__"])
                found |= keywords
            if "__new__" in own:
                found |= keywords_of(own["__new__"])[0]
    for base in type(cls).__mro__:
        if base.__module__.partition(".")[0] in OF_BOTH and "__call__" in vars(base):
            found |= keywords_of(vars(base)["__call__"])[0]
    return {name for name in found if name[0] != "_"}


def classes() -> Iterator[tuple[type, type]]:
    """Yield the public classes of TorchRL that gleanrl serves, each with its counterpart."""
    seen = set()
    for path, module in MODULES.items():
        if nearest_unserved(f"gleanrl.{path}") is None:
            here = importlib.import_module(f"gleanrl.{path}")
            for name in sorted(public_names(module)):
                both = getattr(module, name, None), getattr(here, name, None)
                if (
                    all(map(inspect.isclass, both))
                    and both not in seen
                    and both[0].__name__ not in COMPARED_ELSEWHERE
                ):
                    seen.add(both)
                    yield both


def listed(cls: type) -> set[str]:
    tables = (KEYWORDS, UNSERVED_KEYWORDS)
    return {name for table in tables for base in cls.__mro__ for name in table.get(base.__name__, ())}


@pytest.mark.parametrize(("theirs", "ours"), [*classes()], ids=lambda cls: cls.__name__)
def test_each_keyword_of_a_constructor_is_served_or_listed(theirs, ours):
    absent = constructor_keywords(theirs) - constructor_keywords(ours)
    absent -= NOT_TAKEN.get(theirs.__name__, set()) | OF_ACTORS
    assert absent - listed(ours) == set()
    for keyword in absent - {name for base in ours.__mro__ for name in KEYWORDS.get(base.__name__, ())}:
        with pytest.raises(UnservedKeywordError, match=f"{keyword} isn't served: "):
            ours(**{keyword: object()})


@pytest.mark.parametrize(("theirs", "ours"), [*classes()], ids=lambda cls: cls.__name__)
def test_no_keyword_that_is_served_is_listed(theirs, ours):
    assert UNSERVED_KEYWORDS.get(ours.__name__, {}).keys() & constructor_keywords(ours) == set()


@pytest.mark.parametrize(("theirs", "ours"), [*classes()], ids=lambda cls: cls.__name__)
def test_the_defaults_of_keywords_that_are_not_served_are_accepted(theirs, ours):
    rows = _rows(UNSERVED_KEYWORDS, ours)
    for base in theirs.__mro__[:-1]:
        init = inspect.unwrap(vars(base).get("__init__", lambda: None))
        if isinstance(init, types.FunctionType):
            for name, parameter in inspect.signature(init).parameters.items():
                if name in rows and parameter.default is not parameter.empty:
                    assert _served(ours.__name__, {name: parameter.default}, rows) == {}
