"""Names of the dimensions of a composite, as TensorDicts have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from typing_extensions import Self

from gleanrl.data.specs.geometry import Transform, blank
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.errors import InvalidArgumentError

Names = tuple[str | None, ...]


class Named(SpecMapping):
    """A mapping of specs whose dimensions may have names; those are no part of the domain."""

    _names: Names | None = None

    @property
    def names(self) -> list[str | None]:
        """The names of the dimensions, as the values have them; None for one without. No part of the domain.

        Assigned names go to nested composites, too; None takes all away.

        Raises:
            InvalidArgumentError: another number of names than of dimensions, or a name twice.
        """
        return [None] * self.ndim if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        given = [None] * self.ndim if names is None else list(names)
        named = [name for name in given if name is not None]
        if len(given) != self.ndim or len(set(named)) < len(named):
            raise InvalidArgumentError(f"names: expected {self.ndim} different names or None, got {names!r}")
        self._names = tuple(given) if named else None
        for spec in self.values():
            if isinstance(spec, Named):
                spec.names = [*given, *spec.names[self.ndim :]]

    def refine_names(self, *names: Any) -> Self:
        """Name dimensions that have no name yet, in place; None leaves one as it is.

        Args:
            names: one for each dimension; ``...`` stands for as many None as are left.

        Returns:
            the composite itself.

        Raises:
            InvalidArgumentError: another name than a dimension has, or another number of names.
        """
        given = list(names)
        if given.count(...) == 1:
            at = given.index(...)
            given[at : at + 1] = [None] * (self.ndim - len(given) + 1)
        both = list(zip(self.names, given, strict=False))
        if len(given) != self.ndim or any(None not in pair and pair[0] != pair[1] for pair in both):
            raise InvalidArgumentError(f"refine_names: {names} don't refine the names {self.names}")
        self.names = [old if new is None else new for old, new in both]
        return self


def names_after(names: Names | None, shape: torch.Size, transform: Transform) -> Names | None:
    """Return the names of dimensions after a shape operation, where it leaves any: TensorDicts know."""
    if names is None:
        return None
    given: Any = names  # one may be None
    named: Any = TensorDict({}, blank(shape).shape, names=given)
    after: Any = transform(named)
    return tuple(after.names)


def names_of_values(names: Names | None, ndim: int) -> Any:
    """Return the names of the dimensions of values that have `ndim` of them, the named ones last; None for none."""
    return None if names is None else [*[None] * (ndim - len(names)), *names]
