"""What a rollout is made of: an actor, which is how a policy acts on rows, and a stepper, how an environment steps.

What a policy takes along from row to row.

The limit of an episode's steps, for environments that are counted side by side.

Who uses an environment: a rollout must notice that somebody else stepped or reset it in between.
"""

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
"""Outputs of a policy by path; each ``(*batch, *leaf)``."""


class PolicyCarry(Stateful[CarriedOutputs]):
    """What a policy put out beside its actions and finds again in the next row: its state, if it has one.

    Args:
        batch_size: the batch dimensions of a row.
        device: where the policy wants its input; None for the CPU.
    """

    def __init__(self, batch_size: torch.Size = _NO_BATCH, device: torch.device | None = None) -> None:
        self._batch_size, self._device = batch_size, device
        self.outputs: CarriedOutputs = ()

    def clear(self) -> None:
        """Drop it: the environments were reset all together."""
        self.outputs = ()

    def snapshot(self) -> CarriedOutputs:
        """Return copies: a policy may change its state in place."""
        return tuple((path, value.detach().clone()) for path, value in self.outputs)

    def parse(self, state: Any) -> CarriedOutputs:
        """Return the outputs that a saved state holds."""
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
        """Go on from these outputs."""
        self.outputs = tuple((path, output.clone()) for path, output in value)


_Array = np.ndarray[Any, Any]


class StepLimit:
    """Counts the steps of each environment's episode and tells which ones have reached the limit.

    A single gymnasium environment isn't counted in this way: its stepper knows the row of the limit beforehand.

    Args:
        batch_size: of the environments.
        max_steps: the limit; None for no limit, and then nothing is counted.

    Attributes:
        counts: the steps that each episode has taken, int64 ``[*batch]``.
    """

    def __init__(self, batch_size: Sequence[int], max_steps: int | None) -> None:
        self._max_steps = max_steps
        self.counts: _Array = np.zeros(tuple(batch_size), np.int64)

    def step(self, skipped: _Array | None = None) -> _Array | None:
        """Count a step; return where an episode has reached its limit, ``[*batch]`` bool, None if nowhere.

        Args:
            skipped: where the step was no step but a reset, ``[*batch]`` bool.
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
    """The last user of one environment. Not thread-safe, as the environment isn't.

    Attributes:
        started: whether anybody has stepped or reset the environment.
    """

    def __init__(self) -> None:
        self.holder: Lease | None = None
        self.started = False

    def direct(self) -> None:
        """Note a direct call of the environment's methods: nobody holds a lease any more."""
        self.holder = None
        self.started = True


class Lease:
    """One user's claim to an environment: held from the moment that it is taken until somebody else uses it.

    Args:
        usage: of the environment.
    """

    def __init__(self, usage: Usage | None = None) -> None:
        self._usage = usage or Usage()

    def take(self) -> None:
        """Note that the environment is stepped or reset by the lease's owner."""
        self._usage.holder = self
        self._usage.started = True

    @property
    def held(self) -> bool:
        """Whether the lease's owner was the last user."""
        return self._usage.holder is self

    def give_up(self) -> None:
        """Hold it no longer."""
        self._usage.direct()


@dataclass(frozen=True)
class EpisodeRules:
    """What a rollout makes of episodes.

    Attributes:
        reset_when_done: whether an episode's end resets its environment; if not, the root of the following row is the
            last observation with its flags, and whoever owns the rollout stops there.
        max_steps: every episode is truncated at so many steps; None leaves them to the environment.
    """

    reset_when_done: bool = True
    max_steps: int | None = None


FREELY = EpisodeRules()
"""Episodes take their course."""


@dataclass(frozen=True)
class Carry:
    """What a stepper lives by: the root of the step to come.

    Attributes:
        root: its leaves, ``[*batch, *leaf]``.
        steps: the steps that each episode has taken so far, int64 ``[*batch]``.
    """

    root: Mapping[Path, Leaf]
    steps: torch.Tensor


