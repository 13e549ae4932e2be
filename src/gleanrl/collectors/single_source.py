"""The source of a single process: fills one block after another with the rollout loop.

Single-process collectors use it directly, and each worker of a multi-process collector has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.allocate import BufferPool
from gleanrl._arrays.block import Block, ReusableBlock, can_keep
from gleanrl._arrays.schema import Schema
from gleanrl._os import clock
from gleanrl._rollout.actors import PolicyActor
from gleanrl._rollout.env_traits import is_closed, seed_env
from gleanrl._rollout.errors import BATCH, StepFault, error_of, explain
from gleanrl._rollout.loop import collect, exploring, with_gradients
from gleanrl._rollout.plan import RolloutPlan
from gleanrl._rollout.protocol import CarriedOutputs
from gleanrl._state.rng import CounterGenerator, CounterPosition, OwnedTorchGenerator
from gleanrl._state.state import Stateful, StateReader
from gleanrl.collectors import checkpoint
from gleanrl.collectors.batch_columns import BatchColumns, Completed
from gleanrl.collectors.checkpoint import EpisodePosition
from gleanrl.collectors.frame_accounting import CollectorStats, Episode, FrameCounts, Numbering, TrajectoryIds
from gleanrl.collectors.policy_weights import PolicyWeights
from gleanrl.collectors.source import Collected, CollectionOptions, Grant, Grants, Loading, Source, warn
from gleanrl.errors import (
    GleanError,
    InvalidArgumentError,
    InvalidTypeError,
    NonFiniteError,
    PolicyError,
    UnsupportedError,
    WorkerError,
)

_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (StepFault, "environment"),
    (PolicyError, "policy"),
    (NonFiniteError, "nonfinite"),
    (Exception, "error"),
    (BaseException, "interrupted"),
)
"""Reasons under which the frame ledger counts frames lost to an exception; the first match counts."""


@dataclass(frozen=True)
class CollectionState:
    """State of a source, without its environment and its policy's weights."""

    ledger: FrameCounts
    trajectories: TrajectoryIds
    generator: torch.Tensor | None
    """State of the generator of random actions; None before its first use."""
    carry: CarriedOutputs
    """Policy outputs that the policy reads in the next row."""
    policy_version: int
    place: EpisodePosition
    """The environments' positions within their episodes."""
    random: CounterPosition
    """Position in the random numbers of natively run policies."""


class RandomNumbers(NamedTuple):
    """The random numbers that actions are drawn from."""

    actions: OwnedTorchGenerator
    """For random actions."""
    policy: CounterGenerator
    """For natively run policies."""


class Filled(NamedTuple):
    """A block with a batch that is open until it is delivered."""

    block: Block
    num_steps: int
    """Number of written steps."""
    done: Completed
    """Frame counts and open trajectories of the batch."""
    after: Any
    """State of the source after the batch has been delivered."""


class _Progress(NamedTuple):
    """Counters and open trajectories of a source.

    One assignment replaces the value as a whole, so that an interrupt can't leave it half changed.
    """

    counts: FrameCounts
    trajectories: TrajectoryIds
    open: Block | int | None = None
    """Frames not yet in the ledger: the block that is being filled, or their number."""
    reset_first: bool = False
    """Whether the next batch begins with a reset of every environment."""

    def opened(self, frames: Block | int) -> _Progress:
        """Return a copy with the given frames open."""
        return _Progress(self.counts, self.trajectories, frames, self.reset_first)


