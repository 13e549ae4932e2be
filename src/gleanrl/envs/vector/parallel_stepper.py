"""How the environments of worker processes step into the rows of a block: one that stands in shared memory.

The block is lent: actor and workers work on the very same rows, nothing is copied from step to step, and whoever
hands out the batch copies the block once, whole column by whole column (`Block.owned`). That is cheaper than a copy of
each row: a dozen calls for a batch instead of a dozen for a step. Only where the rows must stand elsewhere, as those
of a batch within a batch, is each row copied.
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
    """The workers of a batch of environments, each with its share of them; faults come as `StepFault`."""

    shares: list[range]
    """The numbers of the environments of each worker."""

    @property
    def segment(self) -> SharedSegment:
        """The memory shared with the workers."""

    def signal(self, code: bytes, during: str) -> None:
        """Send a signal to every worker and wait."""

    def run(self) -> None:
        """Let every worker take all steps of its block, and wait."""

    def break_off(self) -> None:
        """End a run of steps that was interrupted."""

    def seed_redraws(self, seed: int | None) -> None:
        """Tell the workers the `redraw_seed` of the block that they bind next."""

    def made(self) -> list[int]:
        """Return the steps of the block that each environment has made."""

    def confirm(self, num_steps: int) -> None:
        """Raise unless every worker has made so many steps of the block."""

    def ask(self, during: str, name: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some workers' servants; return what each gave."""


class ParallelStepper(Stepper):
    """Steps environments in worker processes; see `Stepper` for the contract.

    The workers hold the steppers. Another stepper of the same environments takes them over; this one gets them
    back with its next reset or block.

    Args:
        crew: the workers.
        batch_size: of all environments.
        rules: see `Stepper`.
        lease: see `Stepper`.
        may_mask: see `Stepper`.
    """

    lends = True

    def __init__(
        self,
        crew: MemberShares,
        batch_size: torch.Size,
        rules: EpisodeRules,
        lease: Lease,
        may_mask: bool = False,
    ) -> None:
        super().__init__(batch_size, None, rules, lease)
        self.may_mask = may_mask
        self._crew = crew
        self._schema: Schema | None = None
        self._region: Region | None = None
        self._block: Block | None = None
        self._plan: BlockPlan | None = None
        self._mirror: _Mirror | None = None

    # ------------------------------------------------------------------ state
    def _claim(self) -> None:
        """Let the workers hold this stepper's steppers."""
        if not self.lease.held:
            # Nobody holds the workers until this stepper does, whatever interrupts it.
            self.lease.give_up()
            self._plan = None
            self._ask_all("reset", "new_steppers", self.rules)
            self.lease.take()

    def _ask_all(self, during: str, name: str, *arguments: Any) -> list[Any]:
        everybody = dict.fromkeys(range(len(self._crew.shares)), arguments)
        return list(self._crew.ask(during, name, everybody).values())

    # ------------------------------------------------------------------ carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset every environment, or those where `mask` is True."""
        self._claim()
        if mask is None:
            self._ask_all("reset", "reset_rows", None)
        else:
            self._reset_where(mask)
        if self._mirror is not None:
            self._mirror.reset_since = True

    def _reset_where(self, mask: torch.Tensor) -> None:
        parts = {w: mask[share.start : share.stop] for w, share in enumerate(self._crew.shares)}
        wanted = {w: (part.cpu().numpy(),) for w, part in parts.items() if bool(part.any())}
        self._crew.ask("reset", "reset_rows", wanted)

    def root(self) -> dict[Path, Leaf]:
        """Return the carries, one after the other."""
        self.schema()
        each = self._ask_all("reset", "root")
        parts = [{path: _leaf(value) for path, value in leaves.items()} for leaves in each]
        return {path: cat_leaves([leaves[path] for leaves in parts]) for path in each[0]}

    @property
    def steps(self) -> torch.Tensor:
        """The steps that each episode has taken."""
        return torch.cat([torch.tensor(part) for part in self._ask_all("reset", "steps")])

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take the rows of `root` as the environments' carries."""
        self.lease.give_up()
        self._claim()
        counts = torch.zeros(self.batch_size, dtype=torch.int64, device="cpu") if steps is None else steps
        parts = {
            w: (pack(root[share.start : share.stop]), counts[share.start : share.stop].numpy())
            for w, share in enumerate(self._crew.shares)
        }
        self._crew.ask("reset", "load", parts)

    def schema(self) -> Schema:
        """Return the columns, which must be those of every environment."""
        self._claim()
        if self._schema is None:
            schemas = [Schema(fields) for fields in self._ask_all("reset", "schema")]
            require_one_schema(schemas)
            self._schema = schemas[0]
        return self._schema

    # ------------------------------------------------------------------ block
    def block(self, schema: Schema, num_steps: int, pool: BufferPool | None = None) -> Block:
        """Return a block in the shared memory, the same for the same arguments."""
        block = self._block
        if block is None or block.schema is not schema or block.num_steps != num_steps:
            segment = self._crew.segment
            self._block = self._plan = None  # until region and block belong together again
            self._region = segment.region("rows", SharedRows(schema, self.batch_size, num_steps))
            block = self._block = segment.block(self._region)
        return block

    def _mirrored(self, block: Block, primed: tuple[Path, ...]) -> _Mirror:
        """Return what copies between `block`, whose memory the workers can't see, and one that they can."""
        if self._mirror is None or self._mirror.block is not block or self._mirror.primed != primed:
            shared = self.block(block.schema, block.num_steps)
            self._mirror = _Mirror(block, shared, self.schema(), primed)
        return self._mirror

    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Let the workers write into `block`; its rows are copied to and fro, unless `block` returned it."""
        primed = tuple(primed)
        mirror = None if block is self._block else self._mirrored(block, primed)
        if mirror is not None:
            mirror.all_sent = actions_ready
            if actions_ready:
                mirror.send_all()
        self._claim()
        self._crew.seed_redraws(block.redraw_seed if actions_ready else None)
        plan = self._plan
        known = plan is not None and (plan.actions_ready, plan.primed) == (actions_ready, primed)
        if known and not block.schema.lists:
            self._crew.signal(BIND_CODE, "reset")
        else:
            assert self._region is not None
            self._plan = None  # until every worker has it
            plan = BlockPlan(self._region, actions_ready, primed)
            self._take_lists(-1, self._ask_all("reset", "bind", plan))
            self._plan = plan
        self._mirror = mirror
        if mirror is not None:
            mirror.fetch_root(0)

    def step(self, t: int) -> None:
        """Step every environment with the action of row `t`; rows come in order."""
        mirror = self._mirror
        if mirror is None:
            self._signal_step(t)
            return
        mirror.send(t)
        self._signal_step(t)
        mirror.fetch(t)

    def _signal_step(self, t: int) -> None:
        """Let the workers step; what columns don't hold goes to and fro by message."""
        assert self._block is not None
        if not self._block.schema.lists:
            self._crew.signal(STEP_CODE, "step")
            return
        block, mine = self._block, self.schema()
        given = {path: block.time_first(path)[t] for path in block.schema.lists if path not in mine}
        arguments = {
            w: (t, {path: row[share.start : share.stop] for path, row in given.items()})
            for w, share in enumerate(self._crew.shares)
        }
        self._take_lists(t, list(self._crew.ask("step", "step_lists", arguments).values()))

    def _take_lists(self, t: int, answers: Sequence[Mapping[Path, ObjectColumn]]) -> None:
        """Take the workers' lists of step `t`, and of the root that follows it, into the block."""
        for share, found in zip(self._crew.shares, answers, strict=True):
            for path, objects in found.items():
                assert self._block is not None
                row = t if path[0] == "next" else t + 1
                self._block.time_first(path)[row][share.start : share.stop].copy_(objects)

    def run(self, block: Block) -> None:
        """Take all steps of the block with the actions that stand there; no worker waits for another."""
        if self._mirror is not None or block.schema.lists:
            super().run(block)
            return
        try:
            self._crew.run()
        except StepFault:
            raise
        except BaseException:
            try:
                self._crew.break_off()
            finally:  # also if a second interrupt came
                block.num_whole = min(self._crew.made())
            raise

    def stop(self, num_steps: int) -> None:
        """End the block at row `num_steps`."""
        self._ask_all("step", "stop", num_steps)

    def confirm(self, num_steps: int) -> None:
        """Raise unless every worker has made so many steps of the bound block."""
        self._crew.confirm(num_steps)


