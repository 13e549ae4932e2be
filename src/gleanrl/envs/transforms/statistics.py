"""Running sums for `VecNorm`, in the process's own memory or shared between processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from gleanrl.errors import SchemaError
from gleanrl.inference import lasting
from gleanrl.state import Stateful
from gleanrl.system.shared_memory import SharedMemory
from gleanrl.tree import NestedKey

_DOUBLE = 8
_NONE = torch.Size()

Result = TypeVar("Result")

Sums = Mapping[NestedKey, Tensor]
"""For each key ``(m (1 + 2 n),)`` float64: count, sums and sums of squares of n elements, for each of m members."""


@runtime_checkable
class SharesStatistics(Protocol):
    """A transform, or a part of one, whose statistics those of other environments can use; see `EnvCreator`."""

    def share_statistics(self) -> Any:
        """Keep the statistics where other processes can use them, too, from now on; return them."""

    def use_statistics(self, shared: Any, /) -> None:
        """Use the statistics that another one's `share_statistics` returned."""


class RunningSums(Stateful[Sums]):
    """For each key the number, the sum and the sum of squares of what was seen, with geometric forgetting.

    Float64, so that squares of large numbers don't swallow their differences. An update is computed aside and written
    in one go under the lock: whoever dies meanwhile leaves whole sums, or, killed within that one copy, numbers that
    the decay forgets.

    Args:
        shapes: for each key the shape of its sums.
        shared: whether copies of this object (by pickle or deepcopy) share the numbers.
        members: the batch dimensions of environments each of which has sums of its own; ``()`` for the same for all.
    """

    def __init__(
        self, shapes: Mapping[NestedKey, torch.Size], shared: bool = False, members: torch.Size = _NONE
    ) -> None:
        self.shapes, self.members = dict(shapes), members
        size = sum(self._sizes().values())
        self._memory = SharedMemory(_DOUBLE * size) if shared else None
        self._local = None if shared else lasting(torch.zeros)(size, dtype=torch.float64)
        self._views: dict[NestedKey, Tensor] = {}

    @property
    def shared(self) -> bool:
        """Whether other processes can have the same numbers."""
        return self._memory is not None

    def _sizes(self) -> dict[NestedKey, int]:
        """Return how many numbers each key has."""
        return {key: prod(self.members) * (1 + 2 * prod(shape)) for key, shape in self.shapes.items()}

    def copied(self, shared: bool = False) -> RunningSums:
        """Return the same numbers in memory of their own, which other processes can have or not."""
        copy = RunningSums(self.shapes, shared, self.members)
        copy.adopt(self.snapshot())
        return copy

    def __getstate__(self) -> dict[str, Any]:
        """Leave the views out: each copy makes its own."""
        return {**self.__dict__, "_views": {}}

    def _view(self, key: NestedKey) -> Tensor:
        """Return ``(m, 1 + 2 n)``: count, sums, sums of squares of each of m members."""
        if not self._views:
            flat = self._local
            if flat is None:
                assert self._memory is not None
                flat = lasting(torch.frombuffer)(self._memory.map, dtype=torch.float64)
            parts = zip(self.shapes, flat.split([*self._sizes().values()]), strict=True)
            self._views = {key: part.view(prod(self.members), -1) for key, part in parts}
        return self._views[key]

    def clear(self) -> None:
        """Forget everything."""
        self.adopt({key: torch.zeros(size, dtype=torch.float64) for key, size in self._sizes().items()})

    def _alone(self, call: Callable[[], Result]) -> Result:
        return call() if self._memory is None else self._memory.alone(call)

    def update(self, key: NestedKey, value: Tensor, decay: float, rows: Tensor | None = None) -> None:
        """Forget a little, then count `value`.

        Args:
            key: whose sums.
            value: ``(*members, *shape)``, or any number of values, ``(..., *shape)``, where all have the same sums.
            decay: by what the past is weighted down.
            rows: which environments count, ``(*batch,)`` bool; the sums of the other members stay. None for all.
        """
        value = value.detach().to("cpu", torch.float64)
        rows = None if rows is None else rows.cpu()
        if rows is not None and not self.members:
            value, rows = value[rows], None
        each = value.reshape(-1, prod(self.members), prod(self.shapes[key]))
        number = each.new_full((each.shape[1], 1), len(each))
        seen = torch.cat([number, each.sum(0), each.square().sum(0)], -1)
        counted = slice(None) if rows is None else rows.flatten()

        def change() -> None:
            view = self._view(key)
            view[counted] = torch.add(seen, view, alpha=decay)[counted]

        self._alone(change)

    def moments(self, key: NestedKey) -> tuple[Tensor, Tensor] | None:
        """Return mean and variance, ``(*members, *shape)`` float64; None if nothing was seen.

        They are 0 and 1 of a member of which nothing was seen.
        """
        size, shape = prod(self.shapes[key]), (*self.members, *self.shapes[key])
        count, total, squares = self._alone(lambda: self._view(key).clone()).split([1, size, size], -1)
        if not bool(count.any()):
            return None
        seen, mean = count > 0, total / count
        variance = (squares / count - mean.square()).clamp_min(0)
        return mean.where(seen, 0.0).reshape(shape), variance.where(seen, 1.0).reshape(shape)

    def snapshot(self) -> Sums:
        """Return a copy of all numbers."""
        copies = self._alone(lambda: {key: self._view(key).clone().flatten() for key in self.shapes})
        return MappingProxyType(copies)

    def parse(self, state: Any) -> Sums:
        """Return the numbers of a saved state, checked against the shapes."""
        sums = checked_sums(state)
        sizes, found = self._sizes(), {key: len(numbers) for key, numbers in sums.items()}
        if found != sizes:
            raise SchemaError(f"statistics: expected as many numbers by key as {sizes}, got {found}")
        return sums

    def adopt(self, value: Sums) -> None:
        """Go on from numbers that fit; shared ones change for everybody."""

        def change() -> None:
            for key, numbers in value.items():
                self._view(key).view(-1).copy_(numbers)

        self._alone(change)


def checked_sums(state: Any) -> Sums:
    """Return copies of the numbers of a state, of whatever shapes; `SchemaError` if there is something else in it."""
    numbers = state.values() if isinstance(state, Mapping) else [None]
    fits = all(
        isinstance(n, Tensor) and n.dtype is torch.float64 and n.ndim == 1 and bool(n.isfinite().all())
        for n in numbers
    )
    if not fits:
        raise SchemaError(f"statistics: expected finite float64 by key, got {state!r:.100}")
    return MappingProxyType({key: value.detach().to("cpu", copy=True) for key, value in state.items()})
