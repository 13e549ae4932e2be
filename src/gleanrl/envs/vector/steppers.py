"""Environments side by side that step into the rows of one block, each through its own stepper.

Member i writes into the views ``column[i]``, ``[*batch, T, *leaf]``, of every column of the block; nothing is
stacked and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from gleanrl.block import Block, Schema
from gleanrl.envs.vector.place import Place
from gleanrl.errors import UnsupportedError
from gleanrl.rollouts.loop import StepFault, Stepper
from gleanrl.rollouts.usage import Usage
from gleanrl.tree import Path


class MemberSteppers:
    """Steps a batch of environments, one after the other; see `Stepper` for the contract.

    Args:
        steppers: one for each environment, all of one batch size.
        usage: who used the batch last; None if nobody else can.
        place: its first entry is set to the number of the environment at work, before the work begins.
    """

    def __init__(
        self,
        steppers: Sequence[Stepper],
        usage: Usage | None = None,
        place: Place | None = None,
    ) -> None:
        self._members = tuple(steppers)
        self._steps = [member.step for member in self._members]
        self._usage = usage or Usage()
        self._token = object()
        self._place: Place = [0] if place is None else place
        first = self._members[0]
        self.batch_size = torch.Size((len(self._members), *first.batch_size))
        self.device = first.device
        self.through_tensordicts = any(member.through_tensordicts for member in self._members)
        self._width = max(1, first.batch_size.numel())
        self._schema: Schema | None = None

    @property
    def reset_when_done(self) -> bool:
        """Whether an episode's end resets its environment."""
        return self._members[0].reset_when_done

    @reset_when_done.setter
    def reset_when_done(self, value: bool) -> None:
        for member in self._members:
            member.reset_when_done = value

    @property
    def disturbed(self) -> bool:
        """Whether somebody else used the batch, or one of its members, since."""
        return not self._usage.is_by(self._token) or any(member.disturbed for member in self._members)

    # ----------------------------------------------------------------- carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or those where `mask` is True."""
        self._usage.by(self._token)
        for index, member in enumerate(self._members):
            part = None if mask is None else mask[index]
            if part is None or bool(part.any()):
                self._place[0] = index
                try:
                    member.reset(part)
                except StepFault as fault:
                    raise self._translated(fault) from fault.cause

    def load(self, root: TensorDictBase) -> None:
        """Take the rows of `root` as the members' carries."""
        self._usage.by(self._token)
        for member, part in zip(self._members, root.unbind(0), strict=True):
            member.load(part)

    def root(self) -> dict[Path, torch.Tensor]:
        """Return the carries, stacked."""
        each = [member.root() for member in self._members]
        return {path: torch.stack([leaves[path] for leaves in each]) for path in each[0]}

    def limit(self, max_steps: int) -> None:
        """Truncate every episode at `max_steps` steps."""
        for member in self._members:
            member.limit(max_steps)

    def schema(self) -> Schema:
        """Return the columns, which must be those of every member.

        Raises:
            UnsupportedError: if the members' columns differ: one block can't hold them.
        """
        if self._schema is None:
            schemas = [self._schema_of(index) for index in range(len(self._members))]
            require_one_schema(schemas)
            self._schema = schemas[0]
            self._usage.by(self._token)  # whoever hadn't been reset was
        return self._schema

    def _schema_of(self, index: int) -> Schema:
        self._place[0] = index
        try:
            return self._members[index].schema()
        except StepFault as fault:
            raise self._translated(fault) from fault.cause

    # ----------------------------------------------------------------- block
    def bind(self, block: Block, actions_ready: bool) -> None:
        """Let every member write into its part of `block`."""
        for index, member in enumerate(self._members):
            self._place[0] = index
            member.bind(block.part(index), actions_ready)

    def step(self, t: int) -> None:
        """Step every member with the action of its row `t`."""
        place = self._place
        try:
            for index, step in enumerate(self._steps):
                place[0] = index
                step(t)
        except StepFault as fault:
            raise self._translated(fault) from fault.cause

    def stop(self, num_steps: int) -> None:
        """End the block of every member."""
        for member in self._members:
            member.stop(num_steps)

    def _translated(self, fault: StepFault) -> StepFault:
        """Return `fault` with the environment's index in this batch."""
        index = self._place[0]
        env = fault.env if fault.env < 0 else index * self._width + fault.env
        return StepFault(fault.t, env, fault.during, fault.cause)


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
