"""The check that no two members of a batch of environments step the same object."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gleanrl._rollout.env_traits import extra
from gleanrl.errors import InvalidArgumentError

_DECLARES = (("action_space", "observation_space"), ("full_action_spec", "full_observation_spec"))
"""Attributes that identify an environment: a gymnasium environment, and one that steps TensorDicts."""

_WAY = "; if they may share it, name its attribute in the class attribute shared_attributes of its holder"


def require_independent(envs: Iterable[Any], started: bool = True) -> None:
    """Check that no object is stepped by two members of a batch.

    The search follows the attributes of each environment, and of the environments and simulators that it finds. A
    simulator is an object whose ``step`` takes one argument and whose ``reset`` needs none. A nested batch in this
    process counts by its members. Members may share data of any kind, objects without attributes, and objects that a
    class holds. They may share a simulator only if its holder's class lists the attribute in ``shared_attributes``.
    They may never share an environment.

    Args:
        envs: the members of a batch that live in this process.
        started: whether to start nested batches, to find the environments that their callables make.

    Raises:
        InvalidArgumentError: two members step the same object.
    """
    owners: dict[int, tuple[int, Any]] = {}  # holds the objects, so that Python doesn't reuse an id meanwhile
    for number, env in enumerate(envs):
        for stepped in _reached(env, started):
            owner, _ = owners.setdefault(id(stepped), (number, stepped))
            if owner != number:
                way = "" if _is_environment(stepped) else _WAY
                raise InvalidArgumentError(
                    f"environments {owner} and {number} of a batch step the same "
                    f"{type(stepped).__name__} object, so that the steps of one would change the other; give each "
                    f"its own: pass a callable that makes a new simulator at each call, or copies (copy.deepcopy){way}"
                )


def _reached(env: Any, started: bool) -> Iterable[Any]:
    """Return `env` and all environments and simulators that it steps, directly or indirectly."""
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
    shared = extra(holder, "shared_attributes", ())
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if isinstance(value, Mapping):
            value = list(value.values())
        several = value if isinstance(value, (list, tuple)) else [value]
        # A list may hold millions of numbers. The set of their types takes nanoseconds for each number.
        kinds = {kind for kind in set(map(type, several)) if _may_be_stepped(kind)}
        if kinds:
            found = [one for one in several if type(one) in kinds and _is_simulator(one)]
            yield from (one for one in found if name not in shared or _is_environment(one))


def _may_be_stepped(kind: type[Any]) -> bool:
    return not issubclass(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("step", "reset")
    )


def _is_simulator(candidate: Any) -> bool:
    if not (_takes(candidate, "step", (None,)) and _takes(candidate, "reset", ())):
        return False
    return _has_state(candidate) or _is_environment(candidate)


def _is_environment(candidate: Any) -> bool:
    """Return whether an object declares its observations and its actions."""
    static = inspect.getattr_static  # `getattr` of an attribute that a batch lacks would start the batch
    return any(all(static(candidate, name, None) is not None for name in names) for names in _DECLARES)


def _has_state(candidate: Any) -> bool:
    """Return whether an object may have a state: in a ``__dict__``, in slots, or in the memory of compiled code."""
    slots = any(vars(kind).get("__slots__") for kind in type(candidate).__mro__)
    return slots or bool(getattr(candidate, "__dict__", True))


def _takes(candidate: Any, name: str, arguments: tuple[None, ...]) -> bool:
    """Return whether the method `name` of `candidate` can be called with these arguments."""
    try:
        inspect.signature(getattr(candidate, name)).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method of compiled code may have no signature
        return True
    return True
