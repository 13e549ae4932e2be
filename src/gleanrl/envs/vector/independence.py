"""Check that the members of a batch of environments step no object in common."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gleanrl.errors import InvalidArgumentError
from gleanrl.rollouts.traits import extra


def require_independent(envs: Iterable[Any], started: bool = True) -> None:
    """Check that no object is stepped by two environments; nested batches in this process count by their members.

    Attributes of the environments are searched, and attributes of the environments and simulators found there. A
    simulator is an object whose ``step`` takes one argument and whose ``reset`` needs none. Objects that a class holds,
    and data of any kind, may be shared.

    Args:
        envs: the members of a batch that live in this process.
        started: whether nested batches are started, to see the environments that their callables make.

    Raises:
        InvalidArgumentError: two members step the same object.
    """
    owners: dict[int, tuple[int, Any]] = {}  # the objects are kept, so that no id is used again meanwhile
    for number, env in enumerate(envs):
        for stepped in _reached(env, started):
            owner, _ = owners.setdefault(id(stepped), (number, stepped))
            if owner != number:
                raise InvalidArgumentError(
                    f"environments {owner} and {number} of a batch step the same "
                    f"{type(stepped).__name__} object, so that the steps of one would change the other; give each "
                    "its own: pass a callable that makes a new simulator at each call, or copies (copy.deepcopy)"
                )


def _reached(env: Any, started: bool) -> Iterable[Any]:
    """Return `env` and the environments and simulators that it steps, directly or through others."""
    found: dict[int, Any] = {}
    todo = [env]
    while todo:
        each = todo.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        own = extra(each, "stepped_here")
        todo += simulators_in(each) if own is None else own(started)
    return found.values()


def simulators_in(holder: Any) -> Iterator[Any]:
    """Yield the environments and simulators among the attributes of `holder`, and in its lists, tuples and dicts."""
    for value in list(getattr(holder, "__dict__", {}).values()):
        if isinstance(value, Mapping):
            value = list(value.values())
        several = value if isinstance(value, (list, tuple)) else [value]
        yield from (one for one in several if _is_simulator(one))


def _is_simulator(candidate: Any) -> bool:
    if isinstance(candidate, type):
        return False
    return _takes(candidate, "step", (None,)) and _takes(candidate, "reset", ())


def _takes(candidate: Any, name: str, arguments: tuple[None, ...]) -> bool:
    """Return whether the class of `candidate` has a method `name` for so many arguments."""
    if not callable(getattr(type(candidate), name, None)):
        return False
    try:
        inspect.signature(getattr(candidate, name)).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method of compiled code may have no signature
        return True
    return True
