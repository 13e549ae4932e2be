"""Transforms of shapes: flatten, squeeze, unsqueeze, permute, concatenate, stack, and change the batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gleanrl._arrays.tensordicts import NestedKey
from gleanrl._util import integer
from gleanrl.data.specs import Bounded, Composite, TensorSpec, Unbounded
from gleanrl.data.specs.base import stack
from gleanrl.data.specs.mapping import SpecMapping
from gleanrl.envs.env_specs import RESIZED
from gleanrl.envs.transforms.base import Keys, Transform, missing_key
from gleanrl.envs.transforms.entrywise import EntryTransform
from gleanrl.envs.transforms.row_view import Record
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, MissingKeyError


class BatchSizeTransform(Transform):
    """Gives outputs another batch size, and gives inputs the environment's batch size again.

    Args:
        batch_size: the new batch size. The environment must accept any batch size (``batch_locked=False``), or its
            entries must have these dimensions although its batch size doesn't.
        reshape_fn: alternatively, a function that changes the batch dimensions of a TensorDict (`flatten`, `reshape`,
            `squeeze`, …) and keeps the order of records.
        reset_func: called as ``reset_func(tensordict, tensordict_reset)`` at a reset; its result replaces
            `tensordict_reset`, the result of the environment's reset.
        env_kwarg: whether `reset_func` also gets the whole `TransformedEnv` as ``env=``.

    Raises:
        InvalidArgumentError: unless exactly one of `batch_size` and `reshape_fn` is given.
    """

    def __init__(
        self,
        *,
        batch_size: Sequence[int] | None = None,
        reshape_fn: Callable[[Any], Any] | None = None,
        reset_func: Callable[..., Any] | None = None,
        env_kwarg: bool = False,
    ) -> None:
        if (batch_size is None) == (reshape_fn is None):
            raise InvalidArgumentError("BatchSizeTransform: give batch_size or reshape_fn, and not both")
        super().__init__()
        self.batch_size = None if batch_size is None else torch.Size(batch_size)
        self.reshape_fn, self.reset_func, self.env_kwarg = reshape_fn, reset_func, env_kwarg

    def _call(self, tensordict: Record) -> Record:
        if self.reshape_fn is not None:
            return self.reshape_fn(tensordict)
        tensordict.batch_size = self.batch_size
        return tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        if self.reset_func is not None:
            also = {"env": self.container} if self.env_kwarg else {}
            tensordict_reset = self.reset_func(tensordict, tensordict_reset, **also)
        return self._call(tensordict_reset)

    def _inv_call(self, tensordict: Record) -> Record:
        parent = self.parent
        if parent is None:
            return tensordict
        if self.reshape_fn is not None:
            return tensordict.reshape(parent.batch_size)
        if parent.batch_locked:
            tensordict.batch_size = parent.batch_size
        return tensordict

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return the batch size on the user's side."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.reshape_fn is not None
        return self.reshape_fn(TensorDict({}, batch_size)).batch_size

    def _transformed(self, specs: Composite, *roles: str) -> Composite:
        before, after = specs.shape, self.transform_env_batch_size(specs.shape)
        out = Composite({}, shape=after, device=specs.device)
        for name in specs.keys():
            part = Composite({}, shape=after, device=specs.device)
            for key in specs[name].keys(True, True):
                leaf = specs[name][key]
                rest = leaf.shape[len(before) :]
                if leaf.shape[: len(after)] != after or self.reshape_fn is not None:
                    same = before.numel() == after.numel() and self.reshape_fn is not None
                    leaf = leaf.reshape((*after, *rest)) if same else leaf.expand((*after, *rest))
                part[key] = leaf
            out[name] = part
        return out


RESIZED.append(lambda env, size: TransformedEnv(env, BatchSizeTransform(batch_size=size)))


PIXELS: tuple[NestedKey, ...] = ("pixels",)


class _Reshaping(EntryTransform):
    """Base class: maps outputs, and inputs if there are keys, by a change of shape that keeps the values."""

    maps_inputs = True


class FlattenObservation(_Reshaping):
    """Flattens adjacent dimensions of observations.

    Args:
        first_dim: first dimension to flatten.
        last_dim: last dimension to flatten, included.
        in_keys: entries to flatten; None for ``["pixels"]``.
        out_keys: keys of the results; None for in place.
        allow_positive_dim: whether positive dimensions are allowed. They count from the end of the environment's batch
            dimensions. In a buffer they count from the first dimension, because the environment isn't known.

    Raises:
        InvalidArgumentError: for a dimension of 0 or more without `allow_positive_dim`.
    """

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        allow_positive_dim: bool = False,
    ) -> None:
        super().__init__(list(PIXELS) if in_keys is None else in_keys, out_keys)
        for name, dim in (("first_dim", first_dim), ("last_dim", last_dim)):
            _require_dim(name, dim, allow_positive_dim)
        self.first_dim, self.last_dim = first_dim, last_dim

    def _apply_transform(self, value: Tensor) -> Tensor:
        lead = _lead(self)
        first = self.first_dim + lead if self.first_dim >= 0 else self.first_dim
        last = self.last_dim + lead if self.last_dim >= 0 else self.last_dim
        return value.flatten(first, last)


class UnsqueezeTransform(_Reshaping):
    """Adds a dimension of size 1 to outputs, and removes it from inputs.

    Args:
        dim: position of the new dimension, as in `torch.unsqueeze`.
        allow_positive_dim: whether `dim` may be positive; it then counts from the end of the environment's batch
            dimensions.
        in_keys: outputs to change; None for none.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs that the environment reads, without the dimension; None for none.
        out_keys_inv: keys that the user writes, with the dimension; None for `in_keys_inv`.

    Raises:
        InvalidArgumentError: for a `dim` of 0 or more without `allow_positive_dim`.
    """

    def __init__(
        self,
        dim: int,
        allow_positive_dim: bool = False,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        _require_dim("dim", dim, allow_positive_dim)
        self.dim = dim

    def _actual_dim(self) -> int:
        return self.dim + _lead(self) if self.dim >= 0 else self.dim

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.unsqueeze(self._actual_dim())

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.squeeze(self._actual_dim())


class SqueezeTransform(UnsqueezeTransform):
    """Removes a dimension of size 1 from outputs, and adds it to inputs; arguments as for `UnsqueezeTransform`.

    A dimension of another size stays.
    """

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.squeeze(self._actual_dim())

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.unsqueeze(self._actual_dim())


class PermuteTransform(_Reshaping):
    """Permutes the last dimensions of outputs, and undoes that in inputs.

    Args:
        dims: the last dimensions, negative, in their new order: ``[-1, -3, -2]`` puts channels first.
        in_keys: outputs to permute; None for ``["pixels"]``, or for none if `in_keys_inv` are given.
        out_keys: keys of the results; None for in place.
        in_keys_inv: inputs that the environment reads, in the old order; None for none.
        out_keys_inv: keys that the user writes, in the new order; None for `in_keys_inv`.

    Raises:
        InvalidArgumentError: if `dims` aren't the last dimensions, each of them once.
    """

    def __init__(
        self,
        dims: Sequence[int],
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        in_keys_inv: Keys | None = None,
        out_keys_inv: Keys | None = None,
    ) -> None:
        if sorted(dims) != list(range(-len(dims), 0)):
            raise InvalidArgumentError(
                f"dims: expected each of {list(range(-len(dims), 0))} once, got {list(dims)}"
            )
        if in_keys is None and in_keys_inv is None:
            in_keys = list(PIXELS)
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dims = list(dims)
        self._undone = [self.dims.index(d) - len(dims) for d in range(-len(dims), 0)]

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.permute((*range(value.ndim - len(self.dims)), *self.dims))

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.permute((*range(value.ndim - len(self.dims)), *self._undone))


class CatTensors(Transform):
    """Concatenates entries into one.

    Args:
        in_keys: entries to concatenate; None for all observations.
        out_key: key of the result.
        dim: dimension to concatenate along, negative.
        dim_positive: whether `dim` may be positive; it then counts from the end of the environment's batch dimensions.
        del_keys: whether the original entries are removed.
        unsqueeze_if_oor: whether entries that lack dimension `dim` get it, with size 1.
        sort: whether entries are concatenated in alphabetical order of their keys; otherwise in the order of `in_keys`.

    Raises:
        InvalidArgumentError: for a `dim` of 0 or more without `dim_positive`.
        MissingKeyError: at use, if an entry is absent.
        MissingArgumentError: at use outside an environment, if `in_keys` is None.
    """

    on_rows = True
    on_host = True
    call_on_reset = True

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_key: NestedKey = "observation_vector",
        dim: int = -1,
        *,
        dim_positive: bool = False,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ) -> None:
        super().__init__(in_keys, [out_key])
        _require_dim("dim", dim, dim_positive)
        self.dim, self.del_keys, self.unsqueeze_if_oor, self.sort = dim, del_keys, unsqueeze_if_oor, sort

    def _default_in_keys(self) -> list[NestedKey]:
        if self.parent is None:
            raise MissingArgumentError("CatTensors: in_keys: expected keys outside an environment, got None")
        return keys_of(self.parent.full_observation_spec)

    def _find_pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return each of `in_keys` with the out key, in the order of concatenation."""
        keys = sorted(self.in_keys, key=str) if self.sort else self.in_keys
        return [(key, self.out_keys[0]) for key in keys]

    def written_keys(self) -> list[NestedKey]:
        """Return the key of the result."""
        return self.out_keys

    def _call(self, tensordict: Record) -> Record:
        values = [tensordict.get(key, None) for key, _ in self.pairs()]
        if any(value is None for value in values):
            missing = [key for (key, _), value in zip(self.pairs(), values, strict=True) if value is None]
            if self.missing_tolerance and len(missing) == len(values):
                return tensordict
            raise MissingKeyError(f"CatTensors: keys {missing} not found")
        if self.del_keys:
            for key, _ in self.pairs():
                if key != self.out_keys[0]:
                    tensordict.pop(key, None)
        return tensordict.set(self.out_keys[0], self._concatenated(values))

    def _concatenated(self, values: Sequence[Tensor]) -> Tensor:
        dim = self.dim + _lead(self) if self.dim >= 0 else self.dim
        if self.unsqueeze_if_oor:
            least = max(_lead(self) + 1, -dim if dim < 0 else dim + 1)
            values = [v.unsqueeze(dim if v.ndim >= -dim - 1 else -1) if v.ndim < least else v for v in values]
        return torch.cat(list(values), dim)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Replace the specs of the entries by that of the result; it is bounded if all of them are.

        Raises:
            MissingKeyError: if an entry is no observation.
            InvalidArgumentError: if dtypes differ.
        """
        keys = [key for key, _ in self.pairs()]
        missing = [key for key in keys if key not in observation_spec.keys(True, True)]
        if missing:
            raise MissingKeyError(
                f"CatTensors: in_keys: expected observations among {keys_of(observation_spec)}, got {missing}"
            )
        leaves = [observation_spec[key] for key in keys]
        if len({leaf.dtype for leaf in leaves}) > 1:
            kinds = {key: leaf.dtype for key, leaf in zip(keys, leaves, strict=True)}
            raise InvalidArgumentError(f"CatTensors: expected one dtype, got {kinds}; cast them first")
        out = observation_spec.clone()
        for key in keys:
            if self.del_keys and key != self.out_keys[0]:
                del out[key]
        zero = self._concatenated([leaf.zero() for leaf in leaves])
        made: TensorSpec = Unbounded(zero.shape, device=leaves[0].device, dtype=zero.dtype)
        if all(isinstance(leaf, Bounded) for leaf in leaves):
            low, high = (
                self._concatenated([getattr(leaf, name) for leaf in leaves]) for name in ("low", "high")
            )
            made = Bounded(low, high, zero.shape, leaves[0].device, zero.dtype)
        out[self.out_keys[0]] = made
        return out

    def extra_repr(self) -> str:
        """Show the keys."""
        return f"in_keys={self._in_keys}, out_key={self.out_keys[0]!r}, dim={self.dim}"


def _require_dim(name: str, dim: int, allow_positive: bool) -> None:
    if integer(name, dim) >= 0 and not allow_positive:
        raise InvalidArgumentError(
            f"{name}: expected a negative dimension, got {dim}: batch dimensions come first; pass "
            "allow_positive_dim=True (CatTensors: dim_positive=True) if it's meant"
        )


def _lead(transform: Transform) -> int:
    """Return the number of the environment's batch dimensions; 0 outside an environment."""
    parent = transform.parent
    return 0 if parent is None else len(parent.batch_size)


