"""`SerialEnv`, a batch of environments in this process, and `MemberSteppers`, its stepper.

Each member writes into its own views ``column[i]``, ``[*batch, T, *leaf]``, of the block's columns, so rows are
neither stacked nor copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.devices import columns_device
from gleanrl._arrays.ragged import Leaf, stack_leaves
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import Path
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Lease, Stepper
from gleanrl._util import is_native
from gleanrl.envs.base import REPLACED
from gleanrl.envs.env_state import adopt_state, parse_state
from gleanrl.envs.vector.base import MEMBERWISE, BatchedEnv, BatchOptions, dispatched
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.members import MemberGroup, MemberPosition
from gleanrl.errors import InvalidArgumentError, UnsupportedError


class MemberSteppers(Stepper):
    """Steps a batch of environments one after the other; see `Stepper` for the contract.

    Args:
        steppers: one for each environment, all of one batch size.
        lease: see `Stepper`.
        position: its first entry is set to the number of an environment before that environment is called.

    Attributes:
        width: number of environments in each member, more than 1 if members are batches.
    """

    def __init__(
        self, steppers: Sequence[Stepper], lease: Lease, position: MemberPosition | None = None
    ) -> None:
        self._members = tuple(steppers)
        self._steps = [member.step for member in self._members]
        self._position: MemberPosition = [0] if position is None else position
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
        """Whether other code has stepped or reset the batch or one of its members since the last use."""
        return not self.lease.held or any(member.disturbed for member in self._members)

    # ----------------------------------------------------------------- carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or the environments where `mask` is True."""
        self.lease.take()
        for index, member in enumerate(self._members):
            part = None if mask is None else mask[index]
            if part is None or bool(part.any()):
                self._position[0] = index
                try:
                    member.reset(part)
                except StepFault as fault:
                    raise self._translated(fault) from fault.cause

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps of each episode."""
        return torch.stack([member.steps for member in self._members])

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the rows of `root` as the members' carries."""
        self.lease.take()
        for index, (member, part) in enumerate(zip(self._members, root.unbind(0), strict=True)):
            member.load(part, None if steps is None else steps[index])

    def root(self) -> dict[Path, Leaf]:
        """Return the members' carries, stacked."""
        each = [member.root() for member in self._members]
        return {path: stack_leaves([leaves[path] for leaves in each]) for path in each[0]}

    def schema(self) -> Schema:
        """Return the columns, which must be equal for all members.

        Raises:
            UnsupportedError: if the members' columns differ, since one block can't hold them.
        """
        if self._schema is None:
            schemas = [self._schema_of(index) for index in range(len(self._members))]
            require_one_schema(schemas)
            self._schema = schemas[0]
            self.lease.take()  # a member that had never been reset was reset to find its columns
        return self._schema

    def _schema_of(self, index: int) -> Schema:
        self._position[0] = index
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
            self._position[0] = index
            # Each environment redraws with its own seed, so that draws don't depend on how members are distributed.
            seed = block.redraw_seed
            part.redraw_seed = None if seed is None else seed + index * self.width
            member.bind(part, actions_ready, primed)

    def step(self, t: int) -> None:
        """Step every member with the action of row `t`; members after one that raises aren't stepped."""
        position = self._position
        try:
            for index, step in enumerate(self._steps):
                position[0] = index
                step(t)
        except StepFault as fault:
            raise self._translated(fault, t) from fault.cause

    def stop(self, num_steps: int) -> None:
        """End the block of every member."""
        for member in self._members:
            member.stop(num_steps)

    def confirm(self, num_steps: int) -> None:
        """Check that every member has made `num_steps` steps of its block."""
        for member in self._members:
            member.confirm(num_steps)

    def _translated(self, fault: StepFault, t: int | None = None) -> StepFault:
        """Return `fault` with the environment's index in this batch.

        For a fault in step `t`, add the number of steps that each environment has made. Members before the failed one
        have made this step, later ones have not.
        """
        index, width = self._position[0], self.width
        made = None
        if t is not None:
            after = [t] * width * (len(self._members) - index - 1)
            made = [*[t + 1] * width * index, *fault.made(width), *after]
        return fault.counted_from(index * width, made)


def require_one_schema(schemas: Sequence[Schema]) -> None:
    """Check that all environments have the same columns.

    Raises:
        UnsupportedError: naming the first environment that differs, and the differing keys.
    """
    for index, schema in enumerate(schemas):
        if schema != schemas[0]:
            fields, first = set(schema.items().items()), set(schemas[0].items().items())
            differing = sorted({path for path, _ in fields ^ first})
            raise UnsupportedError(
                f"the environments' data don't fit in one batch of columns: environment {index} and "
                f"environment 0 differ in {differing}; give them equal keys, shapes and dtypes, or step them "
                "through env.step and env.rollout, which stack lazily"
            )


