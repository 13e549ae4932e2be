"""Transforms of dtypes and devices: `DTypeCastTransform`, `DoubleToFloat`, `DeviceCastTransform`, `PinMemoryTransform`.

`FiniteTensorDictCheck` checks for NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gleanrl._arrays.devices import as_device, pinned
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl.data.specs import Bounded, Composite, TensorSpec
from gleanrl.envs.transforms.base import Keys, Transform
from gleanrl.envs.transforms.entrywise import CONVERSIONS, EntryTransform, Operation
from gleanrl.envs.transforms.row_view import Record, leaf_keys
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import InvalidTypeError, NonFiniteError, UnsupportedError


class DTypeCastTransform(EntryTransform):
    """Casts outputs of the environment to `dtype_out`, and inputs back to `dtype_in`.

    Without keys it casts all entries of the dtype in question. In an environment these are the declared ones. In a
    buffer a sample casts `dtype_in` to `dtype_out`, and a write casts `dtype_out` to `dtype_in`. Entries at given keys
    are cast from any dtype.

    Args:
        dtype_in: dtype on the environment's side.
        dtype_out: dtype on the user's side.
        in_keys: outputs to cast; None for all observations and rewards of `dtype_in`.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs to cast; None for all actions and states of `dtype_in`, or none if `in_keys` are given.
        out_keys_inv: keys that the user writes; None for `in_keys_inv`.

    Examples:
        >>> from tensordict import TensorDict
        >>> cast = DTypeCastTransform(torch.float64, torch.float32, in_keys=["a"])
        >>> out = cast(TensorDict({"a": torch.zeros((), dtype=torch.float64)}, []))
        >>> out["a"].dtype
        torch.float32
    """

    on_rows = True
    by_keys = True  # in an environment
    maps_inputs = True

    def __init__(
        self,
        dtype_in: torch.dtype,
        dtype_out: torch.dtype,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        for name, dtype in (("dtype_in", dtype_in), ("dtype_out", dtype_out)):
            if not isinstance(dtype, torch.dtype):
                raise InvalidTypeError(f"{name}: expected a torch.dtype, got {dtype!r}")
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dtype_in, self.dtype_out = dtype_in, dtype_out

    def _default_in_keys(self) -> list[NestedKey]:
        return self._declared("full_observation_spec", "full_reward_spec")

    def _default_in_keys_inv(self) -> list[NestedKey]:
        # With explicit in_keys, inputs are cast only if in_keys_inv name them.
        return self._declared("full_action_spec", "full_state_spec") if self._in_keys is None else []

    def _declared(self, *names: str) -> list[NestedKey]:
        parent = self.parent
        if parent is None:
            return []
        specs = [getattr(parent, name) for name in names]
        return [key for spec in specs for key in keys_of(spec) if spec[key].dtype is self.dtype_in]

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.to(self.dtype_out)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.to(self.dtype_in)

    def arithmetic(self, dtype: torch.dtype) -> Sequence[Operation] | None:
        """Return the conversion if it is between float32 and float64, else None."""
        known = dtype in CONVERSIONS and self.dtype_out in CONVERSIONS
        return (Operation(CONVERSIONS[self.dtype_out]),) if known else None

    def _everything(self) -> bool:
        return self._in_keys is None and self.parent is None

    def _call(self, tensordict: Record) -> Record:
        if not self._everything():
            return super()._call(tensordict)
        return _cast_all(tensordict, self.dtype_in, self.dtype_out)

    def _inv_call(self, tensordict: Record) -> Record:
        if not (self._everything() and self._in_keys_inv is None):
            return super()._inv_call(tensordict)
        return _cast_all(tensordict, self.dtype_out, self.dtype_in)

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        if isinstance(spec, Bounded) and _holds_less(self.dtype_out, spec.dtype):
            limits = torch.iinfo(self.dtype_out)
            low, high = (bound.clamp(limits.min, limits.max) for bound in spec.bounds)
            return Bounded(low, high, spec.shape, spec.device, self.dtype_out)
        return spec.to(self.dtype_out)

    def extra_repr(self) -> str:
        """Show the dtypes."""
        return f"{self.dtype_in} -> {self.dtype_out}"


class DoubleToFloat(DTypeCastTransform):
    """Casts float64 outputs to float32, and float32 inputs to float64; arguments as for `DTypeCastTransform`."""

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        super().__init__(torch.float64, torch.float32, in_keys, out_keys, in_keys_inv, out_keys_inv)


class DeviceCastTransform(EntryTransform):
    """Moves outputs to a device, and inputs back. It moves all entries, unless keys are given.

    Args:
        device: the device on the user's side.
        orig_device: the device on the side of the environment or storage. None for the environment's device; in a
            buffer, None leaves written data on its device.
        in_keys: outputs to move. If they or `in_keys_inv` are given, other entries stay on their device. TensorDicts
            then declare no device, unless both sides have the same device.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs to move back.
        out_keys_inv: keys that the user writes; None for `in_keys_inv`.
    """

    on_rows = False
    on_host = False
    maps_inputs = True

    def __init__(
        self,
        device: Any,
        orig_device: Any = None,
        *,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.everything = in_keys is None and in_keys_inv is None
        self.device = as_device(device)
        self._orig_device = as_device(orig_device)

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.to(self.device)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.to(self.orig_device or "cpu")

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        return spec if self.device is None else spec.to(self.device)

    @property
    def orig_device(self) -> torch.device | None:
        """The device on the environment's side; None if it isn't known, or the environment declares none."""
        if self._orig_device is None and self.parent is not None:
            return as_device(self.parent.device)
        return self._orig_device

    def _call(self, tensordict: Record) -> Record:
        if self.everything:
            return tensordict.to(self.device)
        return super()._call(tensordict.clear_device_() if tensordict.device != self.device else tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return (
            self._call(tensordict_reset) if self.everything else super()._reset(tensordict, tensordict_reset)
        )

    def _inv_call(self, tensordict: Record) -> Record:
        if self.parent is None and self._orig_device is None:
            return tensordict
        if not self.everything:
            return super()._inv_call(tensordict)
        device = self.orig_device
        # An environment that declares no device gets tensors on the CPU.
        return tensordict.to(device or "cpu") if device or self.device != torch.device("cpu") else tensordict

    def _transformed(self, specs: Composite, *roles: str) -> Composite:
        if not self.everything:
            return super()._transformed(specs, *roles)
        return specs.to(self.device) if self.device is not None else specs

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        """Return the device on the user's side; None if the sides differ and only some entries are moved."""
        return self.device if self.everything or device == self.device else None

    def extra_repr(self) -> str:
        """Show the devices."""
        return f"device={self.device}, orig_device={self._orig_device}"


