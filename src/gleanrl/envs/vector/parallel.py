"""`ParallelEnv`, a batch of environments in worker processes, and `ParallelStepper`, its stepper.

The stepper steps the environments into a block in shared memory. The block is lent: the policy and the workers write to
the same rows, and no row is copied. The consumer of the batch copies the block once, one whole column at a time
(`Block.owned`), which takes a dozen calls for each batch. Copies of rows would take a dozen calls for each step. Rows
are copied only if the block is not in this shared memory, for example in a batch of batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.devices import on_cpu
from gleanrl._arrays.ragged import Leaf, ObjectColumn, cat_leaves
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import Path
from gleanrl._process.shared_columns import Region, SharedRows
from gleanrl._process.worker import Timeouts
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Lease, Stepper
from gleanrl._util import is_native, positive_or_none
from gleanrl.envs.base import REPLACED
from gleanrl.envs.vector.base import MEMBERWISE, BatchedEnv, BatchOptions, as_timeouts
from gleanrl.envs.vector.factories import Factory
from gleanrl.envs.vector.serial import SerialEnv, require_one_schema
from gleanrl.envs.vector.worker import BIND_CODE, STEP_CODE, BlockPlan, pack
from gleanrl.envs.vector.worker_pool import EnvWorkerPool
from gleanrl.errors import InvalidArgumentError


class ParallelStepper(Stepper):
    """Steps environments in worker processes; see `Stepper` for the contract.

    Each worker has a stepper for its environments. If another `ParallelStepper` of the same environments is used, the
    workers replace their steppers. This one makes them replace those again at its next reset or block.

    Args:
        worker_pool: the worker pool.
        batch_size: of all environments.
        rules: see `Stepper`.
        lease: see `Stepper`.
        may_mask: see `Stepper`.
    """

    lends = True

    def __init__(
        self,
        worker_pool: EnvWorkerPool,
        batch_size: torch.Size,
        rules: EpisodeRules,
        lease: Lease,
        may_mask: bool = False,
    ) -> None:
        super().__init__(batch_size, None, rules, lease)
        self.may_mask = may_mask
        self._worker_pool = worker_pool
        self._schema: Schema | None = None
        self._region: Region | None = None
        self._block: Block | None = None
        self._plan: BlockPlan | None = None
        self._mirror: _Mirror | None = None

    # ------------------------------------------------------------------ state
    def _claim(self) -> None:
        """Make the workers use steppers of this object, unless they do."""
        if not self.lease.held:
            # No stepper holds the lease until the workers have their new steppers, so an interrupt can't leave a
            # lease whose workers don't match.
            self.lease.give_up()
            self._plan = None
            self._worker_pool.call_all("reset", "new_steppers", self.rules)
            self.lease.take()

    # ------------------------------------------------------------------ carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or the environments where `mask` is True."""
        self._claim()
        if mask is None:
            self._worker_pool.call_all("reset", "reset_rows", None)
        else:
            self._reset_where(mask)
        if self._mirror is not None:
            self._mirror.reset_since = True

    def _reset_where(self, mask: torch.Tensor) -> None:
        parts = {w: mask[share.start : share.stop] for w, share in enumerate(self._worker_pool.shares)}
        wanted = {w: (part.cpu().numpy(),) for w, part in parts.items() if bool(part.any())}
        self._worker_pool.call("reset", "reset_rows", wanted)

    def root(self) -> dict[Path, Leaf]:
        """Return the workers' carries, concatenated."""
        self.schema()
        each = self._worker_pool.call_all("reset", "root")
        parts = [{path: _leaf(value) for path, value in leaves.items()} for leaves in each]
        return {path: cat_leaves([leaves[path] for leaves in parts]) for path in each[0]}

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps of each episode."""
        return torch.cat([torch.tensor(part) for part in self._worker_pool.call_all("reset", "steps")])

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the rows of `root` as the environments' carries."""
        self.lease.give_up()
        self._claim()
        counts = torch.zeros(self.batch_size, dtype=torch.int64, device="cpu") if steps is None else steps
        parts = {
            w: (pack(root[share.start : share.stop]), counts[share.start : share.stop].numpy())
            for w, share in enumerate(self._worker_pool.shares)
        }
        self._worker_pool.call("reset", "load", parts)

    def schema(self) -> Schema:
        """Return the columns, which must be equal for all environments."""
        self._claim()
        if self._schema is None:
            schemas = [Schema(fields) for fields in self._worker_pool.call_all("reset", "schema")]
            require_one_schema(schemas)
            self._schema = schemas[0]
        return self._schema

    # ------------------------------------------------------------------ block
    def block(self, schema: Schema, num_steps: int, pool: BufferPool | None = None) -> Block:
        """Return a block in the shared memory; `pool` has no effect.

        It is the last block, with its contents, if `num_steps` is equal and `schema` is the same object.
        """
        block = self._block
        if block is None or block.schema is not schema or block.num_steps != num_steps:
            segment = self._worker_pool.segment
            self._block = self._plan = None  # an interrupt must not leave a block of a former region
            self._region = segment.region("rows", SharedRows(schema, self.batch_size, num_steps))
            block = self._block = segment.block(self._region)
        return block

    def _mirrored(self, block: Block, primed: tuple[Path, ...]) -> _Mirror:
        """Return a `_Mirror` between `block`, which the workers can't see, and a block in the shared memory."""
        if self._mirror is None or self._mirror.block is not block or self._mirror.primed != primed:
            shared = self.block(block.schema, block.num_steps)
            self._mirror = _Mirror(block, shared, self.schema(), primed)
        return self._mirror

    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Let the workers write into `block`; rows of a block that isn't in the shared memory are copied.

        If only the contents of the block changed since the last call, a one-byte signal is enough. Otherwise each
        worker gets a message with the plan.
        """
        primed = tuple(primed)
        mirror = None if block is self._block else self._mirrored(block, primed)
        if mirror is not None:
            mirror.all_sent = actions_ready
            if actions_ready:
                mirror.send_all()
        self._claim()
        self._worker_pool.seed_redraws(block.redraw_seed if actions_ready else None)
        plan = self._plan
        known = plan is not None and (plan.actions_ready, plan.primed) == (actions_ready, primed)
        if known and not block.schema.lists:
            self._worker_pool.signal(BIND_CODE, "reset")
        else:
            assert self._region is not None
            self._plan = None  # an error may leave workers without the new plan: then it is sent again
            plan = BlockPlan(self._region, actions_ready, primed)
            self._take_lists(-1, self._worker_pool.call_all("reset", "bind", plan))
            self._plan = plan
        self._mirror = mirror
        if mirror is not None:
            mirror.fetch_root(0)

    def step(self, t: int) -> None:
        """Step every environment with the action of row `t`. Call it in the order of rows, which the workers count."""
        mirror = self._mirror
        if mirror is None:
            self._signal_step(t)
            return
        mirror.send(t)
        self._signal_step(t)
        mirror.fetch(t)

    def _signal_step(self, t: int) -> None:
        """Let the workers make step `t`. Object columns aren't in shared memory and travel by message."""
        assert self._block is not None
        if not self._block.schema.lists:
            self._worker_pool.signal(STEP_CODE, "step")
            return
        block, schema = self._block, self.schema()
        inputs = {path: block.time_first(path)[t] for path in block.schema.lists if path not in schema}
        arguments = {
            w: (t, {path: row[share.start : share.stop] for path, row in inputs.items()})
            for w, share in enumerate(self._worker_pool.shares)
        }
        self._take_lists(t, list(self._worker_pool.call("step", "step_lists", arguments).values()))

    def _take_lists(self, t: int, answers: Sequence[Mapping[Path, ObjectColumn]]) -> None:
        """Copy the workers' object columns of step `t`, and of the following root, into the block."""
        for share, found in zip(self._worker_pool.shares, answers, strict=True):
            for path, objects in found.items():
                assert self._block is not None
                row = t if path[0] == "next" else t + 1
                self._block.time_first(path)[row][share.start : share.stop].copy_(objects)

    def run(self, block: Block) -> None:
        """Make all steps of the block, whose actions must be set; no worker waits for another one.

        After an interrupt the workers are stopped, so that they don't write into the block later.
        """
        if self._mirror is not None or block.schema.lists:
            super().run(block)
            return
        try:
            self._worker_pool.run()
        except StepFault:
            raise
        except BaseException:
            try:
                self._worker_pool.break_off()
            finally:  # the number of whole steps is set even if a second interrupt came
                block.num_complete = min(self._worker_pool.made())
            raise

    def stop(self, num_steps: int) -> None:
        """End the block at row `num_steps`."""
        self._worker_pool.call_all("step", "stop", num_steps)

    def confirm(self, num_steps: int) -> None:
        """Check that every worker has made `num_steps` steps of the bound block."""
        self._worker_pool.confirm(num_steps)


