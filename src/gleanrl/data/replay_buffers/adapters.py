"""Parts by the protocol that other releases have, seen a second time, by the native one.

A sampler, writer or storage by that protocol, or one of ours with methods of it overridden, is what a user gave, and
stays it. Buffers hold a *view*: an object whose class is made of the user's, and whose native methods call the user's.
A view of one of our parts shares its attributes, so that both are one part; what the user's methods call by ``super()``
runs on the part itself and is native all the way. Native parts have no view and pay nothing.
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
    """The state of a part that has a `state_dict` of its own."""

    state: dict[str, Any]


def plain_state(value: Any) -> Any:
    """Return a part's snapshot as plain values; the user's own state stays as it is."""
    return value._asdict() if isinstance(value, SavedAttributes) else plain(value)


class Adapter(Part, Stateful[Any]):
    """What views have in common; see `view_of`."""

    __slots__ = ("own", "part")

    part: Any
    """What the user gave."""
    own: frozenset[str]
    """Which of the protocol's methods are the user's."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the class of a view without what its bases do for classes of users."""

    def opened(self) -> None:
        """Prepare for use: `part` and `own` are known, the attributes are the part's."""

    @property
    def given(self) -> Any:
        """What the user gave."""
        return self.part

    @property
    def foreign(self) -> bool:
        """Whether the part is of another library, which knows nothing of our methods."""
        return not isinstance(self.part, Part)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the part, with those of the options that it takes."""
        method = getattr(self.part, name)
        return method(*arguments, **with_keywords(method, **options))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return what `snapshot` gives as plain values."""
        state: dict[str, Any] = plain_state(self.snapshot())
        return state

    load_state_dict = Stateful.load_state_dict

    def saved(self) -> SavedAttributes:
        """Return a copy of the part's own state."""
        return SavedAttributes(copy.deepcopy(self.part.state_dict() or {}))

    def parsed(self, state: Any, trial: AbstractContextManager[Any] | None = None) -> SavedAttributes:
        """Return the value of a saved state after a trial: the part loads it, and what it had before again.

        Args:
            state: that is read.
            trial: around the part's loading of it; None for nothing.
        """
        name = type(self.part).__name__
        found = StateReader(state, f"a {name}").get("state")
        before = self.saved()
        try:
            with trial or nullcontext():
                self.part.load_state_dict(copy.deepcopy(found))
        except Exception as cause:
            raise SchemaError(f"load_state_dict: a {name} doesn't take the state: {cause}") from cause
        finally:
            self.restore(before)
        return SavedAttributes(found)

    def restore(self, value: SavedAttributes) -> None:
        """Have the part go on from a value."""
        self.part.load_state_dict(copy.deepcopy(value.state))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the part; the copy gets a view of its own."""
        way = type(self).__bases__[0]  # see `_joined`
        return _again, (self.part, way.__bases__[1], way, self.own)


def view_of(part: Any, kind: Any, way: Any, methods: Mapping[str, str | None], needed: Iterable[str]) -> Any:
    """Return a part as buffers use it: itself, or a view of one that has familiar methods of its own.

    Args:
        part: a part of ours, or another library's; what is neither stays as it is.
        kind: what it is to be.
        way: the view of such a part, a subclass of `kind` and `Adapter`.
        methods: the familiar methods, and the native one that a class overrides instead, if there is one.
        needed: what a part of another library has.

    Raises:
        UnsupportedError: it overrides what nobody would call.
    """
    if isinstance(part, (Adapter, type)):
        return part
    own = frozenset(methods)
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
            own |= _STATE  # one without the other means nothing
    elif not all(hasattr(part, name) for name in needed):
        return part
    return _again(part, kind, way, own)


def _check_files(part: Any, house: type[Any]) -> None:
    """Refuse files of a part's own: a checkpoint of a buffer holds the states of its parts, written in one piece."""
    if own := overridden(part, *_FILES, of=house):
        raise UnsupportedError(
            f"class {type(part).__name__}: checkpoints of a buffer don't call {own[0]}() of its parts: override "
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
    # The part may have a way of its own to set attributes.
    object.__setattr__(view, "part", part)
    object.__setattr__(view, "own", own)
    view.opened()
    return view


@lru_cache(maxsize=256)
def _joined(way: Any, base: Any, name: str) -> Any:
    return type(name, (way, base), {"__slots__": (), "__module__": base.__module__})


def with_keywords(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those options that a user's function takes."""
    taken = inspect.signature(function).parameters if options else {}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return options
    return {name: value for name, value in options.items() if name in taken}


def make_concrete(cls: type[Any], names: Iterable[str]) -> None:
    """Let a class do without those abstract methods that it hasn't got: it is used through a view, which has them."""
    for name in names:
        if getattr(getattr(cls, name), "__isabstractmethod__", False):
            setattr(cls, name, _through_a_view)


def _through_a_view(self: Any, *arguments: Any, **options: Any) -> Any:
    raise UnsupportedError(
        f"class {type(self).__name__}: this needs a native method, and the class has some of other releases instead: "
        "use it in a ReplayBuffer, and override all of those that buffers call, add() and extend() of a writer, say"
    )