class Stack(Transform):
    """Stacks entries of the same shape, or groups of agents with the same entries, along a new dimension.

    An input is unstacked: the entry that the user writes becomes the entries that the environment reads.

    Args:
        in_keys: outputs to stack.
        out_key: key of the result.
        in_key_inv: the input that the user writes; None for none.
        out_keys_inv: inputs that the environment reads, one for each piece.
        dim: the new dimension of values; for groups the new batch dimension.
        allow_positive_dim: whether `dim` may be positive; it then counts from the end of the environment's batch
            dimensions.
        del_keys: whether the original entries are removed.

    Raises:
        InvalidArgumentError: for a `dim` of 0 or more without `allow_positive_dim`.
        MissingKeyError: at use, if an entry is absent; at a reset, only if others are present.
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
        # In this class's arguments `out_keys_inv` are the environment's keys. In all of this library's transforms
        # `in_keys_inv` are, so the two change places here.
        super().__init__(in_keys, [out_key], out_keys_inv, [] if in_key_inv is None else [in_key_inv])
        if dim >= 0 and not allow_positive_dim:
            raise InvalidArgumentError(
                f"dim: expected a negative dimension, got {dim}; pass allow_positive_dim=True if it's meant"
            )
        self.dim, self.del_keys = dim, del_keys

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return each of `in_keys` with the out key."""
        return [(key, self.out_keys[0]) for key in self.in_keys]

    def pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return each of the environment's input keys with the user's key."""
        return [(key, self.out_keys_inv[0]) for key in self.in_keys_inv] if self.out_keys_inv else []

    def written_keys(self) -> list[NestedKey]:
        """Return the key of the result."""
        return self.out_keys

    def _actual_dim(self, value: Any) -> int:
        """Return the position of the new dimension in the result."""
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
        return tensordict.set(self.out_keys[0], torch.stack(values, self._actual_dim(values[0])))

    def _inv_call(self, tensordict: Record) -> Record:
        if not self.out_keys_inv:
            return tensordict
        stacked = tensordict.get(self.out_keys_inv[0], None)
        if stacked is None:
            if self.missing_tolerance:
                return tensordict
            raise missing_key(self, self.out_keys_inv[0], tensordict)
        dim = self._actual_dim(stacked)
        if isinstance(stacked, TensorDictBase) and self.dim < 0:
            dim -= 1  # `stacked` has the new dimension already
        for key, piece in zip(self.in_keys_inv, stacked.unbind(dim), strict=True):
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
