"""Codecs nested like the space that they are of: Dict spaces, graphs, tuples of unlike elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces

from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs.libs.gym_codecs import Array, ArrayCodec, Codec, describe
from gleanrl.envs.libs.gym_lists import ObjectCodec, SequenceCodec, graph_entries, tuple_entries
from gleanrl.envs.libs.gym_spaces import make_codec, where
from gleanrl.errors import EnvironmentContractError, SpaceError
from gleanrl.tree import Path, as_key


class Group:
    """The codecs of a Dict space, nested like the space.

    Args:
        key: where the group stands; messages name it.
        children: the space's name for each entry, and its codec or group.
        entries: makes a dictionary of a value; None for values that are dictionaries.
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
            EnvironmentContractError: if an entry is missing, or there is one too many.
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
        """Return the dictionary whose leaves are `values`, in the order of `leaves`."""
        return {
            name: child.assemble(values) if isinstance(child, Group) else next(values)
            for name, child in self.children.items()
        }

    def batched(self, num_envs: int) -> Group:
        """Return the codecs of the dictionaries of P environments."""
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
    """Return one array for each of `leaves(tree)`."""
    if isinstance(tree, Codec):
        return [tree.encode(value)]
    out: list[Array] = []
    tree.collect(value, out)
    return out


def assemble(tree: Tree, values: list[Any]) -> Any:
    """Return what `step` takes, from one decoded value for each of `leaves(tree)`."""
    return values[0] if isinstance(tree, Codec) else tree.assemble(iter(values))


def tree_spec(tree: Tree, batch_size: Sequence[int] = ()) -> Composite:
    """Return the spec with every leaf of `tree` under its key; each has the dimensions of `batch_size` first."""
    return Composite({as_key(leaf.key): leaf.spec for leaf in leaves(tree)}, shape=torch.Size(batch_size))


def make_tree(space: spaces.Space[Any], key: Path, categorical: bool, lists: bool = False) -> Tree:
    """Return the codecs of a space.

    Args:
        space: the space; a Dict gives a leaf for each entry.
        key: where its leaf stands, or where the entries of a Dict stand below.
        categorical: whether choices are integers; if not, they are one-hot vectors.
        lists: whether values without a fixed shape are allowed: those of observations are.

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
    """Return the codec of a space whose values have no fixed shape; None for another."""
    if isinstance(space, spaces.Text):
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
    """Return whether the elements of a tuple are one leaf."""
    try:
        make_codec(space, key, categorical)
    except SpaceError:
        return False
    return True


def action_tree(space: spaces.Space[Any], categorical: bool) -> Tree:
    """Return the codecs of an action: a Dict's under its own keys, any other's under ``"action"``."""
    return make_tree(space, () if isinstance(space, spaces.Dict) else ("action",), categorical)


def check_names(role: str, tree: Tree, taken: Collection[str], space: spaces.Space[Any]) -> None:
    """Raise SpaceError if entries would stand where other things of a record do."""
    clash = sorted({leaf.key[0] for leaf in leaves(tree)}.intersection(taken))
    if clash:
        raise SpaceError(
            f"{role}: the keys {clash} of {space} stand for something else in records; rename them with a "
            "gymnasium wrapper"
        )


def observation_tree(space: spaces.Space[Any], key: str, categorical: bool) -> Tree:
    """Return the codecs of an observation: a Dict's under its own keys, any other's under `key`."""
    if not isinstance(space, spaces.Dict):
        return make_tree(space, (key,), categorical, lists=True)
    tree = make_tree(space, (), categorical, lists=True)
    assert isinstance(tree, Group)
    if "state" in tree.children and "observation" not in tree.children:
        tree.children["state"] = make_tree(space.spaces["state"], ("observation",), categorical, lists=True)
    return tree
