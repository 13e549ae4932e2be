"""What stands in the rows of a gymnasium environment, a single one or a vector: its columns and its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.block import Block
from gleanrl.envs.libs.gym_codecs import Array, ArrayCodec, Codec, RewardCodec
from gleanrl.envs.libs.gym_info import default_info_dict_reader
from gleanrl.envs.libs.gym_trees import Tree, assemble, encode, leaves
from gleanrl.errors import SchemaError
from gleanrl.objects import Leaf, Objects
from gleanrl.schema import Field, Schema, numpy_view
from gleanrl.tree import FLAGS, Path, as_key


@dataclass(frozen=True)
class GymCodecs:
    """How one environment's values become leaves and back."""

    observation: Tree
    action: Tree
    reward: RewardCodec
    readers: tuple[default_info_dict_reader, ...] = ()

    def root_leaves(self) -> list[Codec]:
        """Return the codecs of what reset and step return beside reward and flags, info entries last."""
        return [*leaves(self.observation), *(codec for reader in self.readers for codec in reader.codecs)]

    def encode(self, observation: Any, info: dict[str, Any]) -> list[Array]:
        """Return one array for each of `root_leaves`; they may share memory with what came."""
        arrays = encode(self.observation, observation)
        for reader in self.readers:
            arrays += reader.encode(info)
        return arrays


class GymRows:
    """The columns of an environment's steps, and the actions that stand in a block.

    Args:
        codecs: the environment's conversions.
        batch_size: ``()`` for one environment, ``(P,)`` for a vector of them.

    Attributes:
        root_leaves: see `GymCodecs.root_leaves`.
        plain: the one root leaf that there is, if it is written as it came; else None.
        actions: the codec of each action leaf with the block's column of it, ``(T, *batch, *leaf)``; see `see`.
    """

    def __init__(self, codecs: GymCodecs, batch_size: torch.Size) -> None:
        self._codecs, self._batch_size = codecs, batch_size
        self._action_leaves = leaves(codecs.action)
        self.root_leaves = codecs.root_leaves()
        first = self.root_leaves[0]
        alone = len(self.root_leaves) == 1 and not codecs.readers and codecs.observation is first
        self.plain = first if alone and isinstance(first, ArrayCodec) and first.start is None else None
        self.actions: list[tuple[Codec, Array]] = []

    def schema(self) -> Schema:
        """Return the columns: observations, info entries, flags; under next the same and the reward."""
        root = {codec.key: self._field(codec) for codec in self.root_leaves}
        root |= {(name,): Field(torch.Size((1,)), torch.bool) for name in FLAGS}
        outcome = {**root, ("reward",): self._field(self._codecs.reward)}
        return Schema({**root, **{("next", *path): field for path, field in outcome.items()}})

    def _field(self, codec: Codec) -> Field:
        return Field(torch.Size(codec.shape[len(self._batch_size) :]), codec.spec.dtype)

    def copied(self, carry: Sequence[Array]) -> dict[Path, Leaf]:
        """Return copies of a root's leaves, flags not included.

        Args:
            carry: an array for each of `root_leaves`.
        """
        return {
            codec.key: Objects.of([array], (), self._field(codec).blank).clone()
            if codec.is_list
            else torch.from_numpy(np.array(array, codec.dtype))
            for codec, array in zip(self.root_leaves, carry, strict=True)
        }

    def see(self, block: Block) -> None:
        """Read actions from `block` from now on.

        Raises:
            PolicyError: if its columns don't fit the action spec.
        """
        columns: list[Array] = []
        for codec in self._action_leaves:
            column = block.time_first(codec.key)
            codec.check_action(column.shape[1:], column.dtype)
            columns.append(numpy_view(column))
        self.actions = list(zip(self._action_leaves, columns, strict=True))

    def all_actions(self) -> Sequence[Any]:
        """Return the actions that stand in the block already, all T, as the environment takes them."""
        decoded = [codec.decode_all(column) for codec, column in self.actions]
        tree = self._codecs.action
        if isinstance(tree, Codec):
            return decoded[0]
        return [assemble(tree, list(v)) for v in zip(*decoded, strict=True)]

    def action(self, t: int) -> Any:
        """Return the action of row `t`, as the environment takes it."""
        values = [codec.decode(column[t]) for codec, column in self.actions]
        return assemble(self._codecs.action, values)


def loaded(root: TensorDictBase, key: Path, shape: tuple[int, ...], dtype: torch.dtype | None) -> Array:
    """Return a copy of an entry of a root that somebody else made; `SchemaError` unless it is as expected."""
    leaf = root.get(as_key(key), None)
    if not isinstance(leaf, torch.Tensor) or leaf.shape != torch.Size(shape) or leaf.dtype is not dtype:
        got = f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "none"
        raise SchemaError(f"root: key {as_key(key)!r} expected {shape} {dtype}, got {got}")
    return np.array(leaf.detach().cpu().numpy())
