"""Conversion of gymnasium spaces to specs and codecs.

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

Choices count from 0, regardless of the start of the space. The following spaces, whose values have no fixed shape, are
possible for observations only:

| space | spec |
| --- | --- |
| Text, any other space of strings | NonTensor: the string |
| Sequence | the element's with a first dimension of -1; NonTensor if elements have no fixed shape |
| Graph | ``"nodes"``, ``"edges"`` and ``"edge_links"``, each a sequence |
| any other Tuple | one leaf for each element, called ``"0"``, ``"1"``, ... |
| OneOf | NonTensor: the pair, unchanged |

A space with several leaves (Dict, Graph, Tuple of different elements) gets a `Group` of codecs, nested like the space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces

from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from gleanrl.data.specs.leaf import LARGE
from gleanrl.envs.libs.gym_codecs import (
    Array,
    ArrayCodec,
    CategoricalCodec,
    Codec,
    MultiOneHotCodec,
    ObjectCodec,
    OneHotCodec,
    SequenceCodec,
    StackCodec,
    TupleCodec,
    describe,
    graph_entries,
    tuple_entries,
)
from gleanrl.errors import EnvironmentContractError, InvalidArgumentError, SpaceError

_CONVERSIONS: dict[type[Any], Callable[..., TensorSpec]] = {}


def register_gym_spec_conversion(
    spec_type: type[Any],
) -> Callable[[Callable[..., TensorSpec]], Callable[..., TensorSpec]]:
    """Return a decorator that registers a function as the conversion from a class of spaces to specs.

    The function is called as ``function(space, categorical_action_encoding=...)`` for spaces of the class and of its
    subclasses. It takes precedence over the conversions of this module and over registrations of base classes. A later
    function for the same class replaces it. Observations are recorded, and actions passed, as arrays of its spec.

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
    """Return the codec of a space whose values are one leaf; see `make_tree`.

    Raises:
        SpaceError: if there is no spec for the space.
    """
    try:
        # Registered conversions come first, so that users can replace the built-in ones.
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
        "Convert it with a gymnasium wrapper (TransformObservation, FlattenObservation, TransformAction), or by "
        "register_gym_spec_conversion"
    )


def _box(space: spaces.Box, key: Path) -> Codec:
    dtype = torch_dtype(space.dtype)
    if dtype == torch.bool:
        return ArrayCodec(key, Binary(shape=space.shape, dtype=dtype))
    return ArrayCodec(key, box_spec(space.low, space.high, dtype))


