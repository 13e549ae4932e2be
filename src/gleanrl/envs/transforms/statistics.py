"""Running sums for `VecNorm`, in the process's own memory or shared between processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gleanrl.errors import SchemaError
from gleanrl.inference import lasting
from gleanrl.state import Stateful
from gleanrl.system.shared_memory import SharedMemory
from gleanrl.tree import NestedKey

_DOUBLE = 8

Sums = Mapping[NestedKey, Tensor]
"""For each key ``(1 + 2 n,)`` float64: count, sums and sums of squares of n elements."""


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
    """

    def __init__(self, shapes: Mapping[NestedKey, torch.Size], shared: bool = False) -> None:
        self.shapes = dict(shapes)
        self._memory = SharedMemory(_DOUBLE * self._size()) if shared else None
        self._local = None if shared else lasting(torch.zeros)(self._size(), dtype=torch.float64)
        self._views: dict[NestedKey, Tensor] = {}

    @property
    def shared(self) -> bool:
        """Whether other processes can have the same numbers."""
        return self._memory is not None

    def _size(self) -> int:
        return sum(1 + 2 * prod(shape) for shape in self.shapes.values())

    def __getstate__(self) -> dict[str, Any]:
        """Leave the views out: each copy makes its own."""
        return {**self.__dict__, "_views": {}}

    def _view(self, key: NestedKey) -> Tensor:
        """Return ``(1 + 2 n,)``: count, sums, sums of squares."""
        if not self._views:
            flat = self._local
            if flat is None:
                assert self._memory is not None
                flat = lasting(torch.frombuffer)(self._memory.map, dtype=torch.float64)
            sizes = [1 + 2 * prod(shape) for shape in self.shapes.values()]
            self._views = dict(zip(self.shapes, flat.split(sizes), strict=True))
        return self._views[key]

    def clear(self) -> None:
        """Forget everything."""
        self.adopt(
            {key: torch.zeros(1 + 2 * prod(shape), dtype=torch.float64) for key, shape in self.shapes.items()}
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._memory is None:
            yield
            return
        with self._memory.lock():
            yield

    def update(self, key: NestedKey, value: Tensor, decay: float) -> None:
        """Forget a little, then count `value`, ``(n, *shape)``."""
        value = value.detach().to("cpu", torch.float64)
        size = prod(self.shapes[key])
        rows = value.reshape(-1, size)
        seen = torch.cat([rows.new_full((1,), len(rows)), rows.sum(0), rows.square().sum(0)])
        with self._locked():
            view = self._view(key)
            view.copy_(torch.add(seen, view, alpha=decay))

    def moments(self, key: NestedKey) -> tuple[Tensor, Tensor] | None:
        """Return mean and variance, float64 of the key's shape; None if nothing was seen."""
        with self._locked():
            count, total, squares = self._parts(self._view(key).clone(), key)
        if not float(count):
            return None
        mean = total / count
        return mean, (squares / count - mean.square()).clamp_min(0)

    def _parts(self, view: Tensor, key: NestedKey) -> tuple[Tensor, Tensor, Tensor]:
        size, shape = prod(self.shapes[key]), self.shapes[key]
        return view[0], view[1 : 1 + size].reshape(shape), view[1 + size :].reshape(shape)

    def snapshot(self) -> Sums:
        """Return a copy of all numbers."""
        with self._locked():
            return MappingProxyType({key: self._view(key).clone() for key in self.shapes})

    def parse(self, state: Any) -> Sums:
        """Return the numbers of a saved state, checked against the shapes."""
        sums = checked_sums(state)
        sizes = {key: 1 + 2 * prod(shape) for key, shape in self.shapes.items()}
        found = {key: len(numbers) for key, numbers in sums.items()}
        if found != sizes:
            raise SchemaError(f"statistics: expected as many numbers by key as {sizes}, got {found}")
        return sums

    def adopt(self, value: Sums) -> None:
        """Go on from numbers that fit; shared ones change for everybody."""
        with self._locked():
            for key, numbers in value.items():
                self._view(key).copy_(numbers)


def checked_sums(state: Any) -> Sums:
    """Return copies of the numbers of a state, of whatever shapes; `SchemaError` if there is something else in it."""
    numbers = state.values() if isinstance(state, Mapping) else [None]
    fits = all(
        isinstance(n, Tensor)
        and n.dtype is torch.float64
        and n.ndim == 1
        and len(n) % 2
        and bool(n.isfinite().all())
        for n in numbers
    )
    if not fits:
        raise SchemaError(f"statistics: expected an odd number of finite float64 by key, got {state!r:.100}")
    return MappingProxyType({key: value.detach().to("cpu", copy=True) for key, value in state.items()})