class SerialEnv(BatchedEnv):
    """Several environments in this process that step as one, ``[num_workers, *batch]``.

    The environments are stepped one after the other. Each writes its outcome into its rows of the batch. The data are
    bit for bit equal to the data of a `ParallelEnv` with the same environments and seeds. Gradients flow through steps.

    To read its specs, an environment is made and closed again, unless it exists already. The members themselves are
    made at the first use. If the specs differ, the specs of the batch are stacked. If shapes, keys or dtypes differ,
    TensorDicts are lazy stacks. Collectors don't support environments that differ in keys or dtypes.

    A method or attribute that this class lacks is looked up in the members. ``env.name`` is the list of their
    attributes, and ``env.method(...)`` returns the list of their results.

    Args:
        num_workers: number of environments.
        create_env_fn: a callable that makes an environment, an unused environment, or the name of a gymnasium
            environment; or a list with one for each. An environment that occurs twice in the list is copied. If a
            callable returns the same unused environment every time, each member is a copy of it.
        create_env_kwargs: keyword arguments of the callables, for all or a list with one for each.
        pin_memory: must be False.
        share_individual_td: False requires data that can be stacked densely; other values have no effect.
        shared_memory: no effect; accepted for compatibility.
        memmap: no effect; True requires ``shared_memory=False``.
        policy_proof: must be None.
        device: device of the TensorDicts; None for the device of the environments.
        allow_step_when_done: must be False.
        num_threads: torch threads of this process from the start until `close`; None leaves their number unchanged.
        num_sub_threads: must be 1, since there are no processes.
        serial_for_single: no effect; accepted for compatibility.
        non_blocking: no effect; accepted for compatibility.
        mp_start_method: no effect, since there are no processes; an unknown method is an error.
        use_buffers: no effect; accepted for compatibility.
        consolidate: no effect; accepted for compatibility.
        daemon: no effect, since there are no processes.

    Raises:
        InvalidArgumentError: for a value that isn't supported, or if the environments' devices differ and `device` is
            None (also a ValueError). It is also raised, here or at the first use, if two members step the same object.
        LengthError: if a list doesn't have one entry for each environment (also a RuntimeError).
        InvalidTypeError: if an entry is neither callable nor an environment.
        UnsupportedError: if both `memmap` and `shared_memory` are set (also a RuntimeError).
        ClosedError: if an environment was closed.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        >>> env.set_seed(1)
        3
        >>> env.rollout(5, break_when_any_done=False).shape
        torch.Size([3, 5])
        >>> env.close()
    """

    in_process = True

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        create_env_kwargs: Any = None,
        pin_memory: bool = False,
        share_individual_td: bool | None = None,
        shared_memory: bool = True,
        memmap: bool = False,
        policy_proof: Any = None,
        device: Any = None,
        allow_step_when_done: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        non_blocking: bool = False,
        mp_start_method: str | None = None,
        use_buffers: bool | None = None,
        consolidate: bool = True,
        daemon: bool = False,
    ) -> None:
        options = BatchOptions.of(locals())
        if num_sub_threads != 1:
            raise InvalidArgumentError(
                f"num_sub_threads: a SerialEnv has no processes, expected 1, got {num_sub_threads!r}"
            )
        super().__init__(num_workers, create_env_fn, create_env_kwargs, options)

    # ------------------------------------------------------------------- life
    def _make_runner(self, makers: Sequence[Factory]) -> MemberGroup:
        return MemberGroup(makers)

    @property
    def members(self) -> tuple[Any, ...]:
        """The environments; empty before the start."""
        return self.runner.envs if self.is_started else ()

    live_members = members

    # ------------------------------------------------------------------ steps
    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Start the batch, and return a stepper whose members write into their rows of a block.

        Such a stepper requires equal shapes, members on the device of the batch, and no subclass that overrides the
        way the batch steps. Otherwise the stepper calls the batch's `step` and `reset`.
        """
        stepper = self._memberwise(rules, columns_device(self.device))
        return super().make_stepper(rules) if stepper is None else stepper

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Start the batch; return a stepper with rows on the CPU, or None if there can be none (see `make_stepper`)."""
        return self._memberwise(rules, torch.device("cpu"))

    def _memberwise(self, rules: EpisodeRules, here: torch.device) -> Stepper | None:
        """Return a stepper of the members with rows on the device `here`; None if there can be none."""
        self.start()
        if self.unlike_shapes or not is_native(self, *REPLACED, *MEMBERWISE, of=SerialEnv):
            return None
        steppers = self.runner.steppers(rules, on_host=here.type == "cpu")
        if any(columns_device(stepper.device) != here for stepper in steppers):
            return None
        return MemberSteppers(steppers, Lease(self.usage))

    # --------------------------------------------------------------- dispatch
    def _attribute(self, name: str) -> Any:
        def call(name: str, args: Any, kwargs: Any) -> list[Any]:
            return [getattr(env, name)(*args, **kwargs) for env in self.members]

        return dispatched(name, [getattr(env, name) for env in self.members], call)

    def _parse_members(self, states: Sequence[Any], strict: bool) -> list[Any]:
        return [parse_state(env, state, strict) for env, state in zip(self.members, states, strict=True)]

    def adopt_state(self, value: Any) -> None:
        """Let every member continue from its parsed state."""
        for env, parsed in zip(self.members, value, strict=True):
            adopt_state(env, parsed)
