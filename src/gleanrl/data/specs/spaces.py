"""`Space`: an immutable object that holds the numbers of a domain, its bounds, counts or masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Space:
    """The numbers of a domain. Its tensors start with the batch dimensions of the spec they belong to."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the space with `function` applied to each of its tensors."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self)(**{k: function(v) if isinstance(v, Tensor) else v for k, v in fields.items()})

    def __eq__(self, other: object) -> bool:
        """Compare by content."""
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
