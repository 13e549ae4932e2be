"""Specs of other libraries, read through their public attributes and turned into ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gleanrl.data.specs.base import TensorSpec, stack
from gleanrl.data.specs.binary import Binary
from gleanrl.data.specs.bounded import Bounded
from gleanrl.data.specs.categorical import Categorical, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.multi_categorical import MultiCategorical, MultiOneHot
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.data.specs.unbounded import Unbounded
from gleanrl.errors import InvalidTypeError


def as_spec(spec: Any) -> Any:
    """Return a spec of another library as one of ours; ours and None are returned as they are.

    It goes by the name of the class, or of a class that it derives from, and by that class's public attributes, which
    are those of TorchRL: `shape`, `device` and `dtype`; `n`, `nvec` and `mask`; `space.low` and `space.high`; `items`;
    `dim` and `unbind`. The result is a copy: later changes of `spec`, its mask say, don't show in it.

    Args:
        spec: a spec.

    Raises:
        InvalidTypeError: if no class of that name has a counterpart here.
    """
    if spec is None or isinstance(spec, TensorSpec):
        return spec
    for cls in type(spec).__mro__:
        if cls.__name__ in _READERS:
            return _READERS[cls.__name__](spec)
    raise InvalidTypeError(
        f"spec: {type(spec).__name__} has no counterpart here; expected one of {sorted(_READERS)}, or a class that "
        "derives from one of that name"
    )


def _composite(spec: Any) -> Composite:
    entries = {key: as_spec(entry) for key, entry in spec.items()}
    return Composite(entries, shape=spec.shape, device=spec.device)


def _stacked(spec: Any) -> Any:
    return stack([as_spec(part) for part in spec.unbind(spec.dim)], spec.dim)


_READERS: dict[str, Callable[[Any], Any]] = {
    "Binary": lambda s: Binary(shape=s.shape, device=s.device, dtype=s.dtype),
    "Bounded": lambda s: Bounded(s.space.low, s.space.high, s.shape, s.device, s.dtype),
    "Categorical": lambda s: Categorical(s.n, s.shape, s.device, s.dtype, s.mask),
    "Composite": _composite,
    "MultiCategorical": lambda s: MultiCategorical(s.nvec, s.shape, s.device, s.dtype, s.mask),
    "MultiOneHot": lambda s: MultiOneHot(s.nvec, s.shape, s.device, s.dtype, s.mask),
    "NonTensor": lambda s: NonTensor(s.shape, s.device, s.example_data),
    "OneHot": lambda s: OneHot(s.n, s.shape, s.device, s.dtype, s.mask),
    "Stacked": _stacked,
    "StackedComposite": _stacked,
    "Unbounded": lambda s: Unbounded(s.shape, s.device, s.dtype),
}
