"""The interfaces of a rollout: `Stepper` and `Actor`, with their carries, step limits and leases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import Path, record_of
from gleanrl._rollout.errors import BATCH, StepFault
from gleanrl._state.state import Stateful, StateReader
from gleanrl.data.trajectories import MASK
from gleanrl.errors import SchemaError

_NO_BATCH = torch.Size()

CarriedOutputs = tuple[tuple[Path, torch.Tensor], ...]
"""Outputs of a policy by path, each ``(*batch, *leaf)``."""


class PolicyCarry(Stateful[CarriedOutputs]):
    """The outputs (except actions) that a policy reads again in the next row, for example its hidden state.

    Args:
        batch_size: the batch dimensions of a row.
        device: device of the policy's input; None for the CPU.
    """

    def __init__(self, batch_size: torch.Size = _NO_BATCH, device: torch.device | None = None) -> None:
        self._batch_size, self._device = batch_size, device
        self.outputs: CarriedOutputs = ()

    def clear(self) -> None:
        """Drop the outputs, because all environments were reset together."""
        self.outputs = ()

    def snapshot(self) -> CarriedOutputs:
        """Return copies of the outputs, since a policy may change its state in place."""
        return tuple((path, value.detach().clone()) for path, value in self.outputs)

    def parse(self, state: Any) -> CarriedOutputs:
        """Return the outputs in a saved state, copied to the policy's device; raise `SchemaError` if they don't fit."""
        if not isinstance(state, (list, tuple)):
            raise SchemaError(f"load_state_dict: expected a list of a policy's outputs, got {state!r:.100}")
        dims = len(self._batch_size)
        for entry in state:
            try:
                path, value = entry
                fits = bool(path) and all(isinstance(key, str) for key in path)
                fits = fits and value.shape[:dims] == self._batch_size
            except (TypeError, ValueError, AttributeError):
                fits = False
            if not fits:
                raise SchemaError(
                    f"load_state_dict: expected a path and a tensor {(*self._batch_size, '...')} of each of the "
                    f"policy's outputs, got {entry!r:.100}"
                )
        return tuple((tuple(path), value.to(self._device or "cpu", copy=True)) for path, value in state)

    def adopt(self, value: CarriedOutputs) -> None:
        """Take over these outputs."""
        self.outputs = tuple((path, output.clone()) for path, output in value)


_Array = np.ndarray[Any, Any]


class StepLimit:
    """Counts the steps of each environment's episode and reports the episodes that reach the limit.

    A single gymnasium environment doesn't use it: its stepper computes the row of the limit in advance.

    Args:
        batch_size: the environments' batch size.
        max_steps: the limit; None for no limit, in which case nothing is counted.

    Attributes:
        counts: the number of steps of each episode, int64 ``[*batch]``.
    """

    def __init__(self, batch_size: Sequence[int], max_steps: int | None) -> None:
        self._max_steps = max_steps
        self.counts: _Array = np.zeros(tuple(batch_size), np.int64)

    def step(self, skipped: _Array | None = None) -> _Array | None:
        """Count a step; return the episodes that have reached the limit, ``[*batch]`` bool, or None if there are none.

        Counts continue past the limit until `restart`.

        Args:
            skipped: environments that were reset instead of stepped, ``[*batch]`` bool; their counts become 0.
        """
        if self._max_steps is None:
            return None
        self.counts += 1
        if skipped is not None:
            self.counts[skipped] = 0
        over = np.asarray(self.counts >= self._max_steps)
        return over if np.count_nonzero(over) else None

    def restart(self, mask: _Array | None) -> None:
        """Begin new episodes where `mask` (bool, ``[*batch]``) is True; everywhere for None."""
        if mask is None:
            self.counts[...] = 0
        else:
            self.counts[mask] = 0


class Usage:
    """The last user of one environment. Not thread-safe, like the environment itself.

    Attributes:
        started: whether the environment has been stepped or reset.
    """

    def __init__(self) -> None:
        self.holder: Lease | None = None
        self.started = False

    def direct(self) -> None:
        """Record a direct call of the environment's methods, which ends any lease."""
        self.holder = None
        self.started = True


class Lease:
    """One rollout's exclusive use of an environment, which ends when any other code steps or resets it.

    Args:
        usage: the usage record of the environment; None for an environment without one.
    """

    def __init__(self, usage: Usage | None = None) -> None:
        self._usage = usage or Usage()

    def take(self) -> None:
        """Record that the lease's owner steps or resets the environment."""
        self._usage.holder = self
        self._usage.started = True

    @property
    def held(self) -> bool:
        """Whether the lease's owner was the last user of the environment."""
        return self._usage.holder is self

    def give_up(self) -> None:
        """End the lease, or the lease of another rollout that uses the environment now."""
        self._usage.direct()