def box_spec(low: Array, high: Array, dtype: torch.dtype) -> TensorSpec:
    """Return the spec for elements from `low` to `high`; Unbounded for floats without any finite bound."""
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        if (low <= limits.min).all() and (high >= limits.max).all():
            return Unbounded(shape=low.shape, dtype=dtype)
    # Images have the same bounds everywhere: two numbers replace two large arrays.
    if low.size > LARGE and (low == low.flat[0]).all() and (high == high.flat[0]).all():
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
    """Return the spec of the rewards, from `reward_space` if the environment has one; otherwise Unbounded float32.

    Args:
        env: the environment.
        size: its batch dimensions, ``()`` or ``(P,)``.

    Raises:
        SpaceError: if `reward_space` isn't a Box.
    """
    space = getattr(env, "reward_space", None)
    if space is None:
        return Unbounded(shape=(*size, 1), dtype=torch.float32)
    if not isinstance(space, spaces.Box):
        raise SpaceError(f"reward_space: expected a Box, got {space}")
    shape = space.shape if len(space.shape) > len(size) else (*size, 1)
    return box_spec(space.low.reshape(shape), space.high.reshape(shape), torch_dtype(space.dtype))


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's equivalent of a NumPy dtype.

    Raises:
        InvalidArgumentError: if there is none.
    """
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as cause:
        raise InvalidArgumentError(f"torch has no dtype for {np.dtype(dtype)}") from cause


def where(key: Path) -> str:
    """Return the name of the space at `key` for error messages."""
    return repr(as_key(key)) if key else "space"


class Group:
    """The codecs of a Dict space, nested like the space.

    Args:
        key: path of the group; error messages name it.
        children: for each name in the space, its codec or group.
        entries: converts a value to a dictionary; None for values that are dictionaries.
    """

    def __init__(
        self, key: Path, children: Mapping[str, Tree], entries: Callable[[Any], Any] | None = None
    ) -> None:
        self.key = key
        self.children = dict(children)
        self._entries = entries

    def collect(self, value: Any, out: list[Array]) -> None:
        """Append the encoded leaves of the dictionary `value` to `out`, in the order of `leaves`.

        Raises:
            EnvironmentContractError: if an entry is missing or unexpected.
        """
        if self._entries is not None:
            value = self._entries(value)
        if not isinstance(value, Mapping) or value.keys() != self.children.keys():
            raise self._difference(value)
        for name, child in self.children.items():
            if isinstance(child, Group):
                child.collect(value[name], out)
            else:
                out.append(child.encode(value[name]))

    def assemble(self, values: Iterator[Any]) -> dict[str, Any]:
        """Return the dictionary with `values` as its leaves, in the order of `leaves`."""
        return {
            name: child.assemble(values) if isinstance(child, Group) else next(values)
            for name, child in self.children.items()
        }

    def batched(self, num_envs: int) -> Group:
        """Return the group of codecs for P environments."""
        children = {name: child.batched(num_envs) for name, child in self.children.items()}
        return Group(self.key, children, self._entries)

    def _difference(self, value: Any) -> EnvironmentContractError:
        where = f"observation {as_key(self.key)!r}" if self.key else "observation"
        if not isinstance(value, Mapping):
            return EnvironmentContractError(
                f"{where}: expected a dict with {list(self.children)}, got {describe(value)}"
            )
        missing = [name for name in self.children if name not in value]
        extra = [name for name in value if name not in self.children]
        return EnvironmentContractError(
            f"{where}: expected the keys {list(self.children)} of its space, "
            f"missing {missing}, unexpected {extra}"
        )


Tree: TypeAlias = Codec | Group


def leaves(tree: Tree) -> list[Codec]:
    """Return the codecs of `tree`, depth first."""
    if isinstance(tree, Codec):
        return [tree]
    return [leaf for child in tree.children.values() for leaf in leaves(child)]


def encode(tree: Tree, value: Any) -> list[Array]:
    """Return one array for each of `leaves(tree)`; see `Codec.encode` and `Group.collect` for memory and errors."""
    if isinstance(tree, Codec):
        return [tree.encode(value)]
    out: list[Array] = []
    tree.collect(value, out)
    return out


def assemble(tree: Tree, values: list[Any]) -> Any:
    """Return the argument of `step` from one decoded value for each of `leaves(tree)`."""
    return values[0] if isinstance(tree, Codec) else tree.assemble(iter(values))


def tree_spec(tree: Tree, batch_size: Sequence[int] = ()) -> Composite:
    """Return the spec with every leaf of `tree` under its key; the dimensions of `batch_size` come first."""
    return Composite({as_key(leaf.key): leaf.spec for leaf in leaves(tree)}, shape=torch.Size(batch_size))


def make_tree(space: spaces.Space[Any], key: Path, categorical: bool, lists: bool = False) -> Tree:
    """Return the codec of a space, or a `Group` of codecs if its values have several leaves.

    Args:
        space: the space; a Dict has a leaf for each entry.
        key: path of the leaf, or prefix of the paths of several leaves.
        categorical: whether choices are integers. If False, they are one-hot vectors.
        lists: whether values without a fixed shape are allowed, as for observations.

    Raises:
        SpaceError: if the space, or one inside it, has no spec; the message names it.
    """
    if lists and isinstance(space, spaces.Graph):
        return _graph(space, key, categorical)
    if isinstance(space, spaces.Tuple) and lists and space.spaces and not _stackable(space, key, categorical):
        parts = {str(i): make_tree(s, (*key, str(i)), categorical, lists) for i, s in enumerate(space.spaces)}
        return Group(key, parts, tuple_entries)
    if lists and not isinstance(space, spaces.Dict):
        codec = _list_codec(space, key, categorical)
        if codec is not None:
            return codec
    if not isinstance(space, spaces.Dict):
        return make_codec(space, key, categorical)
    if not space.spaces:
        raise SpaceError(f"{where(key)}: {space} is empty; there is nothing to store")
    for name in space.spaces:
        if not isinstance(name, str) or name.startswith("_"):
            raise SpaceError(
                f"{where(key)}: the key {name!r} of {space} isn't a public name (keys that start with an "
                "underscore are private); rename it with a gymnasium wrapper"
            )
    children = {
        name: make_tree(child, (*key, name), categorical, lists) for name, child in space.spaces.items()
    }
    return Group(key, children)


def _list_codec(space: spaces.Space[Any], key: Path, categorical: bool) -> Codec | None:
    """Return the codec of a space whose values have no fixed shape; None for any other space."""
    # Other classes of text declare the dtype, for example MiniGrid's missions.
    if isinstance(space, spaces.Text) or (space.dtype is not None and np.issubdtype(space.dtype, np.str_)):
        return ObjectCodec(key, str, "a string")
    if isinstance(space, spaces.OneOf):
        return ObjectCodec(key, tuple, None)
    if not isinstance(space, spaces.Sequence):
        return None
    try:
        return SequenceCodec(key, make_codec(space.feature_space, key, categorical))
    except SpaceError:
        return ObjectCodec(key, None, ())


def _graph(space: spaces.Graph, key: Path, categorical: bool) -> Group:
    nodes = make_codec(space.node_space, (*key, "nodes"), categorical)
    children: dict[str, Tree] = {"nodes": SequenceCodec((*key, "nodes"), nodes)}
    edges = space.edge_space
    part = _NO_EDGES if edges is None else edges
    children["edges"] = SequenceCodec((*key, "edges"), make_codec(part, (*key, "edges"), categorical))
    links = ArrayCodec((*key, "edge_links"), Unbounded(shape=(2,), dtype=torch.int64))
    children["edge_links"] = SequenceCodec((*key, "edge_links"), links)
    return Group(key, children, graph_entries)


_NO_EDGES: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (0,))


def _stackable(space: spaces.Tuple[Any], key: Path, categorical: bool) -> bool:
    """Return whether the elements of a tuple can be stacked to one leaf."""
    try:
        make_codec(space, key, categorical)
    except SpaceError:
        return False
    return True


def action_tree(space: spaces.Space[Any], categorical: bool) -> Tree:
    """Return the codecs of an action. A Dict's entries keep their keys; any other action has the key ``"action"``."""
    return make_tree(space, () if isinstance(space, spaces.Dict) else ("action",), categorical)


def check_names(role: str, tree: Tree, used: Collection[str], space: spaces.Space[Any]) -> None:
    """Raise `SpaceError` if a leaf of `tree` has one of the `used` names."""
    clash = sorted({leaf.key[0] for leaf in leaves(tree)}.intersection(used))
    if clash:
        raise SpaceError(
            f"{role}: the keys {clash} of {space} are reserved or used by other entries; rename them with a "
            "gymnasium wrapper"
        )


def observation_tree(space: spaces.Space[Any], key: str, categorical: bool) -> Tree:
    """Return the codecs of an observation. A Dict's entries keep their keys; any other observation has `key`.

    A Dict's ``state`` is renamed to ``observation`` if that name is free.
    """
    if not isinstance(space, spaces.Dict):
        return make_tree(space, (key,), categorical, lists=True)
    tree = make_tree(space, (), categorical, lists=True)
    assert isinstance(tree, Group)
    if "state" in tree.children and "observation" not in tree.children:
        tree.children["state"] = make_tree(space.spaces["state"], ("observation",), categorical, lists=True)
    return tree
