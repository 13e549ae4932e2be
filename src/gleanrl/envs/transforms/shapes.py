"""Transforms of shapes: flatten, squeeze, unsqueeze, permute, concatenate.

`BatchSizeTransform`: an environment, or a buffer's batches, with another batch size.

`Stack`: entries, or groups, side by side in a new dimension.
"""

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
from gleanrl.envs.env_specs import OF_ANY_SIZE
from gleanrl.envs.transforms.base import Keys, Transform, missing_key
from gleanrl.envs.transforms.entrywise import EntryTransform
from gleanrl.envs.transforms.row_view import Record
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, MissingKeyError


class BatchSizeTransform(Transform):
    """Gives what comes out another batch size, and takes what goes in back to the environment's.

    Args:
        batch_size: the batch size, of an environment that steps as many at once as it is given
            (``batch_locked=False``), or of one whose entries have these dimensions though its batch size hasn't.
        reshape_fn: instead: a function of a TensorDict that changes its batch dimensions (`flatten`, `reshape`,
            `squeeze`, …) and leaves the order of records as it is.
        reset_func: called as ``reset_func(tensordict, tensordict_reset)`` at a reset; what it returns takes the place
            of what the environment's reset returned.
        env_kwarg: whether `reset_func` gets the environment, with this transform, as ``env=``, too.

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


OF_ANY_SIZE.append(lambda env, size: TransformedEnv(env, BatchSizeTransform(batch_size=size)))


PIXELS: tuple[NestedKey, ...] = ("pixels",)


class _Reshaping(EntryTransform):
    """Maps entries by a change of shape that leaves the numbers as they are; in both directions if asked for."""

    maps_inputs = True


class FlattenObservation(_Reshaping):
    """Flattens some adjacent dimensions.

    Args:
        first_dim: the first of them.
        last_dim: the last of them, included.
        in_keys: what to flatten; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.
        allow_positive_dim: whether positive dimensions are allowed; they count from the environment's batch
            dimensions on, which a buffer's batch doesn't know of.
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
    """Adds a dimension of size 1.

    Args:
        dim: where, as in `torch.unsqueeze`.
        allow_positive_dim: whether it may be positive; it counts from the environment's batch dimensions on then.
        in_keys: what to change of what comes out; None for nothing.
        out_keys: where the results stand; None for in place.
        in_keys_inv: what the environment reads: there the dimension is taken away.
        out_keys_inv: what the user writes; None for the same keys.
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

    def _place(self) -> int:
        return self.dim + _lead(self) if self.dim >= 0 else self.dim

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.unsqueeze(self._place())

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.squeeze(self._place())


class SqueezeTransform(UnsqueezeTransform):
    """Takes a dimension of size 1 away; the arguments are those of `UnsqueezeTransform`.

    With in_keys_inv the dimension is added on the way in. A dimension of another size stays.
    """

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value.squeeze(self._place())

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value.unsqueeze(self._place())


class PermuteTransform(_Reshaping):
    """Permutes the last dimensions.

    Args:
        dims: the last dimensions, negative, in their new order: ``[-1, -3, -2]`` puts channels first.
        in_keys: what to permute of what comes out; None for ``["pixels"]``.
        out_keys: where the results stand; None for in place.
        in_keys_inv: what the environment reads: there the permutation is undone.
        out_keys_inv: what the user writes; None for the same keys.
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
        in_keys: what to concatenate; None for all observations.
        out_key: where the result stands.
        dim: along which dimension, negative.
        dim_positive: whether a positive `dim` is allowed; it counts from the environment's batch dimensions on.
        del_keys: whether the entries themselves are taken away.
        unsqueeze_if_oor: whether entries that lack dimension `dim` get it, with size 1.
        sort: whether the entries are taken in alphabetical order of their keys; if not, in that of `in_keys`.
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
            raise MissingArgumentError("CatTensors: in_keys are needed outside an environment")
        return keys_of(self.parent.full_observation_spec)

    def _find_pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return each of `in_keys` with the one out key, in the order in which they are concatenated."""
        keys = sorted(self.in_keys, key=str) if self.sort else self.in_keys
        return [(key, self.out_keys[0]) for key in keys]

    def written_keys(self) -> list[NestedKey]:
        """Return the out key."""
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
        """Concatenate the specs."""
        keys = [key for key, _ in self.pairs()]
        missing = [key for key in keys if key not in observation_spec.keys(True, True)]
        if missing:
            raise MissingKeyError(
                f"CatTensors: {missing} are none of the observations {keys_of(observation_spec)}"
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
            f"{name}: expected a negative dimension, got {dim}: batch dimensions may come before; pass "
            "allow_positive_dim=True (dim_positive=True) if it's meant"
        )


def _lead(transform: Transform) -> int:
    """Return the number of the environment's batch dimensions."""
    parent = transform.parent
    return 0 if parent is None else len(parent.batch_size)


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
