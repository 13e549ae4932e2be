"""The block that a transformed environment's base steps into: which columns are the outer one's own, and its roots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gleanrl.block import Block
from gleanrl.data.boundaries import MASK
from gleanrl.envs.transforms.columns import SpareRow
from gleanrl.objects import Leaf
from gleanrl.rollouts.plan import action_fields
from gleanrl.rollouts.protocol import Stepper
from gleanrl.rollouts.whole_rows import whole_rows
from gleanrl.schema import Field, Schema
from gleanrl.tree import FLAGS, NestedKey, Path, as_key


class InnerBlocks:
    """Makes the base stepper's block for every block that is handed out.

    - A column that no transform writes is one and the same in both blocks: the base stepper writes it in place.
    - A column that transforms write, or that the user doesn't get, is a single row of memory in the inner block, seen
      as T rows: its values are looked at within the step only. Flags are real columns, because steppers may fill them
      once a block and set them where an episode ends, and so is what is added up later.

    Args:
        env: the `TransformedEnv`.
        base: the stepper of its base environment.
        changed: the paths of what transforms write, without ``"next"``.
        inverts: whether they change actions.
        summed: the outcomes that are added up, without ``"next"``.

    Attributes:
        actions: the paths of what the base environment takes.
        required: the keys in `changed` that have a column below ``"next"`` of the outer block.
    """

    def __init__(self, env: Any, base: Stepper, changed: set[Path], inverts: bool, summed: set[Path]) -> None:
        self._env, self._base, self._changed, self._inverts = env, base, changed, inverts
        self._summed = {("next", *path) for path in summed}
        self._size, self._device = torch.Size(env.batch_size), base.device
        self._spare = SpareRow()
        self._schema: Schema | None = None
        self._outer: Schema | None = None
        self._places: list[tuple[Path, Field, bool]] = []
        self.actions: tuple[Path, ...] = ()
        self.required: list[NestedKey] = []

    def within(self, outer: Block) -> Block:
        """Return the block for the base stepper to write into while `outer` is filled."""
        if outer.schema is not self._outer:
            self._lay_out(outer.schema)
        assert self._schema is not None
        columns = [
            outer.column(path) if shared else self._own_column(outer, path, field)
            for path, field, shared in self._places
        ]
        return Block(self._schema, self._size, outer.num_steps, columns=columns)

    def _lay_out(self, outer: Schema) -> None:
        """Find out what is the same for all blocks of a schema: which columns both sides have, with the same values."""
        actions = action_fields(self._env.base_env, len(self._size))
        if self._schema is None:  # one and the same for all blocks: steppers go by that
            self._schema = Schema({**self._base.schema().items(), **actions})
        self.actions, self._places = tuple(actions), []
        for path, field in self._schema.items().items():
            inner = path[1:] if path[0] == "next" else path
            changed = self._inverts if path in actions else inner in self._changed
            shared = not changed and path in outer and outer[path] == field
            self._places.append((path, field, shared))
        self.required = [as_key(path) for path in self._changed if ("next", *path) in outer]
        self._outer = outer

    def _own_column(self, outer: Block, path: Path, field: Field) -> torch.Tensor:
        """Return the inner block's column at `path` where it isn't the outer one's."""
        if path[-1] in FLAGS or path in self._summed:
            shape = (*self._size, outer.num_steps, *field.shape)
            return torch.zeros(shape, dtype=field.dtype, device=self._device)
        return self._spare.column(path, field, self._size, outer.num_steps, self._device)


class RootRows:
    """Writes roots of the base environment into its block.

    Args:
        block: that block.
        schema: what its stepper writes.
    """

    def __init__(self, block: Block, schema: Schema) -> None:
        self._block = block
        paths = [path for path in schema.paths if path[0] != "next" and path != MASK]  # which is of steps
        self._whole = whole_rows(block, {path: path for path in paths})

    def write(self, t: int, root: Mapping[Path, Leaf]) -> None:
        """Write row `t`."""
        if self._whole is None or self._whole.write(t, root) is None:
            for path, value in root.items():
                self._block.column(path).select(self._block.time_dim, t).copy_(value)
