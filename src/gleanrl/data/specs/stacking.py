"""`torch.stack` for specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gleanrl.data.specs.base import TORCH_FUNCTIONS, TensorSpec
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.data.specs.stack import repeated
from gleanrl.data.specs.stacked import Stacked
from gleanrl.data.specs.stacked_composite import StackedComposite
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError


def stack_specs(specs: Sequence[TensorSpec], dim: int = 0, *, out: None = None) -> Any:
    """Return the spec of stacked values; this is what `torch.stack` does for specs.

    Equal specs give one of their kind with a new dimension, others a `Stacked` or `StackedComposite`. The
    members of a stack are the given objects.

    Args:
        specs: at least one; all composites or none.
        dim: where the new dimension goes.
        out: must be None.

    Raises:
        InvalidTypeError: if something isn't a spec, or composites and leaves are mixed.
        InvalidArgumentError: if there is no spec, or they can't be stacked along `dim`.
        UnsupportedError: if `out` is given.
    """
    if out is not None:
        raise UnsupportedError("stack: specs can't be stacked into `out`")
    if not specs:
        raise InvalidArgumentError("stack: expected at least one spec, got none")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise InvalidTypeError(f"stack: expected specs, got {spec!r}")
    first = specs[0]
    if all(spec == first for spec in specs[1:]):
        axis = first._dim("stack", dim, new=1)
        return repeated(first, axis, len(specs))
    if all(isinstance(spec, SpecMapping) for spec in specs):
        return StackedComposite(*specs, dim=dim)  # type: ignore[arg-type]
    return Stacked(*specs, dim=dim)


TORCH_FUNCTIONS[torch.stack] = stack_specs
