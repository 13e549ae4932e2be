"""`EnvService`, which serves a worker's share of a batch of environments, and the packing of TensorDicts for pipes.

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
from gleanrl._os.proc import run_on
from gleanrl._process.shared_columns import HALT, ITEM, OWN, STEP, Region
from gleanrl._process.worker_main import WorkerContext
from gleanrl._rollout.protocol import EpisodeRules, Lease
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.members import TENSORDICT_REQUESTS, MemberGroup
from gleanrl.envs.vector.serial import MemberSteppers
from gleanrl.errors import WorkerError


class Packed(tuple[Callable[..., TensorDictBase], tuple[Any, ...]]):
    """A function and its arguments, which is unpickled as the function's result, a TensorDict."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple(self)


def pack(value: Any) -> Any:
    """Return a TensorDict in a form that pickles fast, and other values unchanged.

    The form may share memory with the TensorDict. It arrives as a TensorDict with its own memory.
    """
    if not isinstance(value, TensorDictBase):
        return value
    if isinstance(value, LazyStackedTensorDict):
        rows = [pack(row) for row in value.unbind(value.stack_dim)]
        return Packed((LazyStackedTensorDict.lazy_stack, (rows, value.stack_dim)))
    leaves = flatten(value)
    plain = all(isinstance(leaf, torch.Tensor) for leaf in leaves.values())
    if not leaves or not plain or not _is_plain(value):
        return value.cpu()
    on_cpu = {path: leaf.detach().cpu().contiguous() for path, leaf in leaves.items()}
    arrays = {path: numpy_view(leaf) for path, leaf in on_cpu.items()}
    # The dtypes that NumPy lacks, for example bfloat16.
    odd = {p: leaf.dtype for p, leaf in on_cpu.items() if numpy_twin(leaf.dtype) is not leaf.dtype}
    return Packed((_unpacked, (arrays, odd, tuple(value.batch_size), value.device)))


def packed(name: str, values: Mapping[int, Any]) -> dict[int, Any]:
    """Return the arguments or results of a request by environment, with packed TensorDicts, also in tuples.

    Requests that call the user's methods or read attributes keep their TensorDicts, since a `Packed` one loses its
    gradients and the names of its dimensions.
    """
    if name not in TENSORDICT_REQUESTS:
        return dict(values)
    return {
        index: tuple([pack(item) for item in value]) if type(value) is tuple else pack(value)
        for index, value in values.items()
    }


def _unpacked(
    arrays: dict[Path, np.ndarray[Any, Any]],
    odd: dict[Path, torch.dtype],
    batch_size: tuple[int, ...],
    device: torch.device | None,
) -> TensorDictBase:
    leaves = [_tensor(array, odd.get(path)) for path, array in arrays.items()]
    batch = TensorDictBuilder(arrays).build(leaves, torch.Size(batch_size))
    return batch if device is None else batch.to(device)


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
        cpus: the processors that the worker may run on; None for all.
    """

    factories: Sequence[Factory]
    first: int
    cpus: Sequence[int] | None = None

    def __call__(self, context: WorkerContext) -> EnvService:
        """Make the environments and return their service."""
        if self.cpus is not None:
            run_on(self.cpus)
        group = MemberGroup(self.factories, context.progress)
        group.start()
        return EnvService(group, context, self.first)


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

    def answer(self, number: int, name: str, requests: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Let some environments answer a request; return their packed results by number in this worker.

        Args:
            number: of the request; see `EnvMember.answer`.
            name: the method of `EnvMember`.
            requests: its arguments, by an environment's number in this worker.
        """
        self._progress[MASKED] = True  # unknown, even if the environment raises
        answers = self._group.answer(number, name, requests)
        self._progress[MASKED] = any(member.masked() for member in self._group.members)
        return packed(name, answers)

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
        """Take the root of these environments as the carry, and the number of steps of their episodes."""
        self._current.load(roots, torch.from_numpy(np.array(steps)))

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