def _leaf(value: Any) -> Leaf:
    return value if isinstance(value, ObjectColumn) else torch.tensor(value)


class _Mirror:
    """Copies rows between a block in this process's memory and a block in shared memory.

    Args:
        block: the block that the caller reads, for example a part of the block of an enclosing batch.
        shared: the block that the workers see.
        schema: the columns that the workers write; they read all other columns.
        primed: columns that the workers both read and write.
    """

    def __init__(self, block: Block, shared: Block, schema: Schema, primed: tuple[Path, ...]) -> None:
        self.block, self.primed = block, primed
        self.reset_since = False
        """Whether environments were reset after the last row, so that the caller's block alone has their roots."""
        self.all_sent = False
        """Whether the workers have all rows of their inputs. They may redraw actions then, which are copied back."""
        self._last = block.num_steps - 1
        read = [path for path in block.schema.paths if path not in schema or path in primed]
        self._inputs = [(shared.column(p), block.column(p)) for p in read]
        self._sent = [(shared.rows(p), block.rows(p)) for p in read]
        self._roots = [(block.rows(p), shared.rows(p)) for p in schema.paths if p[0] != "next"]
        self._nexts = [(block.rows(p), shared.rows(p)) for p in schema.paths if p[0] == "next"]

    def send_all(self) -> None:
        """Copy all rows of the workers' inputs to the shared block."""
        for target, source in self._inputs:
            target.copy_(source)

    def send(self, t: int) -> None:
        """Copy row `t` of the workers' inputs to the shared block."""
        if not self.all_sent:
            for target, source in self._sent:
                target[t].copy_(source[t])
        if self.reset_since:
            self.reset_since = False
            for source, target in self._roots:
                target[t].copy_(source[t])

    def fetch(self, t: int) -> None:
        """Copy the outcome of row `t` and the following root from the shared block."""
        for target, source in self._nexts:
            target[t].copy_(source[t])
        if self.all_sent:
            for source, target in self._sent:
                target[t].copy_(source[t])
        if t < self._last:
            self.fetch_root(t + 1)

    def fetch_root(self, t: int) -> None:
        """Copy the root of row `t` from the shared block."""
        self.reset_since = False
        for target, source in self._roots:
            target[t].copy_(source[t])