class Stepper(Stateful[Carry]):
    """An environment, or a batch of them, that writes its outcome into the rows of a block.

    A stepper owns the root observations and flags and everything under ``"next"``. It keeps the *carry*, the
    root of the step to come, from one block to the next: that is its state. The environments keep theirs, which
    whoever adopts a carry has to bring to the same place. Not thread-safe: one caller at a time.

    Args:
        batch_size: the environments' batch dimensions, ``()`` for one environment.
        device: where the block's columns must live; None for the CPU.
        rules: what becomes of episodes.
        lease: taken whenever this stepper uses the environment; whoever else uses it takes it away.
    """

    lends: bool = False
    """Whether `block` lends memory of its own, the same again and again."""
    shows_nothing: bool = False
    """Whether nobody gets memory of a block from it and may keep that: then a block may be written again."""
    through_tensordicts: bool = False
    """Whether an environment is stepped through its `step`: only then gradients can flow through it."""

    may_mask: bool = False
    """Whether masks may restrict the environment's actions in the middle of a block.

    Such a stepper redraws the forbidden ones of actions that were drawn before; see `Block.redraw_seed`."""

    def __init__(
        self, batch_size: torch.Size, device: torch.device | None, rules: EpisodeRules, lease: Lease
    ) -> None:
        self.batch_size, self.device, self.rules, self.lease = batch_size, device, rules, lease

    @property
    def disturbed(self) -> bool:
        """Whether somebody else stepped or reset the environment since: the carry isn't its state any more."""
        return not self.lease.held

    def fault(self, t: int, during: str, cause: Exception) -> StepFault:
        """Return what a stepper raises for an error that may be any environment's: the only one's, or the batch's.

        Args:
            t: row of the block at which it came.
            during: ``"step"`` or ``"reset"``.
            cause: what the environment raised, or what is wrong with what it returned.
        """
        return StepFault(t, 0 if self.batch_size.numel() == 1 else BATCH, during, cause)

    # ----------------------------------------------------------------- carry
    @abstractmethod
    def schema(self) -> Schema:
        """Return the columns that the stepper writes, root and ``next``; resets if there was no reset yet.

        A stepper with steps that are no frames has the column ``("collector", "mask")`` too, bool, one value a
        step, and writes it: False where an environment did nothing but reset.
        """

    @abstractmethod
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or those where `mask` (bool, ``batch_size``) is True, into the carry."""

    @abstractmethod
    def root(self) -> dict[Path, Leaf]:
        """Return the carry's leaves: root paths only, ``[*batch, *leaf]``.

        They may be views: valid until the next step or reset.
        """

    @property
    @abstractmethod
    def steps(self) -> torch.Tensor:
        """The steps that each episode has taken, int64 ``[*batch]``; of episodes without a limit they may be zero."""

    @abstractmethod
    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the leaves of `root` as the carry, without a reset: environments keep their own state.

        Args:
            root: its leaves are copied or left alone.
            steps: see `steps`; None for new episodes.
        """

    def snapshot(self) -> Carry:
        """Return the carry; there is a reset if there was none yet."""
        return Carry({path: leaf.clone() for path, leaf in self.root().items()}, self.steps)

    def parse(self, state: Any) -> Carry:
        """Return the carry that `state` stands for; see `Stateful`. An environment that never was is reset."""
        reader, size = StateReader(state, "a stepper's carry"), self.batch_size
        leaves, schema = reader.part("root"), self.schema()
        root: dict[Path, Leaf] = {}
        for path in [path for path in schema.paths if path[0] != "next" and path != MASK]:
            name: Any = path  # fields are called by their paths here
            field = schema[path]
            if field.is_list:
                root[path] = leaves.objects(name, field.blank, (*size, *field.row_shape))
            else:
                root[path] = leaves.tensor(name, field.dtype, (*size, *field.shape))
        return Carry(root, reader.tensor("steps", torch.int64, size))

    def adopt(self, value: Carry) -> None:
        """Go on from a carry."""
        root = {path: leaf.to(self.device, copy=True) for path, leaf in value.root.items()}
        self.load(record_of(root, self.batch_size, self.device), value.steps.clone())

    # ----------------------------------------------------------------- block
    def block(self, schema: Schema, num_steps: int, pool: BufferPool | None = None) -> Block:
        """Return a block that this stepper can write into: fresh columns, or borrowed ones (see `Block.owned`).

        Args:
            schema: at least the columns of `schema` and the action columns.
            num_steps: T.
            pool: where large columns come from.
        """
        return Block(schema, self.batch_size, num_steps, self.device, pool)

    @abstractmethod
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Write into `block` from now on and copy the carry into its row 0.

        Args:
            block: has at least the columns of `schema` and the action columns. It may be the block of an earlier call,
                with what stood there: views of it may be kept for that.
            actions_ready: whether all T actions stand in the block already.
            primed: what the actor writes below ``"next"``, and over columns of the root, for the environment's
                `step` to take over.
        """

    @abstractmethod
    def step(self, t: int) -> None:
        """Take the action of row `t`, write its ``next`` and the root of row ``t + 1``.

        After the last row that root becomes the carry.

        Where an episode ends, ``next`` holds the observation that ended it and the following root the one
        after the reset.

        Raises:
            StepFault: if the environment raised or broke its declaration.
        """

    def run(self, block: Block) -> None:
        """Take all steps of the bound block, whose actions stand there; nobody looks at its rows in between.

        `Block.num_whole` says how many steps are whole, whatever ends the run.
        """
        step, t = self.step, 0
        try:
            for t in range(block.num_steps):
                step(t)
        except BaseException:
            block.num_whole = t
            raise

    def defer(self, seen: Collection[Path] | None) -> None:
        """Learn that until `settle` nobody looks at the bound block but the actor, at the root columns `seen`.

        For steppers that write whole columns in less time than row by row. None: the actor may look at all of them.
        """

    def settle(self) -> None:
        """Write what was deferred, of the steps that are whole."""

    def stop(self, num_steps: int) -> None:
        """End a block before it is full: row `num_steps` becomes the carry.

        Nothing to do for steppers whose carry doesn't stand in the block.
        """

    def confirm(self, num_steps: int) -> None:
        """Raise unless the environments have made so many steps of the bound block; called once the block ends.

        Nothing to do for steppers that make each step themselves. Workers count their steps: their answers alone don't
        show how many they made.

        Raises:
            WorkerError: a worker has made fewer steps than it answered for.
        """


class Actor(Protocol):
    """A policy that reads the root columns of a row and writes its action columns."""

    carry: PolicyCarry
    """What the policy put out and finds again in the next row."""

    @property
    def primed(self) -> Collection[Path]:
        """What it writes below ``"next"``, and over the environment's root columns: its state, most often.

        It finds it in the root of the following row.
        """

    @property
    def seen(self) -> Collection[Path] | None:
        """The root columns that it reads of the bound block; None for any."""

    @property
    def overwrites(self) -> bool:
        """Whether it writes root columns of the environment's."""

    def bind(self, block: Block) -> Callable[[int], None] | None:
        """Write into `block` from now on.

        Returns:
            What acts on row t, that is, writes its action and the policy's other outputs; None if all T actions
            were written at once.
        """

    def check(self) -> None:
        """Raise if what stands in the bound block isn't what the policy put out; called once the block ends.

        Raises:
            PolicyError: an action was converted to the declared dtype, and that changed it.
        """