def _leaf(value: Any) -> Leaf:
    return value if isinstance(value, ObjectColumn) else torch.tensor(value)


class _Mirror:
    """Copies rows between a block of somebody else's (a batch inside another batch, say) and a shared one.

    Args:
        block: the other's.
        shared: what the workers see.
        schema: the columns that the workers write; all others they read.
        primed: those that they read, too.
    """

    def __init__(self, block: Block, shared: Block, schema: Schema, primed: tuple[Path, ...]) -> None:
        self.block, self.primed = block, primed
        self.reset_since = False
        """Whether somebody had environments reset since the last row, and wrote their roots into the next one."""
        self.all_sent = False
        """Whether the workers have every row of what they read; they may have redrawn actions then."""
        self._last = block.num_steps - 1
        read = [path for path in block.schema.paths if path not in schema or path in primed]
        self._inputs = [(shared.column(p), block.column(p)) for p in read]
        self._sent = [(shared.rows(p), block.rows(p)) for p in read]
        self._roots = [(block.rows(p), shared.rows(p)) for p in schema.paths if p[0] != "next"]
        self._nexts = [(block.rows(p), shared.rows(p)) for p in schema.paths if p[0] == "next"]

    def send_all(self) -> None:
        """Show the workers every row of what they read."""
        for target, source in self._inputs:
            target.copy_(source)

    def send(self, t: int) -> None:
        """Show the workers row `t` of what they read."""
        if not self.all_sent:
            for target, source in self._sent:
                target[t].copy_(source[t])
        if self.reset_since:
            self.reset_since = False
            for source, target in self._roots:
                target[t].copy_(source[t])

    def fetch(self, t: int) -> None:
        """Take over the outcome of row `t` and the root that follows."""
        for target, source in self._nexts:
            target[t].copy_(source[t])
        if self.all_sent:
            for source, target in self._sent:
                target[t].copy_(source[t])
        if t < self._last:
            self.fetch_root(t + 1)

    def fetch_root(self, t: int) -> None:
        """Take over the root of row `t`."""
        self.reset_since = False
        for target, source in self._roots:
            target[t].copy_(source[t])
