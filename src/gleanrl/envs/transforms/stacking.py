"""`Stack`: entries, or groups, side by side in a new dimension."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.data.specs import Bounded, Composite, TensorSpec, Unbounded
from gleanrl.data.specs.base import stack
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.keys import Keys, missing_key
from gleanrl.envs.transforms.rows import Record
from gleanrl.errors import InvalidArgumentError, MissingKeyError
from gleanrl.tree import NestedKey


class Stack(Transform):
    """Stacks entries of one shape, or groups of agents with the same entries, into one.

    What goes in is taken apart: the entry that the user writes into those that the environment reads.

    Args:
        in_keys: what is stacked.
        out_key: where the result stands.
        in_key_inv: what the user writes of what goes in; None for nothing.
        out_keys_inv: what the environment reads: the pieces of it.
        dim: the new dimension, of values, or of the batch dimensions of groups.
        allow_positive_dim: whether it may be positive; it counts from the environment's batch dimensions on then.
        del_keys: whether the entries themselves are taken away.
    """

    call_on_reset = True

    def __init__(
        self,
        in_keys: Keys,
        out_key: NestedKey,
        in_key_inv: NestedKey | None = None,
        out_keys_inv: Keys | None = None,
        dim: int = -1,
        allow_positive_dim: bool = False,
        *,
        del_keys: bool = True,
    ) -> None:
        # By this library's order of sides: those of `in_keys_inv` are the environment's.
        super().__init__(in_keys, [out_key], out_keys_inv, [] if in_key_inv is None else [in_key_inv])
        if dim >= 0 and not allow_positive_dim:
            raise InvalidArgumentError(
                f"dim: expected a negative dimension, got {dim}; or allow_positive_dim=True"
            )
        self.dim, self.del_keys = dim, del_keys

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return each of `in_keys` with the out key."""
        return [(key, self.out_keys[0]) for key in self.in_keys]

    def pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return each of the environment's keys with the user's."""
        return [(key, self.out_keys_inv[0]) for key in self.in_keys_inv] if self.out_keys_inv else []

    def written_keys(self) -> list[NestedKey]:
        """Return the out key."""
        return self.out_keys

    def _place(self, value: Any) -> int:
        """Return the new dimension, among those of the result."""
        lead = 0 if self.parent is None else len(self.parent.batch_size)
        if self.dim >= 0:
            return self.dim + lead
        return value.ndim + 1 + self.dim if isinstance(value, TensorDictBase) else self.dim

    def _call(self, tensordict: Record) -> Record:
        values = [tensordict.get(key, None) for key in self.in_keys]
        missing = [key for key, value in zip(self.in_keys, values, strict=True) if value is None]
        if missing:
            if self.missing_tolerance and len(missing) == len(values):
                return tensordict
            raise MissingKeyError(f"Stack: keys {missing} not found")
        if not values:
            return tensordict
        for key in self.in_keys if self.del_keys else ():
            tensordict.pop(key, None)
        return tensordict.set(self.out_keys[0], torch.stack(values, self._place(values[0])))

    def _inv_call(self, tensordict: Record) -> Record:
        if not self.out_keys_inv:
            return tensordict
        whole = tensordict.get(self.out_keys_inv[0], None)
        if whole is None:
            if self.missing_tolerance:
                return tensordict
            raise missing_key(self, self.out_keys_inv[0], tensordict)
        dim = self._place(whole)
        if isinstance(whole, TensorDictBase) and self.dim < 0:
            dim -= 1  # it has the dimension already
        for key, piece in zip(self.in_keys_inv, whole.unbind(dim), strict=True):
            tensordict.set(key, piece)
        if self.del_keys:
            tensordict.pop(self.out_keys_inv[0], None)
        return tensordict

    def _spec(self, role: str, spec: Any) -> Any:
        keys, target = (
            (self.in_keys_inv, self.out_keys_inv)
            if role in ("action", "state")
            else (self.in_keys, self.out_keys)
        )
        if not isinstance(spec, SpecMapping) or not keys or any(key not in spec.keys(True) for key in keys):
            return spec
        out, parts = spec.clone(), [spec[key] for key in keys]
        for key in keys if self.del_keys else ():
            del out[key]
        out[target[0]] = self._stacked(parts)
        return out

    def _stacked(self, parts: list[TensorSpec]) -> TensorSpec:
        lead = 0 if self.parent is None else len(self.parent.batch_size)
        if isinstance(parts[0], Composite):
            return stack(parts, self.dim + lead if self.dim >= 0 else len(parts[0].shape) + 1 + self.dim)
        dim = self.dim + lead if self.dim >= 0 else self.dim
        zero = torch.stack([part.zero() for part in parts], dim)
        if all(isinstance(part, Bounded) for part in parts):
            low, high = (
                torch.stack([getattr(part, name) for part in parts], dim) for name in ("low", "high")
            )
            return Bounded(low, high, zero.shape, parts[0].device, zero.dtype)
        if all(isinstance(part, Unbounded) for part in parts):
            return Unbounded(zero.shape, device=parts[0].device, dtype=zero.dtype)
        return stack(parts, dim if dim >= 0 else len(parts[0].shape) + 1 + dim)