class RolloutSource(Source, Stateful[CollectionState]):
    """Fill one batch after another in this process.

    A failure may come from the environment, the policy, a value that is not finite, or an interrupt. The batch is then
    discarded and counted, and the next batch begins with a reset of every environment.

    Args:
        env: the environment. The source uses it but does not own it.
        plan: the rollout plan: actor, stepper and columns.
        options: how batches are collected.
        device: value of the batches' ``device``.
        weights: holder of the policy's weights.
        draws: random numbers of the plan's actors.
        numbering: maps local trajectory ids to global ones.
        first_id: the first local id that may be used.
    """

    pushes_between = True

    def __init__(
        self,
        env: Any,
        plan: RolloutPlan,
        options: CollectionOptions,
        device: torch.device | None = None,
        weights: PolicyWeights | None = None,
        draws: RandomNumbers | None = None,
        numbering: Numbering | None = None,
        first_id: int = 0,
    ) -> None:
        self.env, self.plan, self.options, self.numbering = env, plan, options, numbering
        self.columns = BatchColumns(env, plan, options, numbering)
        self.num_envs, self.batch_size = self.columns.num_envs, plan.batch_size
        self.done_paths = plan.done_paths
        self.device = device
        """Value of the batches' ``device``."""
        self.weights = weights or PolicyWeights(None, None)
        self._draws = draws or RandomNumbers(OwnedTorchGenerator(), CounterGenerator())
        self._now = _Progress(FrameCounts(), TrajectoryIds.begin(self.num_envs, first_id))
        self._block: Block | None = None
        self._batch_block: Block | None = None  # holds the values of `_batch` if the block itself is borrowed
        self._batch: TensorDict | None = None
        self._pool = BufferPool()
        self.target: Callable[[Schema, torch.Size, int], Block | None] | None = None
        """Returns the block for a batch that may be lent (see `fill`), given the schema, batch size and number of
        steps."""

    @property
    def goes_on(self) -> bool:  # type: ignore[override]
        """Whether the next batch continues the open trajectories."""
        return not self._now.reset_first

    @property
    def spent(self) -> int:
        """Delivered frames that count against the budget."""
        return self._now.counts.spent

    @property
    def counts(self) -> FrameCounts:
        """The counts, without the open batch."""
        return self._now.counts

    @property
    def trajectories(self) -> TrajectoryIds:
        """The open trajectories after the last delivered batch."""
        return self._now.trajectories

    @property
    def policy_version(self) -> int:
        """How often the policy got new weights."""
        return self.weights.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.weights.version = version

    def next(self, budget: Grants, lend: bool = False) -> Collected:
        """Return the next batch that `budget` grants; see `collect`. The budget must not be spent."""
        grant = budget.grant(self.spent)
        assert grant is not None, "the budget is spent"
        return self.collect(grant, lend)

    def collect(self, grant: Grant, lend: bool = False) -> Collected:
        """Return a batch, ``[*batch, T]``. It is shorter if the rollout was stopped. See `fill`."""
        wants = self.target if lend else None
        filled = self.fill(grant, wants and wants(self.columns.schema, self.batch_size, grant.num_steps))
        return Collected(self._wrap(filled.block, filled.num_steps, lend), filled.after)

    def fill(self, grant: Grant, target: Block | None = None) -> Filled:
        """Collect a batch into a block. A batch that is still open is discarded first.

        Args:
            grant: what may be collected.
            target: a block with the grant's number of steps; None for a block of the source. If the environments write
                to private memory, the columns are copied into `target` at the end.

        Raises:
            EnvironmentFailure, EnvironmentContractError: the environment raised an error or broke its declaration.
            PolicyError: the policy's output does not fit, an action is NaN, or the policy has no weights.
            NonFiniteError: a value of the environment is not finite (with ``nonfinite="raise"``).
        """
        self.lose("interrupted")
        self.weights.refresh()
        self._prepare()
        block = self._next_block(grant.num_steps) if target is None or self._elsewhere else target
        block.num_complete = 0
        begin = clock.monotonic()
        # From here on an interrupt finds the open block, so that its frames are counted as discarded.
        self._now = self._now.opened(block)
        count = None
        try:
            count = self._fill(block, grant.random)
            self._now = self._now.opened(self.columns.frames(block, count))
            done = self.columns.complete(block, count, self._now.trajectories, grant.most)
            if self.options.versioned:
                self.columns.note_version(block, self.policy_version)
        except BaseException as error:
            explained = None
            if isinstance(error, StepFault):
                explained = self._explained(error, block)
                self._now = self._now.opened(self.columns.frames(block, error.made(self.num_envs)))
            # Without a count the loop itself failed, and the whole-column checks have not run yet.
            earlier = self._overlooked(block, error) if count is None else None
            reason = next(reason for kind, reason in _REASONS if isinstance(earlier or error, kind))
            if reason == "error" and block.policy_failed:
                reason = "policy"
            self.lose(reason, clock.monotonic() - begin)
            if earlier is not None:
                raise earlier from explained or error
            if explained is None:
                raise
            raise explained from explained.__cause__
        seconds = clock.monotonic() - begin
        counts = self._now.counts.delivering(done.frames, done.flagged, grant.counted, seconds)
        after = _Progress(counts.discarding(done.excess, "budget"), done.trajectories)
        if target is not None and block is not target:
            for column, found in zip(target.columns, block.columns, strict=True):
                column.copy_(found)
            block = target
        return Filled(block, count, done, after)

    def _overlooked(self, block: Block, error: BaseException) -> GleanError | None:
        """Return the error that the whole-batch checks find in the rows before the failure; None if they find none.

        Columns are checked once a batch, so a NaN in an earlier row may be the cause of `error`.
        """
        # After the loss of a worker the block lacks the worker's rows.
        if not isinstance(error, Exception) or isinstance(error, WorkerError):
            return None
        acted = stepped = block.num_complete
        if isinstance(error, StepFault):
            stepped = acted = min(error.made(self.num_envs))
            if error.during == "step":  # the action of the failed step is already written
                acted = error.t + 1
        found: GleanError | None = error_of(
            partial(self.columns.check, block, acted, stepped), PolicyError, NonFiniteError
        )
        return found

    @property
    def _elsewhere(self) -> bool:
        """Whether the environments write to private memory or on another device."""
        device = self.plan.stepper.device
        return self.plan.stepper.lends or (device is not None and device.type != "cpu")

    def deliver(self, collected: Collected, batch: TensorDictBase) -> TensorDictBase:
        """Count the open batch as delivered and return `batch`, its post-processed form."""
        # One line: an interrupt comes before the assignment, or after the batch was returned.
        return (batch, self.commit(collected.after))[0]

    def commit(self, progress: _Progress) -> Any:
        """Replace the source's state by `Filled.after`, which counts the open batch as delivered."""
        self._now = progress

    def lose(self, reason: str, seconds: float = 0.0) -> None:
        """Count an open batch as discarded; the next batch begins with a reset. No effect without an open batch.

        Args:
            reason: reason in the ledger.
            seconds: how long its collection took.
        """
        now = self._now
        if now.open is None:
            return
        frames = (
            now.open if isinstance(now.open, int) else self.columns.frames(now.open, now.open.num_complete)
        )
        counts = now.counts.lasting(seconds).discarding(frames, reason)
        self._now = _Progress(counts, now.trajectories.abandon(), reset_first=True)

    def _prepare(self) -> None:
        """Reset the environments before a batch if the options, a failure or a foreign step require it.

        A foreign step also causes a warning.
        """
        if self.options.reset_each or self._now.reset_first:
            self.reset()
        elif self.plan.stepper.disturbed:
            warn(
                f"{type(self.env).__name__}: it was stepped or reset outside the collector, so the collector's open "
                "trajectories end here and it is reset; pass a separate environment to the collector"
            )
            self.reset()

    def _fill(self, block: Block, random: bool) -> int:
        actor = self.plan.random_actor if random else self.plan.actor
        run = (collect, actor, self.plan.stepper, block, self.options.stop)
        return with_gradients(False, exploring, self.options.exploration_type, *run)

    def _next_block(self, num_steps: int) -> Block:
        """Return the block for the next batch: new, or the last one if batches share memory."""
        if not self.options.reuse_block:
            return self._reusable_block(num_steps) or self.plan.block(
                num_steps, self.columns.schema, self._pool
            )
        if self._block is None or self._block.num_steps != num_steps:
            self._block = self.plan.block(num_steps, self.columns.schema, self._pool)
            self._block.rewritten = True
            self._batch = self._batch_block = None
        return self._block

    def _reusable_block(self, num_steps: int) -> ReusableBlock | None:
        """Return a block that is reused for many batches; None if reuse is not worthwhile.

        Batches are copied out of such a block. That pays off only for small blocks, whose views and copier are made
        once. A block is replaced while a policy or environment still holds rows of it.
        """
        block = self._block
        if not isinstance(block, ReusableBlock) or block.num_steps != num_steps or not block.is_free:
            self._block, schema = None, self.columns.schema
            if self.plan.rewrites_blocks and can_keep(schema, self.batch_size, num_steps):
                self._block = ReusableBlock(schema, self.batch_size, num_steps)
            block = self._block
        return block

    def _wrap(self, block: Block, count: int, lend: bool) -> TensorDict:
        """Return a block's batch, in memory that the caller may keep unless it was lent or `reuse_block` is set.

        A batch is always copied out of a `ReusableBlock`, because a batch that shared its memory would prevent its
        reuse.
        """
        if lend and not isinstance(block, ReusableBlock):
            return block.batch(count, self.device)
        if not self.options.reuse_block or count != block.num_steps:
            return block.owned(self._pool).batch(count, self.device)
        self._batch_block = block.owned(into=self._batch_block)
        if self._batch is None or self.columns.schema.lists:
            self._batch = self._batch_block.batch(count, self.device)
        return self._batch

    def _explained(self, fault: StepFault, block: Block) -> Exception:
        """Return the user's error for a fault, with environment, episode, step and action."""
        if fault.env < 0:
            return explain(fault, self.env)
        where = self.columns.where(block, self._now.trajectories, fault.env)
        action = self.columns.action(block, fault.env, fault.t)
        return explain(fault.counted_from(self.columns.first_env), self.env, *where, action)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments. After a failure, reset all of them, regardless of `index`.

        A batch that is still open is discarded first. A reset of all environments also clears the outputs that the
        policy reads in the next row.

        Raises:
            UnsupportedError: both `index` and `kwargs` were passed.
            InvalidArgumentError: `index` was passed for a single environment.
            EnvironmentFailure, EnvironmentContractError: the reset failed. The next batch begins with another one.
        """
        self.lose("interrupted")
        mask = None if self._now.reset_first else self._mask(index, kwargs)
        # Set before the reset: after an interrupt or an error the next batch begins with a full reset.
        self._now = self._now._replace(reset_first=True)
        try:
            if kwargs:
                self._load(kwargs)
            else:
                self.plan.stepper.reset(mask)
        except StepFault as fault:
            raise explain(fault, self.env) from fault.cause
        if mask is None:
            self.plan.actor.carry.clear()
        flat = None if mask is None else mask.reshape(-1).numpy()
        self._now = _Progress(self._now.counts, self._now.trajectories.abandon(flat))

    def _mask(self, index: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return a mask of the environments that `index` selects; None for all."""
        if index is None:
            return None
        if kwargs:
            raise UnsupportedError("reset: keyword arguments go to all environments; leave index out")
        if not self.env.batch_size:
            raise InvalidArgumentError(
                "reset: index selects members of a batch of environments, but this is a single one; leave index out"
            )
        mask = torch.zeros(self.env.batch_size, dtype=torch.bool, device="cpu")
        mask[index.cpu() if isinstance(index, torch.Tensor) else index] = True
        return mask

    def _load(self, kwargs: dict[str, Any]) -> None:
        try:
            self.plan.stepper.load(self.env.reset(**kwargs))
        except Exception as cause:
            raise StepFault(0, 0 if self.num_envs == 1 else BATCH, "reset", cause) from cause

    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environments and the random actions, and reset. Return the last seed that was used."""
        last = seed_env(self.env, seed, static_seed)
        self._draws.actions.seed(seed)
        self._draws.policy.seed(seed)
        self.reset()
        return last

    def push_weights(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Copy weights into the policy that collects, and increment its version, even if nothing had to be copied.

        Raises:
            InvalidTypeError: `worker_ids` was passed.
            PolicyError, InvalidTypeError, SchemaError: see `PolicyWeights.push`.
        """
        if worker_ids is not None:
            raise InvalidTypeError(
                "worker_ids: the collector has neither workers nor a weight_updater; leave it out"
            )
        self.weights.push(weights)
        self.policy_version += 1

    def stop_following(self) -> None:
        """Stop copying the user's current weights. From now on only `push_weights` copies weights."""
        self.weights.stop_following()

    def close(self, close_env: bool = True) -> None:
        """Close the environment if `close_env` is set and it is open."""
        if close_env and not is_closed(self.env):
            self.env.close()

    def stats(self) -> CollectorStats:
        """Return a snapshot of the counters."""
        return self._now.counts.stats(self._now.trajectories, self.said_of_policy)

    @property
    def said_of_policy(self) -> tuple[str, ...]:
        """See `CollectorStats.policy`."""
        actor = self.plan.actor
        native = actor.native if isinstance(actor, PolicyActor) else None
        return () if native is None else tuple(native.said)

    def recent_episodes(self) -> list[Episode]:
        """Return the last ended episodes."""
        return self._now.trajectories.recent

    def snapshot(self) -> CollectionState:
        """Return the state as an immutable value."""
        return CollectionState(
            self._now.counts,
            self._now.trajectories,
            self._draws.actions.snapshot(),
            self.plan.actor.carry.snapshot(),
            self.policy_version,
            EpisodePosition.of(
                self.env, self.plan.stepper, self._now.reset_first or self.plan.stepper.disturbed
            ),
            self._draws.policy.snapshot(),
        )

    def parse(self, state: Any) -> CollectionState:
        """Return the value of a saved state; raise `SchemaError` for anything else."""
        reader = StateReader(state, "a collection")
        return CollectionState(
            FrameCounts.read(reader.get("ledger")),
            TrajectoryIds.read(reader.get("trajectories")).of_environments(self.num_envs),
            self._draws.actions.parse(reader.get("generator")),
            self.plan.actor.carry.parse(reader.get("carry")),
            reader.integer("policy_version"),
            EpisodePosition.read(reader.get("place"), self.env, self.plan.stepper)
            if "place" in reader
            else EpisodePosition(),
            self._draws.policy.parse(reader.get("random") if "random" in reader else None),
        )

    def adopt(self, value: CollectionState) -> None:
        """Resume from a value. Environments that can't be restored are reset before the next batch."""
        self._draws.actions.adopt(value.generator)
        self._draws.policy.adopt(value.random)
        self.plan.actor.carry.adopt(value.carry)
        self.policy_version = value.policy_version
        value.place.take_up(self.env, self.plan.stepper)
        self._now = _Progress(value.ledger, value.trajectories, reset_first=value.place.carry is None)

    def save(self) -> dict[str, Any]:
        """Return the state of the environment and the policy, and of this source under ``"source"``."""
        return checkpoint.saved(self)

    def loading(
        self, state: Mapping[str, Any], strict: bool, keep_ids: bool = False, **kwargs: Any
    ) -> Loading:
        """Check a saved state and return the change that loads it.

        The change fails only if the environment's `load_state_dict` raises. Then nothing else has changed.
        """
        return checkpoint.loading(self, state, strict, keep_ids, kwargs)
