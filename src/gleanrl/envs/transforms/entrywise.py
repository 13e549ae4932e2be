"""`EntryTransform`: maps entries one by one, and their specs accordingly.

`Operation` describes arithmetic on the values of an entry that the native core can do in place of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from gleanrl.data.specs import TensorSpec
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.spec_tools import map_leaves, mapped, rename_leaves

CONVERSIONS = {torch.float32: "float32", torch.float64: "float64"}
"""The names of operations that convert, by the dtype of the result."""


Tensors = Mapping[str, torch.Tensor | None]
"""The buffers of a transform, by name."""


class Operation(NamedTuple):
    """One arithmetic operation on a value, with a result rounded to its dtype.

    Attributes:
        name: ``"add"``, ``"subtract"``, ``"multiply"``, ``"divide"``, or one of `CONVERSIONS`.
        tensors: holds the second operand, which is looked up at every row; None for conversions.
        key: name of the operand in `tensors`. It has the dtype of the values, and broadcasts with them.
    """

    name: str
    tensors: Tensors | None = None
    key: str | None = None

    @property
    def numbers(self) -> torch.Tensor | None:
        """The current operand; None for conversions."""
        return None if self.tensors is None or self.key is None else self.tensors[self.key]


def affine(tensors: Tensors, standardizes: bool, dtype: torch.dtype) -> Sequence[Operation] | None:
    """Return the operations of `scaled` on values of `dtype`, with the operands ``"loc"`` and ``"scale"``.

    Returns:
        None if the operands have another dtype, or aren't known yet.
    """
    loc, scale = tensors["loc"], tensors["scale"]
    if loc is None or scale is None or not loc.dtype == scale.dtype == dtype:
        return None
    if standardizes:
        return Operation("subtract", tensors, "loc"), Operation("divide", tensors, "scale")
    return Operation("multiply", tensors, "scale"), Operation("add", tensors, "loc")


def scaled(value: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor, standardizes: bool) -> torch.Tensor:
    """Return ``(value - loc) / scale`` if `standardizes`, else ``value * scale + loc``."""
    # No addcmul: torch fuses product and sum or doesn't, depending on the number of values. The rounding would differ.
    return (value - loc) / scale if standardizes else value * scale + loc


def buffer_on_device(transform: Transform, name: str, value: torch.Tensor) -> torch.Tensor | None:
    """Return a transform's buffer on the device of `value`: the buffer itself, or a copy that is cached.

    None if the buffer has no value.

    The cache follows the buffer by identity and by torch's version counter. Inference tensors have no counter, so they
    are copied at every call.
    """
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


class EntryTransform(Transform):
    """Maps each of `in_keys` by `_apply_transform`, and its spec by `_leaf`.

    With `maps_inputs`, `_leaf` also maps the specs of actions and states in `in_keys_inv` to the user's side.
    """

    on_rows = True
    on_host = True
    call_on_reset = True
    maps_inputs: ClassVar[bool] = False

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return the operations that equal `_apply_transform` bit for bit on values of `dtype`; None if there are none.

        Rollouts call this once a batch, and read the operands at every row. A subclass that overrides
        `_apply_transform` or this method must override both.
        """
        return None

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the results of `_apply_transform` on values of `spec`.

        The default assumes that `_apply_transform` maps bounds to bounds.
        """
        return mapped(spec, self._apply_transform, monotone=True)

    def _spec(self, role: str, spec: Any) -> Any:
        outputs, inputs = role in ("observation", "reward"), role in ("action", "state") and self.maps_inputs
        if not (outputs or inputs):
            return super()._spec(role, spec) if role in ("action", "state") else spec
        if not isinstance(spec, SpecMapping):  # the spec of a single entry: map it whatever its key
            return self._leaf(spec)
        if outputs:
            return map_leaves(spec, self.pairs(), self._leaf)
        return rename_leaves(spec, self.pairs_inv(), self._leaf)
