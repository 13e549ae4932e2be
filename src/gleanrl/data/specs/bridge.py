"""TorchRL's specs as ours, and ours as TorchRL's: pure conversions, each of which makes a copy.

A spec is read through public attributes and found by the name of its class, so that reading needs no import of that
library. Writing imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tensordict import NonTensorData

from gleanrl.data.specs.alternatives import Constant, ConstantStack
from gleanrl.data.specs.base import TensorSpec, stack
from gleanrl.data.specs.binary import Binary
from gleanrl.data.specs.bounded import Bounded
from gleanrl.data.specs.categorical import Categorical, OneHot
from gleanrl.data.specs.composite import Composite
from gleanrl.data.specs.multi_categorical import MultiCategorical, MultiOneHot
from gleanrl.data.specs.non_tensor import NonTensor
from gleanrl.data.specs.unbounded import Unbounded
from gleanrl.errors import InvalidTypeError


def from_torchrl(spec: Any) -> Any:
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
    return _counterpart(spec, _READERS)(spec)


def to_torchrl(spec: Any) -> Any:
    """Return one of our specs as TorchRL's; whatever else is returned as it is.

    The result is a copy: later changes of `spec`, its mask say, don't show in it.

    Args:
        spec: a spec.

    Raises:
        ImportError: if TorchRL isn't installed.
        InvalidTypeError: if the class of the spec is a user's own and derives from none of ours.
    """
    if not isinstance(spec, TensorSpec):
        return spec
    return _counterpart(spec, _WRITERS)(spec, importlib.import_module("torchrl.data"))


def _counterpart(spec: Any, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    for cls in type(spec).__mro__:
        if cls.__name__ in table:
            return table[cls.__name__]
    raise InvalidTypeError(
        f"spec: {type(spec).__name__} has no counterpart; expected one of {sorted(table)}, or a class that "
        "derives from one of that name"
    )


def _composite(spec: Any) -> Composite:
    entries = {key: from_torchrl(entry) for key, entry in spec.items()}
    return Composite(
        entries,
        shape=spec.shape,
        device=spec.device,
        data_cls=_newer(spec, "data_cls"),
        step_mdp_static=bool(_newer(spec, "step_mdp_static")),
    )


def _stacked(spec: Any) -> Any:
    return stack([from_torchrl(part) for part in spec.unbind(spec.dim)], spec.dim)


def _newer(spec: Any, name: str) -> Any:
    """Return an attribute that not all releases have, or None."""
    return vars(spec).get(name)


_READERS: dict[str, Callable[[Any], Any]] = {
    "Binary": lambda s: Binary(shape=s.shape, device=s.device, dtype=s.dtype),
    "Bounded": lambda s: Bounded(s.space.low, s.space.high, s.shape, s.device, s.dtype, _newer(s, "domain")),
    "Categorical": lambda s: Categorical(s.space.n, s.shape, s.device, s.dtype, s.mask),
    "Composite": _composite,
    "MultiCategorical": lambda s: MultiCategorical(s.nvec, s.shape, s.device, s.dtype, s.mask),
    "MultiOneHot": lambda s: MultiOneHot(s.nvec, s.shape, s.device, s.dtype, mask=s.mask),
    "NonTensor": lambda s: NonTensor(
        s.shape, s.device, example_data=s.example_data, feature_dims=_newer(s, "feature_dims")
    ),
    "OneHot": lambda s: OneHot(s.n, s.shape, s.device, s.dtype, mask=s.mask),
    "Stacked": _stacked,
    "StackedComposite": _stacked,
    "Unbounded": lambda s: Unbounded(s.shape, s.device, s.dtype, _newer(s, "domain")),
}


def _to_composite(spec: Composite, theirs: Any) -> Any:
    entries = {key: to_torchrl(entry) for key, entry in spec.items()}
    newer: dict[str, Any] = {}
    if spec.data_cls is not None:
        newer["data_cls"] = spec.data_cls
    if spec.step_mdp_static:
        newer["step_mdp_static"] = True
    made = theirs.Composite(entries, shape=spec.shape, device=spec.device, **newer)
    return made.lock_() if spec.is_locked else made


_WRITERS: dict[str, Callable[[Any, Any], Any]] = {
    "Binary": lambda s, t: t.Binary(shape=s.shape, device=s.device, dtype=s.dtype),
    "Bounded": lambda s, t: t.Bounded(
        *(bound.clone() for bound in s.bounds), s.shape, s.device, s.dtype, domain=s.domain
    ),
    "Categorical": lambda s, t: t.Categorical(s.space.n, s.shape, s.device, s.dtype, _copied(s.mask)),
    "Choice": lambda s, t: t.Choice([_to_choice(choice) for choice in s.choices]),
    "Composite": _to_composite,
    "MultiCategorical": lambda s, t: t.MultiCategorical(s.nvec, s.shape, s.device, s.dtype, _copied(s.mask)),
    "MultiOneHot": lambda s, t: t.MultiOneHot(s.nvec, s.shape, s.device, s.dtype, mask=_copied(s.mask)),
    "NonTensor": lambda s, t: t.NonTensor(
        s.shape, s.device, example_data=s.example_data, feature_dims=s.feature_dims
    ),
    "OneHot": lambda s, t: t.OneHot(s.n, s.shape, s.device, s.dtype, mask=_copied(s.mask)),
    "Stacked": lambda s, t: t.Stacked(*map(to_torchrl, s.specs), dim=s.stack_dim),
    "StackedComposite": lambda s, t: t.StackedComposite(*map(to_torchrl, s.specs), dim=s.stack_dim),
    "Unbounded": lambda s, t: t.Unbounded(s.shape, s.device, s.dtype, domain=s.domain),
}


def _to_choice(spec: Any) -> Any:
    if isinstance(spec, ConstantStack):
        return spec.rand()
    if isinstance(spec, Constant):
        return NonTensorData(spec.example_data, batch_size=spec.shape, device=spec.device)
    return to_torchrl(spec)


def _copied(mask: Any) -> Any:
    return None if mask is None else mask.clone()
