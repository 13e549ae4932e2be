"""`EnvService`, which serves a worker's share of a `ParallelEnv`, and the packing of TensorDicts for pipes.

`pack` turns a TensorDict into NumPy arrays, which are pickled four times as fast as a small TensorDict. A TensorDict
that it can't take apart is pickled whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import ObjectColumn
from gleanrl._arrays.schema import Field, numpy_twin, numpy_view
from gleanrl._arrays.tensordicts import Path, TensorDictBuilder, flatten
from gleanrl._process.shared_columns import HALT, ITEM, OWN, STEP, Region
from gleanrl._process.worker_main import WorkerContext
from gleanrl._rollout.protocol import EpisodeRules, Lease
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.members import MemberGroup, RandomRequest, ResetRequest, make_all
from gleanrl.envs.vector.serial import MemberSteppers
from gleanrl.errors import WorkerError


@dataclass(frozen=True)
class Packed:
    """A TensorDict as NumPy arrays.

    Attributes:
        arrays: its leaves.
        dtypes: the dtypes of leaves that NumPy lacks, for example bfloat16.
        batch_size: its batch size, which all nested TensorDicts share.
        device: its device.
    """

    arrays: dict[Path, np.ndarray[Any, Any]]
    dtypes: dict[Path, torch.dtype]
    batch_size: tuple[int, ...]
    device: torch.device | None


def pack(batch: TensorDictBase | None) -> Any:
    """Return a form of `batch` that pickles fast, for `unpack`. It may share memory with `batch`."""
    if batch is None:
        return None
    if isinstance(batch, LazyStackedTensorDict):
        return [batch.stack_dim, [pack(part) for part in batch.unbind(batch.stack_dim)]]
    leaves = flatten(batch)
    plain = all(isinstance(leaf, torch.Tensor) for leaf in leaves.values())
    if not leaves or not plain or not _is_plain(batch):
        return batch.cpu()
    on_cpu = {path: leaf.detach().cpu().contiguous() for path, leaf in leaves.items()}
    arrays = {path: numpy_view(leaf) for path, leaf in on_cpu.items()}
    odd = {p: leaf.dtype for p, leaf in on_cpu.items() if numpy_twin(leaf.dtype) is not leaf.dtype}
    return Packed(arrays, odd, tuple(batch.batch_size), batch.device)


def unpack(packed: Any) -> Any:
    """Return the TensorDict that was packed, or None. It shares no memory with the arrays of a `Packed`."""
    if packed is None or isinstance(packed, TensorDictBase):
        return packed
    if isinstance(packed, list):
        dim, parts = packed
        return LazyStackedTensorDict.lazy_stack([unpack(part) for part in parts], dim)
    leaves = [_tensor(array, packed.dtypes.get(path)) for path, array in packed.arrays.items()]
    batch = TensorDictBuilder(packed.arrays).build(leaves, torch.Size(packed.batch_size))
    return batch if packed.device is None else batch.to(packed.device)


def _tensor(array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor if dtype is None else tensor.view(dtype)


def _is_plain(batch: TensorDictBase) -> bool:
    """Return whether all nested TensorDicts have the batch size of `batch`, and none is empty or a stack."""
    for value in batch.values():
        if isinstance(value, TensorDictBase):
            if value.batch_size != batch.batch_size or isinstance(value, LazyStackedTensorDict):
                return False
            if value.is_empty() or not _is_plain(value):
                return False
    return True


STEP_CODE = b"s"
"""Step every environment with the actions of the next row."""
RUN_CODE = b"r"
"""Step every environment with the actions of all remaining rows of the block."""
BIND_CODE = b"b"
"""Start at row 0 of the bound block again."""
SEED, MASKED = OWN, OWN + 1
"""Indices in a worker's progress.

