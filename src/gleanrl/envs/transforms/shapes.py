"""Transforms of shapes: flatten, squeeze, unsqueeze, permute, concatenate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gleanrl.arguments import integer
from gleanrl.data.specs import Bounded, Composite, TensorSpec, Unbounded
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.keys import Keys
from gleanrl.envs.transforms.mapping import EntryTransform
from gleanrl.envs.transforms.rows import Record
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import InvalidArgumentError, MissingArgumentError, MissingKeyError
from gleanrl.tree import NestedKey

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