class PinMemoryTransform(Transform):
    """Copies the results of steps and resets, or sampled batches, into pinned memory. Copies to a GPU are then faster.

    Raises:
        UnsupportedError: at the first use, if CUDA isn't available.
    """

    def _call(self, tensordict: Record) -> Record:
        if not torch.cuda.is_available():
            raise UnsupportedError(
                "PinMemoryTransform: pinned memory needs CUDA, which isn't available; remove the transform"
            )
        out: Record = pinned(tensordict)
        return out

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)


def _holds_less(after: torch.dtype, before: torch.dtype) -> bool:
    """Return whether both dtypes are integers, and `after` has fewer bits than `before`."""
    if any(dtype.is_floating_point or dtype is torch.bool for dtype in (after, before)):
        return False
    return torch.iinfo(after).bits < torch.iinfo(before).bits


def _cast_all(record: Record, before: torch.dtype, after: torch.dtype) -> Record:
    for key in leaf_keys(record):
        value = record.get(key)
        if getattr(value, "dtype", None) is before:
            record.set(key, value.to(after))
    return record


class FiniteTensorDictCheck(Transform):
    """Raises if an output of an environment, or of a buffer, is NaN or infinite.

    By default a collector checks each batch as a whole, which costs less.

    Raises:
        NonFiniteError: if there is one; the message names the keys (also a ValueError).
    """

    on_rows = True
    on_host = True

    def _call(self, tensordict: Record) -> Record:
        bad = [key for key in leaf_keys(tensordict) if _is_bad(tensordict.get(key))]
        if bad:
            raise NonFiniteError(
                f"FiniteTensorDictCheck: expected finite values, got NaN or infinity at {bad}"
            )
        return tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._call(tensordict_reset)


def check_finite(value: torch.Tensor) -> None:
    """Raise if a value is NaN or infinite.

    Raises:
        NonFiniteError: if there is one (also a ValueError).
    """
    if _is_bad(value):
        raise NonFiniteError("check_finite: expected finite values, got NaN or infinity")


def _is_bad(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    return not bool(value.isfinite().all())
