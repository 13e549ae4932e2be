"""Check that the members of a batch of environments step no object in common."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gleanrl._rollout.env_traits import extra
from gleanrl.errors import InvalidArgumentError

_DECLARES = (("action_space", "observation_space"), ("full_action_spec", "full_observation_spec"))
"""What environments declare: gymnasium's and those like them, and those on TensorDicts."""

_WAY = "; if they may share it, name its attribute in the class attribute shared_attributes of its holder"


def require_independent(envs: Iterable[Any], started: bool = True) -> None:
    """Check that no object is stepped by two environments; nested batches in this process count by their members.

    Attributes of the environments are searched, and attributes of the environments and simulators found there. A
    simulator is an object whose ``step`` takes one argument and whose ``reset`` needs none. Objects without attributes
    may be shared, as may those that a class holds, data of any kind, and the attributes that the class of their holder
    names in ``shared_attributes``; but environments may never be.

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
                way = "" if _is_environment(stepped) else _WAY
                raise InvalidArgumentError(
                    f"environments {owner} and {number} of a batch step the same "
                    f"{type(stepped).__name__} object, so that the steps of one would change the other; give each "
                    f"its own: pass a callable that makes a new simulator at each call, or copies (copy.deepcopy){way}"
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
    shared = extra(holder, "shared_attributes", ())
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if isinstance(value, Mapping):
            value = list(value.values())
        several = value if isinstance(value, (list, tuple)) else [value]
        # A list may hold millions of numbers: to look at their types costs nanoseconds each.
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
    """Return whether an object says what it observes, and what acts on it."""
    static = inspect.getattr_static  # to ask a batch for another attribute would start it
    return any(all(static(candidate, name, None) is not None for name in names) for names in _DECLARES)


def _has_state(candidate: Any) -> bool:
    """Return whether an object may have a state: attributes, or memory of compiled code."""
    slots = any(vars(kind).get("__slots__") for kind in type(candidate).__mro__)
    return slots or bool(getattr(candidate, "__dict__", True))


def _takes(candidate: Any, name: str, arguments: tuple[None, ...]) -> bool:
    """Return whether a method `name` of `candidate` takes so many arguments."""
    try:
        inspect.signature(getattr(candidate, name)).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method of compiled code may have no signature
        return True
    return True
