"""Which methods a user's class replaced: what stands in for a method may be used only where nobody did."""

from __future__ import annotations

from typing import Any

_MISSING = object()
_HOUSE = __name__.partition(".")[0] + "."


def is_ours(definition: Any) -> bool:
    """Return whether a class or a function is this library's, and no user's."""
    return str(definition.__module__).startswith(_HOUSE)


def overridden(subject: Any, *names: str, of: type[Any]) -> tuple[str, ...]:
    """Return which of the attributes `names` aren't those of the class `of`.

    Methods, properties and class attributes count, whether a subclass replaces them, one of its other bases does, or
    the object itself has another one (``env.step = ...``); so does a name that `of` hasn't got. For construction and
    once a batch, not for every step: a look-up costs about a microsecond.

    Args:
        subject: a class, or an object.
        names: attributes.
        of: whose attributes they are to be.

    Examples:
        >>> class Base:
        ...     def step(self): ...
        ...     def reset(self): ...
        >>> class Derived(Base):
        ...     def step(self): ...
        >>> overridden(Derived, "step", "reset", of=Base), overridden(Base(), "step", of=Base)
        (('step',), ())
    """
    cls = subject if isinstance(subject, type) else type(subject)
    own = {} if subject is cls else getattr(subject, "__dict__", {})
    if cls is of:  # mostly, in policies, which are looked at once a batch
        return tuple(name for name in names if name in own)
    return tuple(name for name in names if name in own or _found(cls, name) is not _found(of, name))


def is_native(subject: Any, *names: str, of: type[Any]) -> bool:
    """Return whether a class, or an object, is one of `of` and has its `names` as they are; see `overridden`."""
    cls = subject if isinstance(subject, type) else type(subject)
    return issubclass(cls, of) and not overridden(subject, *names, of=of)


def _found(cls: type[Any], name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _MISSING