The owner writes the block's `redraw_seed` to `SEED`, -1 for None. The worker writes to `MASKED` whether a mask may
restrict a member's actions, after each request that can change it.
"""


@dataclass(frozen=True)
class BlockPlan:
    """The location and use of a rollout's rows in shared memory.

    Attributes:
        region: the rows of all environments, not only of this worker's.
        actions_ready: whether the block holds all actions already.
        primed: see `Stepper.bind`.
    """

    region: Region
    actions_ready: bool
    primed: tuple[Path, ...] = ()


@dataclass(frozen=True)
class MemberShare:
    """Makes the service of one worker, in the worker.

    Attributes:
        factories: of the worker's environments.
        first: number of its first environment in the batch.
    """

    factories: Sequence[Factory]
    first: int

    def __call__(self, context: WorkerContext) -> EnvService:
        """Make the environments and return their service."""
        made = make_all(self.factories, context.progress)
        return EnvService(MemberGroup(made, context.progress), context, self.first)


class EnvService:
    """Serves the owner's requests to a worker's environments. The owner calls its public methods by name.

    Args:
        group: the environments; `position` is the worker's progress.
        context: index, progress and shared memory of the worker.
        first: number of its first environment in the batch.
    """

    def __init__(self, group: MemberGroup, context: WorkerContext, first: int) -> None:
        self._group, self._context, self._first = group, context, first
        self._progress = context.progress
        self._steppers: MemberSteppers | None = None
        self._parsed: list[Any] = []
        self._bound: tuple[Block, bool, tuple[Path, ...]] | None = None
        self._t = 0
        self._step: Callable[[int], None] = self._unbound
        self._progress[MASKED] = True  # unknown before the first answer, and True is safe: the owner asks

    def signal(self, code: bytes) -> None:
        """Make one step or all remaining steps of the block, or start it again; see the codes.

        Raises:
            StepFault: if an environment raised.
            WorkerError: for an unknown code, or a step before a block was bound.
        """
        if code == STEP_CODE:
            self._take(self._t)
        elif code == RUN_CODE:
            self._run()
        elif code == BIND_CODE:
            self._rebind()
        else:
            raise WorkerError(f"there's no signal {code!r}")

    def _run(self) -> None:
        """Make the remaining steps of the block, unless the owner sets `HALT`."""
        end = 0 if self._bound is None else self._bound[0].num_steps
        while self._t < end and not self._progress[HALT]:  # HALT: the owner drops the rows
            self._take(self._t)

    def _take(self, t: int) -> None:
        """Step every environment with row `t`, and record it in the progress.

        `MemberGroup` sets `ITEM` before each environment; here `STEP` is set after the last one. If the worker is
        killed, the owner sees from both which environments have made the step.
        """
        self._progress[MASKED] = True  # unknown: a look at the specs would cost too much at every step
        self._t = t + 1
        self._step(t)
        self._progress[ITEM], self._progress[STEP] = 0, t + 1

    def _unbound(self, t: int) -> None:
        raise WorkerError("a step was asked for before a block was bound")

    # ------------------------------------------------------------ TensorDicts
    def step(self, roots: Sequence[Any]) -> list[Any]:
        """Step every environment whose packed root isn't None. Return packed outcomes, None for other environments."""
        outcomes = [pack(outcome) for outcome in self._group.step([unpack(root) for root in roots])]
        self._progress[MASKED] = self._group.masked()
        return outcomes

    def reset(self, requests: Mapping[int, tuple[Any, Mapping[str, Any]]]) -> dict[int, Any]:
        """Reset some environments, by their number in this worker; return their packed roots."""
        unpacked = {i: ResetRequest(unpack(root), kwargs) for i, (root, kwargs) in requests.items()}
        roots = {i: pack(root) for i, root in self._group.reset(unpacked).items()}
        self._progress[MASKED] = self._group.masked()
        return roots

    # --------------------------------------------------------- random actions
    def action_specs(self) -> list[Any]:
        """Return every environment's action spec with its present masks; None if it has no mask."""
        specs = self._group.action_specs()
        self._progress[MASKED] = any(spec is not None for spec in specs)
        return specs

    def rand_actions(self, requests: Mapping[int, tuple[Any, int]]) -> dict[int, Any]:
        """Return packed random actions for packed roots and seeds, by an environment's number in this worker."""
        unpacked = {i: RandomRequest(unpack(root), seed) for i, (root, seed) in requests.items()}
        return {i: pack(drawn) for i, drawn in self._group.rand_actions(unpacked).items()}

    # --------------------------------------------------------------- dispatch
    def seed(self, seeds: Sequence[int], static_seed: bool) -> None:
        """Seed every environment."""
        self._group.seed(seeds, static_seed)

    def attribute(self, name: str) -> list[tuple[bool, Any]]:
        """Return for every environment whether the attribute is callable, and its value if it isn't.

        A bound method can't be sent to the owner, which calls it by name instead.
        """
        found = self._group.attribute(name)
        return [(True, None) if callable(value) else (False, value) for value in found]

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of every environment."""
        self._progress[MASKED] = True  # unknown, even if the method raises
        return self._group.call(name, args, kwargs)

    def state_dicts(self) -> list[Any]:
        """Return the state of every environment."""
        return self._group.state_dicts()

    def parse_states(self, states: Sequence[Any], strict: bool) -> None:
        """Parse a state for every environment, and keep the values for `adopt_states`."""
        self._parsed = self._group.parse_states(states, strict)

    def adopt_states(self) -> None:
        """Let every environment continue from the state that was parsed last."""
        self._progress[MASKED] = True  # the call may change masks: the owner asks
        self._group.adopt_states(self._parsed)

    # ----------------------------------------------------------------- blocks
    def new_steppers(self, rules: EpisodeRules) -> None:
        """Replace the steppers by new ones, which have no block yet."""
        self._steppers = MemberSteppers(self._group.steppers(rules), Lease(), self._group.position)
        self._bound, self._step = None, self._unbound

    @property
    def _current(self) -> MemberSteppers:
        assert self._steppers is not None
        return self._steppers

    def schema(self) -> dict[Path, Field]:
        """Return the columns; reset environments that have never been reset."""
        self._progress[MASKED] = True  # the call may change masks: the owner asks
        return self._current.schema().items()

    def reset_rows(self, mask: Any) -> None:
        """Reset environments into the carry.

        Args:
            mask: bool array ``[num_envs, *batch]`` of the environments to reset; None for all.
        """
        self._progress[MASKED] = True  # the call may change masks: the owner asks
        self._current.reset(None if mask is None else torch.from_numpy(np.array(mask)))

    def root(self) -> Any:
        """Return the leaves of the carry, as arrays or object columns."""
        leaves = self._current.root().items()
        return {path: leaf if isinstance(leaf, ObjectColumn) else leaf.numpy() for path, leaf in leaves}

    def steps(self) -> Any:
        """Return the number of steps of each episode."""
        return self._current.steps.numpy()

    def load(self, roots: Any, steps: Any) -> None:
        """Take a packed root of these environments as the carry, and the number of steps of their episodes."""
        self._current.load(unpack(roots), torch.from_numpy(np.array(steps)))

    def bind(self, plan: BlockPlan) -> dict[Path, ObjectColumn]:
        """Write steps into a block of the shared memory from now on; return the object columns of its first root."""
        block = self._context.segment.block(plan.region)
        own_rows = slice(self._first, self._first + len(self._group))
        part = Block(
            block.schema,
            (len(self._group), *plan.region.rows.batch_size[1:]),
            block.num_steps,
            columns=[column[own_rows] for column in block.columns],
        )
        self._bound = (part, plan.actions_ready, plan.primed)
        self._rebind()
        return self._lists(-1)

    def step_lists(self, t: int, inputs: Mapping[Path, ObjectColumn]) -> dict[Path, ObjectColumn]:
        """Step every environment with row `t` of a block that has object columns.

        Args:
            t: the row.
            inputs: the row's object columns that the environments read.

        Returns:
            The object columns of the row's outcome and of the following root.
        """
        assert self._bound is not None
        for path, objects in inputs.items():
            self._bound[0].time_first(path)[t].copy_(objects)
        self._take(t)
        return self._lists(t)

    def _lists(self, t: int) -> dict[Path, ObjectColumn]:
        """Return the object columns of the outcome of step `t` and of the following root."""
        assert self._bound is not None
        block, schema = self._bound[0], self._current.schema()
        found: dict[Path, ObjectColumn] = {}
        for path in block.schema.lists:
            row = t if path[0] == "next" else t + 1
            if path in schema and 0 <= row < block.num_steps:
                found[path] = block.time_first(path)[row]
        return found

    def _rebind(self) -> None:
        """Start at row 0 of the bound block.

        The redraw seed depends on the environment's number in the batch, so that draws don't depend on the number of
        workers.
        """
        assert self._bound is not None
        seed = self._progress[SEED]
        self._bound[0].redraw_seed = None if seed < 0 else seed + self._first * self._current.width
        self._current.bind(*self._bound)
        self._t, self._step = 0, self._current.step
        self._progress[ITEM], self._progress[STEP] = 0, 0

    def stop(self, num_steps: int) -> None:
        """End the block at row `num_steps`."""
        self._current.stop(num_steps)

    def close(self) -> None:
        """Close every environment."""
        self._group.close()
