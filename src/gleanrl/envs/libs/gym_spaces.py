"""From gymnasium spaces to specs and codecs: the table, and those whose values are one leaf.

| space | spec |
| --- | --- |
| Box | Bounded; Unbounded for floats if no element has a finite bound; Binary for booleans |
| Discrete | OneHot int64, or Categorical with `categorical` |
| MultiDiscrete | MultiOneHot int64, or MultiCategorical with `categorical` |
| MultiDiscrete of several dimensions | Bounded integers |
| MultiBinary | Binary |
| Dict | one leaf for each entry, nested like the space |
| Tuple of spaces of one kind, shape and dtype | their specs, stacked along a new first dimension |
| Tuple of Discretes | as a MultiDiscrete |

Choices count from 0, whatever the space's start. Of observations also those whose values have no fixed shape:

| space | spec |
| --- | --- |
| Text | NonTensor: the string |
| Sequence | the element's with a first dimension of -1; NonTensor if elements have no fixed shape |
| Graph | ``"nodes"``, ``"edges"`` and ``"edge_links"``, each a sequence |
| any other Tuple | one leaf for each element, called ``"0"``, ``"1"``, ... |
| OneOf | NonTensor: the pair as it is |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from gleanrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from gleanrl.data.specs.spaces import LARGE
from gleanrl.envs.libs.gym_choices import CategoricalCodec, MultiOneHotCodec, OneHotCodec
from gleanrl.envs.libs.gym_codecs import Array, ArrayCodec, Codec, StackCodec
from gleanrl.envs.libs.gym_lists import TupleCodec
from gleanrl.errors import InvalidArgumentError, SpaceError
from gleanrl.tree import Path, as_key

_CONVERSIONS: dict[type[Any], Callable[..., TensorSpec]] = {}


def register_gym_spec_conversion(
    spec_type: type[Any],
) -> Callable[[Callable[..., TensorSpec]], Callable[..., TensorSpec]]:
    """Return a decorator for the function that gives the spec of spaces of a class.

    It is called as ``function(space, categorical_action_encoding=...)``, for the class and those that derive from it,
    before the conversions of this module. Values go into records as arrays of the spec, and actions come out as such.

    Args:
        spec_type: the class of the spaces.

    Examples:
        >>> class Angle(spaces.Box):
        ...     def __init__(self):
        ...         super().__init__(0, 1, (1,))
        >>> @register_gym_spec_conversion(Angle)
        ... def convert_angle(space, categorical_action_encoding=False):
        ...     return Bounded(0.0, 6.5, (1,))
        >>> make_codec(Angle(), ("angle",), False).spec
        BoundedContinuous(low=0.0, high=6.5, shape=(1,), dtype=float32)
    """

    def register(function: Callable[..., TensorSpec]) -> Callable[..., TensorSpec]:
        _CONVERSIONS[spec_type] = function
        return function

    return register


def make_codec(space: spaces.Space[Any], key: Path, categorical: bool) -> Codec:
    """Return the codec of a space whose values are one leaf; see `make_tree`."""
    try:
        for kind in type(space).__mro__:
            if kind in _CONVERSIONS:
                return ArrayCodec(key, _CONVERSIONS[kind](space, categorical_action_encoding=categorical))
        if isinstance(space, spaces.Box):
            return _box(space, key)
        if isinstance(space, spaces.Discrete):
            return _discrete(space, key, categorical)
        if isinstance(space, spaces.MultiDiscrete):
            return _multi_discrete(space, key, categorical)
        if isinstance(space, spaces.MultiBinary):
            return ArrayCodec(key, Binary(shape=space.shape, dtype=torch_dtype(space.dtype)))
        if isinstance(space, spaces.Tuple):
            return _tuple(space, key, categorical)
    except InvalidArgumentError as cause:
        raise SpaceError(f"{where(key)}: {space} has no spec: {cause}") from cause
    if type(space).__module__.split(".")[0] == "gym":
        raise SpaceError(
            f"{where(key)}: {space} is a space of gym, not of gymnasium; make the environment with gymnasium, or put "
            "it behind gymnasium's compatibility wrappers (package shimmy)"
        )
    raise SpaceError(
        f"{where(key)}: no spec for the space {space}; its values have no single fixed shape and dtype. "
        "Convert it with a gymnasium wrapper (gymnasium.wrappers.TransformObservation, TransformAction)"
    )


def _box(space: spaces.Box, key: Path) -> Codec:
    dtype = torch_dtype(space.dtype)
    if dtype == torch.bool:
        return ArrayCodec(key, Binary(shape=space.shape, dtype=dtype))
    return ArrayCodec(key, box_spec(space.low, space.high, dtype))


def box_spec(low: Array, high: Array, dtype: torch.dtype) -> TensorSpec:
    """Return the spec of elements from `low` to `high`: Unbounded for floats without any finite bound."""
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        if (low <= limits.min).all() and (high >= limits.max).all():
            return Unbounded(shape=low.shape, dtype=dtype)
    if (
        low.size > LARGE and (low == low.flat[0]).all() and (high == high.flat[0]).all()
    ):  # frames: two numbers
        return Bounded(low.flat[0], high.flat[0], shape=low.shape, dtype=dtype)
    return Bounded(low, high, shape=low.shape, dtype=dtype)


def _discrete(space: spaces.Discrete[Any], key: Path, categorical: bool) -> Codec:
    n, start = int(space.n), int(space.start)
    if categorical:
        spec: TensorSpec = Categorical(n, dtype=torch_dtype(space.dtype))
        return CategoricalCodec(key, spec, n, start, np.dtype(space.dtype))
    return OneHotCodec(key, OneHot(n, dtype=torch.int64), n, start, np.dtype(space.dtype))


def _multi_discrete(space: spaces.MultiDiscrete[Any], key: Path, categorical: bool) -> Codec:
    nvec, dtype = np.asarray(space.nvec), np.dtype(space.dtype)
    start = np.asarray(space.start).astype(dtype)
    shift = start if start.any() else None
    if nvec.ndim != 1:
        spec: TensorSpec = Bounded(np.zeros_like(nvec), nvec - 1, shape=nvec.shape, dtype=torch_dtype(dtype))
        return ArrayCodec(key, spec, shift)
    if categorical:
        return ArrayCodec(key, MultiCategorical(nvec.tolist(), dtype=torch_dtype(dtype)), shift)
    return MultiOneHotCodec(key, MultiOneHot(nvec.tolist(), dtype=torch.int64), nvec, start, dtype)


def _tuple(space: spaces.Tuple[Any], key: Path, categorical: bool) -> Codec:
    if not space.spaces:
        raise SpaceError(f"{where(key)}: {space} is empty; there is nothing to store")
    if any(isinstance(element, spaces.Dict) for element in space.spaces):
        raise _unlike(space, key)
    choices = [element for element in space.spaces if isinstance(element, spaces.Discrete)]
    if len(choices) == len(space.spaces) and len({int(choice.n) for choice in choices}) > 1:
        starts = [int(choice.start) for choice in choices]
        vector = spaces.MultiDiscrete([int(choice.n) for choice in choices], dtype=np.int64, start=starts)
        return TupleCodec(key, _multi_discrete(vector, key, categorical), len(choices))
    parts = [make_codec(element, key, categorical) for element in space.spaces]
    return StackCodec(key, _stacked(space, [part.spec for part in parts], key), parts)


def _stacked(space: spaces.Tuple[Any], specs: list[TensorSpec], key: Path) -> TensorSpec:
    first, shape = specs[0], (len(specs), *specs[0].shape)
    if all(spec == first for spec in specs):
        return first.expand(shape)
    boxes = [spec for spec in specs if isinstance(spec, (Bounded, Unbounded))]
    if len(boxes) < len(specs) or any((b.shape, b.dtype) != (first.shape, first.dtype) for b in boxes):
        raise _unlike(space, key)
    low = torch.stack([box.space.low for box in boxes])
    high = torch.stack([box.space.high for box in boxes])
    return Bounded(low, high, shape=shape, dtype=first.dtype)


def _unlike(space: spaces.Tuple[Any], key: Path) -> SpaceError:
    return SpaceError(
        f"{where(key)}: the elements of {space} differ in kind, shape or dtype and can't be stacked; "
        "use a Dict space, whose entries may differ"
    )


def reward_spec(env: Any, size: tuple[int, ...]) -> TensorSpec:
    """Return the reward's spec: that of a `reward_space`, or any number for each of the `size` environments."""
    space = getattr(env, "reward_space", None)
    if space is None:
        return Unbounded(shape=(*size, 1), dtype=torch.float32)
    if not isinstance(space, spaces.Box):
        raise SpaceError(f"reward_space: expected a Box, got {space}")
    shape = space.shape if len(space.shape) > len(size) else (*size, 1)
    return box_spec(space.low.reshape(shape), space.high.reshape(shape), torch_dtype(space.dtype))


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype of the same name.

    Raises:
        InvalidArgumentError: if there is none.
    """
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as cause:
        raise InvalidArgumentError(f"torch has no dtype for {np.dtype(dtype)}") from cause


def where(key: Path) -> str:
    """Return what messages call the space of the leaf at `key`."""
    return repr(as_key(key)) if key else "space"