class ParallelEnv(BatchedEnv):
    """Several environments in worker processes that step as one, ``[num_workers, *batch]``.

    The data are bit for bit equal to the data of a `SerialEnv` with the same environments and seeds. Gradients don't
    flow through steps. In a rollout the workers write their rows into shared memory, from which the policy reads. Each
    batch is copied once. Single calls of `step` and `reset` send TensorDicts through pipes, which is slower.

    The workers start at the first use. They are forked from a process that has imported torch but not your program, so
    your main module needs no ``if __name__ == "__main__"``. Its functions, lambdas and classes are pickled by value.
    The workers end with `close`, with the last reference to the batch, or with your program, even if it is killed.
    Linux only.

    An exception of an environment is raised in the calling process, with the same type if that is possible. Its cause
    shows the worker's traceback. If a worker ends unexpectedly, a `WorkerCrashedError` is raised. If it spends more
    time on one environment than `timeouts` allow, a `WorkerTimeoutError` is raised. Both errors name the environment
    and show the worker's stack. After either of them the batch is closed.

    See `SerialEnv` for the other arguments and errors.

    Args:
        num_processes: number of worker processes, which share the environments evenly; None for one for each
            environment.
        num_sub_threads: torch threads of each worker.
        serial_for_single: whether to return a `SerialEnv` if `num_workers` is 1.
        mp_start_method: ``"fork"``, ``"forkserver"``, ``"spawn"`` or None; accepted for compatibility, without effect.
            Workers are always forked from a separate process, and inherit no threads of yours.
        daemon: no effect; workers always end with this process.
        timeouts: how long workers may take; None for the defaults of `Timeouts`.

    Raises:
        InvalidArgumentError: for a value that isn't supported, or if the environments' devices differ and `device` is
            None (also a ValueError).
        InvalidTypeError: if `timeouts` isn't a `Timeouts` (also a TypeError).
        LengthError: if a list doesn't have one entry for each environment (also a RuntimeError).

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.set_seed(1)
        2
        >>> env.rollout(5, break_when_any_done=False).shape
        torch.Size([2, 5])
        >>> env.close()
    """

    def __new__(cls, num_workers: Any = None, create_env_fn: Any = None, **kwargs: Any) -> Any:
        """Return a `ParallelEnv`, or a `SerialEnv` if `serial_for_single` is set and there is one environment.

        The `SerialEnv` ignores `num_processes`, `timeouts` and `num_sub_threads`.
        """
        if kwargs.get("serial_for_single") and num_workers == 1:
            for name in ("num_processes", "timeouts", "num_sub_threads"):
                kwargs.pop(name, None)
            return SerialEnv(num_workers, create_env_fn, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        num_processes: int | None = None,
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
        timeouts: Timeouts | None = None,
    ) -> None:
        options = BatchOptions.of(locals())
        super().__init__(num_workers, create_env_fn, create_env_kwargs, options)
        wanted = positive_or_none("num_processes", num_processes) or num_workers
        if wanted > num_workers:
            raise InvalidArgumentError(
                f"num_processes: expected at most the {num_workers} environments, got {wanted}"
            )
        self.num_processes = wanted
        self._num_sub_threads = positive_or_none("num_sub_threads", num_sub_threads) or 1
        self.timeouts = as_timeouts(timeouts)

    # ------------------------------------------------------------------- life
    def _make_runner(self, makers: Sequence[Factory]) -> EnvWorkerPool:
        width = self.numel() // self.num_workers
        made = EnvWorkerPool(makers, self.num_processes, self.timeouts, self._num_sub_threads, width)
        # The batch may be dropped without `close`, and its workers must not outlive it.
        weakref.finalize(self, made.close)
        return made

    @property
    def processes(self) -> list[int]:
        """The process ids of the workers; empty before the start."""
        return self.runner.processes if self.is_started else []

    # ------------------------------------------------------------------ steps
    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Start the batch, and return a stepper whose workers write into the rows of a block.

        Such a stepper requires equal shapes, a batch and environments on the CPU, and no subclass that overrides the
        way the batch steps. Otherwise the stepper calls the batch's `step` and `reset`.
        """
        stepper = self.host_stepper(rules) if on_cpu(self.device) else None
        return super().make_stepper(rules) if stepper is None else stepper

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Start the batch; return a stepper with rows on the CPU for a batch on any device, or None.

        There is none if the environments' shapes differ, if an environment isn't on the CPU, or if a subclass
        overrides the way the batch steps.
        """
        self.start()
        if self.unlike_shapes or not is_native(self, *REPLACED, *MEMBERWISE, of=ParallelEnv):
            return None
        if not all(on_cpu(metadata.device) for metadata in self.meta_data):
            return None
        may_mask = any(metadata.may_mask for metadata in self.meta_data)
        return ParallelStepper(self.runner, self.batch_size, rules, Lease(self.usage), may_mask)
