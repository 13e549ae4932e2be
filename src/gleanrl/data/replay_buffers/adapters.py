"""Adapters for samplers, writers and storages that implement the protocol of other releases.

A user may pass a part of another library, or a subclass of one of our parts that overrides methods of that protocol.
The buffer then holds an adapter, whose native methods call the user's methods. The adapter's class derives from the
user's class if that is a subclass of ours, otherwise from our base class.

An adapter of one of our parts shares the attributes of that part, so both have the same state. A ``super()`` call in a
user's method runs on the part itself and uses native methods only. Native parts have no adapter and therefore no
overhead.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

from gleanrl._state.state import Stateful, StateReader, plain
from gleanrl._util import is_ours, overridden
from gleanrl.data.replay_buffers.component_base import Part
from gleanrl.errors import SchemaError, UnsupportedError

_STATE = frozenset(("state_dict", "load_state_dict"))
_FILES = ("dumps", "loads", "dump", "save", "load")


class SavedAttributes(NamedTuple):
    """The state of a part whose class defines its own `state_dict`."""

    state: dict[str, Any]


def plain_state(value: Any) -> Any:
    """Return a part's snapshot as plain values; a state from the user's `state_dict` is kept unchanged."""
    return value._asdict() if isinstance(value, SavedAttributes) else plain(value)


class Adapter(Part, Stateful[Any]):
    """Base class of all adapters; see `view_of`."""

    __slots__ = ("own", "part")

    part: Any
    """The user's part."""
    own: frozenset[str]
    """Names of the protocol's methods that the user's class defines. For a part of another library, all that it has."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Skip `__init_subclass__` of the base classes, which is for user-defined classes."""

    def opened(self) -> None:
        """Prepare for use; by default, do nothing. `part`, `own` and the shared attributes are set before this call."""

    @property
    def unwrapped(self) -> Any:
        """The user's part."""
        return self.part

    @property
    def foreign(self) -> bool:
        """Whether the part comes from another library and therefore lacks our native methods."""
        return not isinstance(self.part, Part)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the part with the arguments and with the options that its signature accepts."""
        method = getattr(self.part, name)
        return method(*arguments, **with_keywords(method, **options))

    def state_dict(self) -> dict[str, Any]:
        """Return the result of `snapshot` as plain values.

        A state that the part's own `state_dict` returned is kept unchanged under ``"state"``.
        """
        state: dict[str, Any] = plain_state(self.snapshot())
        return state

    load_state_dict = Stateful.load_state_dict

    def saved(self) -> SavedAttributes:
        """Return a copy of the state that the part's `state_dict` returns; an empty one for None."""
        return SavedAttributes(copy.deepcopy(self.part.state_dict() or {}))

    def parsed(self, state: Any, trial: AbstractContextManager[Any] | None = None) -> SavedAttributes:
        """Return a saved state after a trial load.

        The part's protocol has no check without a load. So the part loads the state once and then loads its previous
        state again.

        Args:
            state: the saved state.
            trial: a context manager around the trial load; None for no context.

        Raises:
            SchemaError: the part's `load_state_dict` raised an error. The part has its previous state.
        """
        name = type(self.part).__name__
        found = StateReader(state, f"a {name}").get("state")
        before = self.saved()
        try:
            with trial or nullcontext():
                self.part.load_state_dict(copy.deepcopy(found))
        except Exception as cause:
            raise SchemaError(
                f"load_state_dict: a {name} rejects the state: {cause}; load a state that a {name} saved"
            ) from cause
        finally:
            self.restore(before)
        return SavedAttributes(found)

    def restore(self, value: SavedAttributes) -> None:
        """Load a copy of a value that `saved` or `parsed` returned, by the part's `load_state_dict`."""
        self.part.load_state_dict(copy.deepcopy(value.state))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the part; the copy gets a new adapter."""
        way = type(self).__bases__[0]  # see `_joined`
        return _again, (self.part, way.__bases__[1], way, self.own)


def view_of(part: Any, kind: Any, way: Any, methods: Mapping[str, str | None], needed: Iterable[str]) -> Any:
    """Return the part itself, or an adapter if the part defines methods of the protocol.

    Args:
        part: an instance of `kind`, or a part of another library. Any other object, a class or an adapter is returned
            unchanged.
        kind: the native base class: `Sampler`, `Storage` or `Writer`.
        way: the adapter class for such parts, a subclass of `kind` and `Adapter`.
        methods: the names of the protocol's methods. Each maps to the native method that a class may override instead,
            or None.
        needed: methods that an object of another library must have to count as such a part.

    Raises:
        UnsupportedError: the class overrides `dumps`, `loads` or an alias of them, but neither `state_dict` nor
            `load_state_dict`.
    """
    if isinstance(part, (Adapter, type)):
        return part
    own = frozenset(name for name in methods if hasattr(part, name))
    if isinstance(part, kind):
        house = next(base for base in type(part).__mro__ if is_ours(base))
        if house is type(part):
            return part
        own = frozenset(overridden(part, *methods, of=house))
        if own.isdisjoint(_STATE):
            _check_files(part, house)
        own -= {name for name in own if _has_native(part, methods[name], house)}
        if not own:
            return part
        if not own.isdisjoint(_STATE):
            own |= _STATE  # saving and loading must use the same format
    elif not all(hasattr(part, name) for name in needed):
        return part
    return _again(part, kind, way, own)


def _check_files(part: Any, house: type[Any]) -> None:
    """Raise `UnsupportedError` if the part overrides methods that read or write files.

    A buffer's checkpoint holds the states of all parts in one commit, so files of a single part would not belong to it.
    """
    if own := overridden(part, *_FILES, of=house):
        raise UnsupportedError(
            f"class {type(part).__name__} overrides {own[0]}(), which checkpoints of a buffer don't call; override "
            "state_dict() and load_state_dict() instead, or as well"
        )


def _has_native(part: Any, name: str | None, house: type[Any]) -> bool:
    if name is None or not overridden(part, name, of=house):
        return False
    return getattr(type(part), name) is not _through_a_view


def _again(part: Any, kind: Any, way: Any, own: frozenset[str]) -> Any:
    ours = isinstance(part, kind)
    base: Any = type(part) if ours else kind
    view = object.__new__(_joined(way, base, type(part).__name__))
    if ours:
        view.__dict__ = part.__dict__
    # The user's class may override __setattr__.
    object.__setattr__(view, "part", part)
    object.__setattr__(view, "own", own)
    view.opened()
    return view


@lru_cache(maxsize=256)
def _joined(way: Any, base: Any, name: str) -> Any:
    return type(name, (way, base), {"__slots__": (), "__module__": base.__module__})


def with_keywords(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that a user's function accepts."""
    accepted = inspect.signature(function).parameters if options else {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        return options
    return {name: value for name, value in options.items() if name in accepted}


def make_concrete(cls: type[Any], names: Iterable[str]) -> None:
    """Replace the abstract methods that a class lacks by one that raises `UnsupportedError`.

    Python can then instantiate the class. A buffer uses it through an adapter, which implements these methods.
    """
    for name in names:
        if getattr(getattr(cls, name), "__isabstractmethod__", False):
            setattr(cls, name, _through_a_view)


def _through_a_view(self: Any, *arguments: Any, **options: Any) -> Any:
    raise UnsupportedError(
        f"class {type(self).__name__}: this call needs a native method, but the class defines methods of other "
        "releases instead; use it in a ReplayBuffer, and define all methods that buffers call, for example add() and "
        "extend() of a writer"
    )
