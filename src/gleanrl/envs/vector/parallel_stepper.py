"""`ParallelStepper`, which steps environments in worker processes into a block in shared memory.

The block is lent: the policy and the workers write to the same rows, and no row is copied. The consumer of the batch
copies the block once, one whole column at a time (`Block.owned`), which takes a dozen calls for each batch. Copies of
rows would take a dozen calls for each step. Rows are copied only if the block is not in this shared memory, for
example in a batch of batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import Leaf, ObjectColumn, cat_leaves
from gleanrl._arrays.schema import Schema
from gleanrl._arrays.tensordicts import Path
from gleanrl._process.shared_columns import Region, SharedRows, SharedSegment
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import EpisodeRules, Lease, Stepper
from gleanrl.envs.vector.serial import require_one_schema
from gleanrl.envs.vector.worker import BIND_CODE, STEP_CODE, BlockPlan, pack


class MemberShares(Protocol):
    """The worker pool that a `ParallelStepper` uses, with the environments of each worker.

    Errors of environments and workers are raised as `StepFault`.
    """

    shares: list[range]
    """The environment numbers of each worker."""

    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""

    def signal(self, code: bytes, during: str) -> None:
        """Send a one-byte signal to every worker and wait for all answers."""

    def run(self) -> None:
        """Let every worker make all steps of its block, and wait for all workers."""

    def break_off(self) -> None:
        """Stop the workers of an interrupted `run`."""

    def seed_redraws(self, seed: int | None) -> None:
        """Set the `redraw_seed` of the block that the workers bind next."""

    def made(self) -> list[int]:
        """Return the number of steps of the block that each environment has made."""

    def confirm(self, num_steps: int) -> None:
        """Check that every worker has made `num_steps` steps of the block."""

    def ask(self, during: str, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the services of some workers; return the results by worker."""


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
        worker_pool: MemberShares,
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
            self._ask_all("reset", "new_steppers", self.rules)
            self.lease.take()

    def _ask_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        requests = dict.fromkeys(range(len(self._worker_pool.shares)), arguments)
        return list(self._worker_pool.ask(during, name, requests).values())

    # ------------------------------------------------------------------ carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or the environments where `mask` is True."""
        self._claim()
        if mask is None:
            self._ask_all("reset", "reset_rows", None)
        else:
            self._reset_where(mask)
        if self._mirror is not None:
            self._mirror.reset_since = True

    def _reset_where(self, mask: torch.Tensor) -> None:
        parts = {w: mask[share.start : share.stop] for w, share in enumerate(self._worker_pool.shares)}
        wanted = {w: (part.cpu().numpy(),) for w, part in parts.items() if bool(part.any())}
        self._worker_pool.ask("reset", "reset_rows", wanted)

    def root(self) -> dict[Path, Leaf]:
        """Return the workers' carries, concatenated."""
        self.schema()
        each = self._ask_all("reset", "root")
        parts = [{path: _leaf(value) for path, value in leaves.items()} for leaves in each]
        return {path: cat_leaves([leaves[path] for leaves in parts]) for path in each[0]}

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps of each episode."""
        return torch.cat([torch.tensor(part) for part in self._ask_all("reset", "steps")])

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the rows of `root` as the environments' carries."""
        self.lease.give_up()
        self._claim()
        counts = torch.zeros(self.batch_size, dtype=torch.int64, device="cpu") if steps is None else steps
        parts = {
            w: (pack(root[share.start : share.stop]), counts[share.start : share.stop].numpy())
            for w, share in enumerate(self._worker_pool.shares)
        }
        self._worker_pool.ask("reset", "load", parts)

    def schema(self) -> Schema:
        """Return the columns, which must be equal for all environments."""
        self._claim()
        if self._schema is None:
            schemas = [Schema(fields) for fields in self._ask_all("reset", "schema")]
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
            self._take_lists(-1, self._ask_all("reset", "bind", plan))
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
        self._take_lists(t, list(self._worker_pool.ask("step", "step_lists", arguments).values()))

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
        self._ask_all("step", "stop", num_steps)

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
