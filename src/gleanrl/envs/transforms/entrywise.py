"""`EntryTransform`: entries mapped one by one, and their specs with them.

Arithmetic on each value of an entry: what torch does of it, and the core in the same steps.
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
"""The operations that convert, by the dtype that they convert to."""


Tensors = Mapping[str, torch.Tensor | None]
"""The buffers of a transform."""


class Operation(NamedTuple):
    """One operation on a value, whose result is rounded to the dtype that comes out.

    Attributes:
        name: ``"add"``, ``"subtract"``, ``"multiply"``, ``"divide"``, or one of `CONVERSIONS`.
        tensors: where the numbers are looked up, at every row; None for conversions.
        key: their name there; the tensor has the dtype of the values, and broadcasts with them.
    """

    name: str
    tensors: Tensors | None = None
    key: str | None = None

    @property
    def numbers(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        return None if self.tensors is None or self.key is None else self.tensors[self.key]


def affine(tensors: Tensors, standardizes: bool, dtype: torch.dtype) -> Sequence[Operation] | None:
    """Return the operations of `scaled`, with ``"loc"`` and ``"scale"``, on values of a dtype.

    None where the numbers are of another one, or aren't known.
    """
    loc, scale = tensors["loc"], tensors["scale"]
    if loc is None or scale is None or not loc.dtype == scale.dtype == dtype:
        return None
    if standardizes:
        return Operation("subtract", tensors, "loc"), Operation("divide", tensors, "scale")
    return Operation("multiply", tensors, "scale"), Operation("add", tensors, "loc")


def scaled(value: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor, standardizes: bool) -> torch.Tensor:
    """Return ``(value - loc) / scale`` where it `standardizes`, else ``value * scale + loc``."""
    # No addcmul: torch fuses its product and sum or not by how many values there are.
    return (value - loc) / scale if standardizes else value * scale + loc


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


class EntryTransform(Transform):
    """Maps each of `in_keys` by `_apply_transform`, and its spec, wherever it is declared, by `_leaf`.

    With `maps_inputs` the specs of actions and states in `in_keys_inv` are mapped as well, to the user's side.
    """

    on_rows = True
    on_host = True
    call_on_reset = True
    maps_inputs: ClassVar[bool] = False

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return what `_apply_transform` does to values of a dtype, bit for bit; None if that isn't known.

        It is asked once a batch; numbers are read at every row. Who overrides one of the two overrides both.
        """
        return None

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of what `_apply_transform` makes of values of `spec`; by default it maps bounds to bounds."""
        return mapped(spec, self._apply_transform, monotone=True)

    def _spec(self, role: str, spec: Any) -> Any:
        outputs, inputs = role in ("observation", "reward"), role in ("action", "state") and self.maps_inputs
        if not (outputs or inputs):
            return super()._spec(role, spec) if role in ("action", "state") else spec
        if not isinstance(spec, SpecMapping):  # a leaf is taken for that of one of the keys
            return self._leaf(spec)
        if outputs:
            return map_leaves(spec, self.pairs(), self._leaf)
        return rename_leaves(spec, self.pairs_inv(), self._leaf)