@dataclass(frozen=True)
class EpisodeRules:
    """When trajectories end and whether they are reset.

    Attributes:
        reset_when_done: whether the end of a trajectory resets its environment. If False, the next root is the last
            observation with its flags, and the rollout's owner must stop there.
        max_steps: the number of steps after which every trajectory is truncated; None leaves it to the environment.
    """

    reset_when_done: bool = True
    max_steps: int | None = None


FREELY = EpisodeRules()
"""The default rules: ended trajectories are reset, and there is no step limit."""


@dataclass(frozen=True)
class Carry:
    """The state of a stepper: the root of the next step.

    Attributes:
        root: its leaves, ``[*batch, *leaf]``.
        steps: the number of steps that each episode has taken so far, int64 ``[*batch]``.
    """

    root: Mapping[Path, Leaf]
    steps: torch.Tensor


class Stepper(Stateful[Carry]):
    """An environment, or a batch of them, that writes its outcomes into the rows of a block.

    A stepper writes the root's observations and flags and everything under ``"next"``. Its state is the *carry*, the
    root of the next step, which it keeps from one block to the next. The environments' own states aren't part of it: a
    caller of `adopt` must restore them separately. Not thread-safe: one caller at a time.

    Args:
        batch_size: the environments' batch dimensions, ``()`` for one environment.
        device: device of the block's columns; None for the CPU.
        rules: when trajectories end and whether they are reset.
        lease: taken whenever this stepper uses the environment; any other use of the environment ends it.
    """

    lends: bool = False
    """Whether `block` returns memory of the stepper, which it uses again and again."""
    shows_nothing: bool = False
    """Whether the stepper never passes memory of a block to code that might keep it. Then a block may be reused."""
    through_tensordicts: bool = False
    """Whether the stepper calls the environment's `step` on TensorDicts: only then can gradients flow through it."""

    may_mask: bool = False
    """Whether masks may restrict the environment's actions in the middle of a block.

    Such a stepper redraws forbidden actions among those drawn in advance; see `Block.redraw_seed`.
    """

    def __init__(
        self, batch_size: torch.Size, device: torch.device | None, rules: EpisodeRules, lease: Lease
    ) -> None:
        self.batch_size, self.device, self.rules, self.lease = batch_size, device, rules, lease

    @property
    def disturbed(self) -> bool:
        """Whether other code has stepped or reset the environment, so that the carry isn't its state any more."""
        return not self.lease.held

    def fault(self, t: int, during: str, cause: Exception) -> StepFault:
        """Return the error for a failure that can't be assigned to one environment of a batch.

        For a single environment, the error has its index 0.

        Args:
            t: row of the block at which it happened.
            during: ``"step"`` or ``"reset"``.
            cause: the environment's error, or the error in its outcome.
        """
        return StepFault(t, 0 if self.batch_size.numel() == 1 else BATCH, during, cause)

    # ----------------------------------------------------------------- carry
    @abstractmethod
    def schema(self) -> Schema:
        """Return the columns that the stepper writes, root and ``next``. Resets first without a carry (see `reset`).

        A stepper with steps that are no frames also has and writes the column ``("collector", "mask")``, bool, one
        value per step. It is False where an environment was only reset.
        """

    @abstractmethod
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset all environments, or only where `mask` (bool, ``batch_size``) is True; the results become the carry.

        Raises:
            StepFault: if the environment raised or broke its declaration.
        """

    @abstractmethod
    def root(self) -> dict[Path, Leaf]:
        """Return the carry's leaves: root paths only, ``[*batch, *leaf]``. Reset first if there is no carry.

        They may be views that are valid only until the next step or reset.
        """

    @property
    @abstractmethod
    def steps(self) -> torch.Tensor:
        """The number of steps of each episode, int64 ``[*batch]``. It may be zero for episodes without a limit."""

    @abstractmethod
    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the leaves of `root` as the carry, without a reset: environments keep their own state.

        Args:
            root: its leaves are copied, or at least never changed.
            steps: see `steps`; None for new episodes.
        """

    def snapshot(self) -> Carry:
        """Return the carry. Resets first if there is none."""
        return Carry({path: leaf.clone() for path, leaf in self.root().items()}, self.steps)

    def parse(self, state: Any) -> Carry:
        """Check a saved state and return its carry; see `Stateful`. A stepper without a carry resets first.

        Raises:
            SchemaError: if the state doesn't fit.
        """
        reader, size = StateReader(state, "a stepper's carry"), self.batch_size
        leaves, schema = reader.part("root"), self.schema()
        root: dict[Path, Leaf] = {}
        for path in [path for path in schema.paths if path[0] != "next" and path != MASK]:
            name: Any = path  # the reader calls fields by their paths here
            field = schema[path]
            if field.is_list:
                root[path] = leaves.objects(name, field.blank, (*size, *field.row_shape))
            else:
                root[path] = leaves.tensor(name, field.dtype, (*size, *field.shape))
        return Carry(root, reader.tensor("steps", torch.int64, size))

    def adopt(self, value: Carry) -> None:
        """Take over a copy of a carry."""
        root = {path: leaf.to(self.device, copy=True) for path, leaf in value.root.items()}
        self.load(record_of(root, self.batch_size, self.device), value.steps.clone())

    # ----------------------------------------------------------------- block
    def block(self, schema: Schema, num_steps: int, pool: BufferPool | None = None) -> Block:
        """Return a block that this stepper can write into: fresh columns, or borrowed ones (see `Block.owned`).

        Args:
            schema: the columns. They include the stepper's `schema` and the action columns.
            num_steps: T.
            pool: allocates large columns.
        """
        return Block(schema, self.batch_size, num_steps, self.device, pool)

    @abstractmethod
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Write into `block` from now on and copy the carry into its row 0.

        Args:
            block: has at least the columns of `schema` and the action columns. It may be the block of an earlier call
                with its old contents, so a stepper may keep its views of it.
            actions_ready: whether all T actions are already written in the block.
            primed: paths that the actor writes below ``"next"``, and root columns that it overwrites. The stepper
                passes their values to the environment's `step`.
        """

    @abstractmethod
    def step(self, t: int) -> None:
        """Take the action of row `t`, write its ``next`` and the root of row ``t + 1``.

        After the last row that root becomes the carry. If an episode ends, ``next`` holds its last observation, and the
        next root holds the first observation after the reset.

        Raises:
            StepFault: if the environment raised or broke its declaration.
        """

    def run(self, block: Block) -> None:
        """Take all steps of the bound block, whose actions are already written. Nothing reads its rows before the end.

        After an error `Block.num_complete` is the number of complete steps. After success the caller sets it.
        """
        step, t = self.step, 0
        try:
            for t in range(block.num_steps):
                step(t)
        except BaseException:
            block.num_complete = t
            raise

    def defer(self, seen: Collection[Path] | None) -> None:
        """Allow the stepper to postpone writes until `settle`.

        Until then only the actor reads the bound block, and of its root only the columns `seen` (None: any column).
        Steppers that write whole columns faster than rows override this.
        """

    def settle(self) -> None:
        """Write the postponed values of all complete steps."""

    def stop(self, num_steps: int) -> None:
        """End a block before it is full: row `num_steps` becomes the carry.

        The default does nothing, for steppers that don't keep the carry in the block.
        """

    def confirm(self, num_steps: int) -> None:
        """Check that the environments have made `num_steps` steps of the bound block; called once the block ends.

        The default does nothing, for steppers that make each step themselves. Workers count their steps in addition,
        because their answers alone don't show how many they made.

        Raises:
            WorkerError: if a worker has made fewer steps than it reported.
        """


class Actor(Protocol):
    """A policy that reads the root columns of a row and writes its action columns."""

    carry: PolicyCarry
    """The outputs that the policy reads again in the next row."""

    @property
    def primed(self) -> Collection[Path]:
        """The paths that the actor writes below ``"next"``, and root columns that it overwrites; usually its state.

        The policy reads them in the root of the next row.
        """

    @property
    def seen(self) -> Collection[Path] | None:
        """The root columns of the bound block that the actor reads; None for any."""

    @property
    def overwrites(self) -> bool:
        """Whether the actor overwrites root columns of the environment."""

    def bind(self, block: Block) -> Callable[[int], None] | None:
        """Write into `block` from now on.

        Returns:
            A function that acts on row t: it writes the action and the policy's other outputs. None if all T actions
            have already been written.
        """

    def check(self) -> None:
        """Check that the bound block holds the policy's outputs unchanged; called once the block ends.

        Raises:
            PolicyError: if the conversion of an action to the declared dtype changed its value.
        """
