"""Environments side by side that step into the rows of one block, each through its own stepper.

Member i writes into the views ``column[i]``, ``[*batch, T, *leaf]``, of every column of the block; nothing is
stacked and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from tensordict import TensorDictBase

from gleanrl.block import Block
from gleanrl.envs.vector.place import Place
from gleanrl.errors import UnsupportedError
from gleanrl.objects import Leaf, stack_leaves
from gleanrl.rollouts.faults import StepFault
from gleanrl.rollouts.protocol import Stepper
from gleanrl.rollouts.usage import Lease
from gleanrl.schema import Schema
from gleanrl.tree import Path


class MemberSteppers(Stepper):
    """Steps a batch of environments, one after the other; see `Stepper` for the contract.

    Args:
        steppers: one for each environment, all of one batch size.
        lease: see `Stepper`.
        place: its first entry is set to the number of the environment at work, before the work begins.

    Attributes:
        width: the environments of each member.
    """

    def __init__(self, steppers: Sequence[Stepper], lease: Lease, place: Place | None = None) -> None:
        self._members = tuple(steppers)
        self._steps = [member.step for member in self._members]
        self._place: Place = [0] if place is None else place
        first = self._members[0]
        super().__init__(
            torch.Size((len(self._members), *first.batch_size)), first.device, first.rules, lease
        )
        self.through_tensordicts = any(member.through_tensordicts for member in self._members)
        self.shows_nothing = all(member.shows_nothing for member in self._members)
        self.may_mask = any(member.may_mask for member in self._members)
        self._block: Block | None = None
        self._parts: list[Block] = []
        self.width = max(1, first.batch_size.numel())
        self._schema: Schema | None = None

    @property
    def disturbed(self) -> bool:
        """Whether somebody else used the batch, or one of its members, since."""
        return not self.lease.held or any(member.disturbed for member in self._members)

    # ----------------------------------------------------------------- carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or those where `mask` is True."""
        self.lease.take()
        for index, member in enumerate(self._members):
            part = None if mask is None else mask[index]
            if part is None or bool(part.any()):
                self._place[0] = index
                try:
                    member.reset(part)
                except StepFault as fault:
                    raise self._translated(fault) from fault.cause

    @property
    def steps(self) -> torch.Tensor:
        """The steps that each episode has taken."""
        return torch.stack([member.steps for member in self._members])

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the rows of `root` as the members' carries."""
        self.lease.take()
        for index, (member, part) in enumerate(zip(self._members, root.unbind(0), strict=True)):
            member.load(part, None if steps is None else steps[index])

    def root(self) -> dict[Path, Leaf]:
        """Return the carries, stacked."""
        each = [member.root() for member in self._members]
        return {path: stack_leaves([leaves[path] for leaves in each]) for path in each[0]}

    def schema(self) -> Schema:
        """Return the columns, which must be those of every member.

        Raises:
            UnsupportedError: if the members' columns differ: one block can't hold them.
        """
        if self._schema is None:
            schemas = [self._schema_of(index) for index in range(len(self._members))]
            require_one_schema(schemas)
            self._schema = schemas[0]
            self.lease.take()  # whoever hadn't been reset was
        return self._schema

    def _schema_of(self, index: int) -> Schema:
        self._place[0] = index
        try:
            return self._members[index].schema()
        except StepFault as fault:
            raise self._translated(fault) from fault.cause

    # ----------------------------------------------------------------- block
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Let every member write into its part of `block`."""
        if block is not self._block:
            self._parts = [block.part(index) for index in range(len(self._members))]
            self._block = block
        for index, (member, part) in enumerate(zip(self._members, self._parts, strict=True)):
            self._place[0] = index
            seed = block.redraw_seed
            part.redraw_seed = None if seed is None else seed + index * self.width
            member.bind(part, actions_ready, primed)

    def step(self, t: int) -> None:
        """Step every member with the action of its row `t`."""
        place = self._place
        try:
            for index, step in enumerate(self._steps):
                place[0] = index
                step(t)
        except StepFault as fault:
            raise self._translated(fault, t) from fault.cause

    def stop(self, num_steps: int) -> None:
        """End the block of every member."""
        for member in self._members:
            member.stop(num_steps)

    def confirm(self, num_steps: int) -> None:
        """Raise unless every member has made so many steps of its block."""
        for member in self._members:
            member.confirm(num_steps)

    def _translated(self, fault: StepFault, t: int | None = None) -> StepFault:
        """Return `fault` with the environment's index in this batch, and, in step `t`, who has made that step."""
        index, width = self._place[0], self.width
        made = None
        if t is not None:
            after = [t] * width * (len(self._members) - index - 1)
            made = [*[t + 1] * width * index, *fault.made(width), *after]
        return fault.counted_from(index * width, made)


def require_one_schema(schemas: Sequence[Schema]) -> None:
    """Raise unless all environments have the same columns.

    Raises:
        UnsupportedError: naming the first that differs, and how.
    """
    for index, schema in enumerate(schemas):
        if schema != schemas[0]:
            mine, first = set(schema.items().items()), set(schemas[0].items().items())
            differing = sorted({path for path, _ in mine ^ first})
            raise UnsupportedError(
                f"the environments' data can't stand in one batch of columns: environment {index} and "
                f"environment 0 differ in {differing}; give them equal keys, shapes and dtypes, or step them "
                "through env.step and env.rollout, which stack lazily"
            )
