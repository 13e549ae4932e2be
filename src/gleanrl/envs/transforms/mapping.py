"""`EntryTransform`: entries mapped one by one, and their specs with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from gleanrl.data.specs import TensorSpec
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.spec_tools import map_leaves, mapped


def beside(transform: Transform, name: str, value: torch.Tensor) -> torch.Tensor | None:
    """Return a buffer of a transform on the device of `value`: itself, or a copy that is kept until it changes."""
    buffer = transform._buffers[name]
    if buffer is None or buffer.device == value.device:
        return buffer
    copies: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = transform.__dict__.setdefault("_copies", {})
    version = -1 if buffer.is_inference() else buffer._version
    source, known, copy = copies.get(name, (None, -1, buffer))
    if source is not buffer or known != version or version < 0 or copy.device != value.device:
        copy = buffer.to(value.device)
        copies[name] = (buffer, version, copy)
    return copy


class Operation(NamedTuple):
    """One step of the arithmetic that a transform does on each value, rounded to the dtype that comes out.

    Attributes:
        name: ``"add"``, ``"subtract"``, ``"multiply"``, ``"divide"``; or ``"float"``, ``"double"``, which convert.
        operand: broadcasts with the values, in their dtype; None for conversions.
    """

    name: str
    operand: torch.Tensor | None = None


def affine(
    loc: torch.Tensor | None, scale: torch.Tensor | None, standardizes: bool, dtype: torch.dtype
) -> Sequence[Operation] | None:
    """Return the operations of ``value * scale + loc``, or of ``(value - loc) / scale``; None for other dtypes."""
    if loc is None or scale is None or not loc.dtype == scale.dtype == dtype:
        return None
    if standardizes:
        return Operation("subtract", loc), Operation("divide", scale)
    return Operation("multiply", scale), Operation("add", loc)


class EntryTransform(Transform):
    """Maps each of `in_keys` by `_apply_transform`, and its spec, wherever it is declared, by `_leaf`.

    With `maps_inputs` the specs of actions and states in `in_keys_inv` are mapped as well, to the user's side.
    """

    on_rows = True
    on_host = True
    call_on_reset = True
    maps_inputs: ClassVar[bool] = False

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return what `_apply_transform` does to values of a dtype; None if that's anything but `Operation`s."""
        return None

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of what `_apply_transform` makes of values of `spec`; by default it maps bounds to bounds."""
        return mapped(spec, self._apply_transform, monotone=True)

    def _spec(self, role: str, spec: Any) -> Any:
        outputs, inputs = role in ("observation", "reward"), role in ("action", "state") and self.maps_inputs
        if not (outputs or inputs):
            return spec
        if not isinstance(spec, SpecMapping):  # a leaf is taken for that of one of the keys
            return self._leaf(spec)
        return map_leaves(spec, self.pairs() if outputs else self.pairs_inv(), self._leaf)
