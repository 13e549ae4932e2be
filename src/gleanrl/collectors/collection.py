"""Collection in one process: blocks filled by the loop, then ids, counts and checks over whole columns.

The public collectors and the workers of the multi-process ones are made of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type

from gleanrl.block import Block, Field, Schema, numpy_view
from gleanrl.collectors.checks import check_actions, check_finite, nonfinite_rows
from gleanrl.collectors.episodes import EpisodeTracker
from gleanrl.collectors.ledger import FrameLedger
from gleanrl.collectors.plan import warn
from gleanrl.data.boundaries import MASK
from gleanrl.errors import InvalidArgumentError, NonFiniteError, PolicyError
from gleanrl.pool import BufferPool
from gleanrl.rollouts.loop import StepFault, collect
from gleanrl.rollouts.plan import RolloutPlan, explain
from gleanrl.rollouts.steppers import BATCH
from gleanrl.system import clock
from gleanrl.tree import Path, as_path

IDS: Path = ("collector", "traj_ids")
NONFINITE: Path = ("collector", "nonfinite")
_COUNT = ("step_count",)
_NEXT_COUNT = ("next", "step_count")


@dataclass(frozen=True)
class CollectionOptions:
    """How batches are collected.

    Attributes:
        max_steps: truncate episodes at so many steps and count them under ``step_count``; None for neither.
        exploration_type: the interaction type during a rollout.
        nonfinite: what to do about NaN or infinity in observations and rewards: ``"raise"``, ``"mark"`` or
            ``"pass"``.
        reuse_block: whether all batches share their memory.
        stop: asked after every step; True cuts the batch there.
    """

    max_steps: int | None = None
    exploration_type: InteractionType | None = InteractionType.RANDOM
    nonfinite: str = "raise"
    reuse_block: bool = False
    stop: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        """Check the choices."""
        if self.exploration_type is not None and not isinstance(self.exploration_type, InteractionType):
            raise InvalidArgumentError(
                f"exploration_type: expected an ExplorationType or None, got {self.exploration_type!r}"
            )
        if self.nonfinite not in ("raise", "mark", "pass"):
            raise InvalidArgumentError(
                f"nonfinite: expected 'raise', 'mark' or 'pass', got {self.nonfinite!r}"
            )


class Collection:
    """Fills one batch after the other. Not thread-safe: one caller at a time.

    After a failure (an environment, a policy, a value that isn't finite) the batch is discarded and accounted
    for, and the next one begins with a reset of every environment.

    Args:
        env: the environment; it is used, not owned.
        plan: which actor, which stepper, which columns.
        options: see `CollectionOptions`.
    """

    def __init__(self, env: Any, plan: RolloutPlan, options: CollectionOptions) -> None:
        self.env, self.plan, self.options = env, plan, options
        self.num_envs = max(1, plan.batch_size.numel())
        self.episodes = EpisodeTracker(self.num_envs)
        self.ledger = FrameLedger()
        self._pending = (0, 0)  # frames collected but not handed out yet, and how many of them are flagged
        self._reset_first = False
        self._block: Block | None = None
        self._kept: Block | None = None  # what `_batch` shows, where the block itself is borrowed
        self._batch: TensorDict | None = None
        self._pool = BufferPool()
        self._schema = Schema({**plan.schema.items(), **self._extra_fields()}, plan.schema.groups)
        rewards = {("next", *as_path(key)) for key in env.reward_keys}
        self._reward_path = next((p for p in plan.schema.paths if p in rewards), None)
        actions = {as_path(key) for key in env.action_keys}
        floats = [p for p in plan.schema.paths if plan.schema[p].dtype.is_floating_point]
        self._action_paths = [p for p in floats if p in actions]
        outcomes_first = sorted(floats, key=lambda path: path[0] != "next")  # a bad value shows there first
        self._env_paths = [p for p in outcomes_first if p not in plan.policy_paths]

    def _extra_fields(self) -> dict[Path, Field]:
        extra = {IDS: Field(torch.Size(), torch.int64)}
        if self.options.max_steps is not None:
            if any(path[-1] == "step_count" for path in self.plan.schema.paths):
                raise InvalidArgumentError(
                    "max_frames_per_traj: the environment has a 'step_count' already; "
                    "leave its own limit in place, or remove it"
                )
            extra[_COUNT] = extra[_NEXT_COUNT] = Field(torch.Size((1,)), torch.int64)
        if self.options.nonfinite == "mark":
            extra[NONFINITE] = Field(torch.Size(), torch.bool)
        return extra

    def reset(self, mask: torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset every environment, or those where `mask` is True; they begin new trajectories.

        Args:
            mask: bool, ``[*batch]``; None for all. After a failure all are reset, whatever it says.
            **kwargs: passed to the environment's `reset`, of all environments.

        Raises:
            EnvironmentFailure, EnvironmentContractError: it failed; the next batch begins with another one.
        """
        if self._reset_first:
            mask = None
        self._reset_first = True
        try:
            if kwargs:
                self._load(kwargs)
            else:
                self.plan.stepper.reset(mask)
        except StepFault as fault:
            raise explain(fault, self.env) from fault.cause
        self._reset_first = False
        if mask is None:
            self.plan.actor.forget()
        self.episodes.abandon(None if mask is None else mask.reshape(-1).cpu().numpy())

    def _load(self, kwargs: dict[str, Any]) -> None:
        try:
            self.plan.stepper.load(self.env.reset(**kwargs))
        except Exception as cause:
            raise StepFault(0, 0 if self.num_envs == 1 else BATCH, "reset", cause) from cause

    def reset_later(self) -> None:
        """Begin the next batch with a reset of every environment."""
        self._reset_first = True

    @property
    def frames(self) -> int:
        """Frames of the batch that was collected last; steps that the batch's mask leaves out are none."""
        return self._pending[0]

    def collect(
        self, num_steps: int, random: bool, device: torch.device | None, most: int | None = None
    ) -> TensorDict:
        """Return the next batch, ``[*batch, T]``.

        Args:
            num_steps: T; the batch is shorter if the rollout was stopped.
            random: whether actions are drawn from the action spec instead of asked of the policy.
            device: what the batch says of its device.
            most: frames that may be delivered, more than those of ``T - 1`` steps; None for any number. What is
                beyond it, in the last step of the last environments, is masked and discarded.

        Raises:
            EnvironmentFailure, EnvironmentContractError: the environment raised or broke its declaration.
            PolicyError: the policy's output doesn't fit.
            NonFiniteError: a value isn't finite (with ``nonfinite="raise"``).
        """
        if self.plan.stepper.disturbed and not self._reset_first:
            warn(
                f"{type(self.env).__name__}: it was stepped or reset outside the collector, whose trajectories can't "
                "go on; the collector resets it (give the collector an environment of its own)"
            )
            self._reset_first = True
        if self._reset_first:
            self.reset()
        block = self._fresh_block(num_steps)
        begin = clock.monotonic()
        try:
            count = self._run(block, random)
            self._complete(block, count, most)
        except PolicyError:
            self._abandon(block, "policy")
            raise
        except NonFiniteError:
            self._abandon(block, "nonfinite")
            raise
        except StepFault as fault:
            error = self._explain(fault, block)
            self._abandon(block, "environment", fault.made(self.num_envs))
            raise error from fault.cause
        except BaseException as error:
            self._abandon(block, "error" if isinstance(error, Exception) else "interrupted")
            raise
        finally:
            self.ledger.seconds += clock.monotonic() - begin
        return self._wrap(block, count, device)

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Account for the batch just collected: as delivered, or as discarded if the work inside raises."""
        frames, flagged = self._pending
        try:
            yield
        except BaseException as error:
            self._discard(frames, "postproc" if isinstance(error, Exception) else "interrupted")
            raise
        self.ledger.deliver(frames, flagged)

    def _run(self, block: Block, random: bool) -> int:
        actor = self.plan.random_actor if random else self.plan.actor
        stop = self.options.stop
        stopper = None if stop is None else lambda t: stop()
        with torch.no_grad(), self._exploration():
            return collect(actor, self.plan.stepper, block, stopper)

    def _exploration(self) -> AbstractContextManager[Any]:
        return set_interaction_type(self.options.exploration_type)

    def _fresh_block(self, num_steps: int) -> Block:
        if not self.options.reuse_block:
            return self.plan.block(num_steps, self._schema, self._pool)
        if self._block is None or self._block.num_steps != num_steps:
            self._block = self.plan.block(num_steps, self._schema, self._pool)
            self._batch = self._kept = None
        return self._block

    def _wrap(self, block: Block, count: int, device: torch.device | None) -> TensorDict:
        if not self.options.reuse_block or count != block.num_steps:
            return block.owned(self._pool).batch(count, device)
        self._kept = block.owned(into=self._kept)
        if self._batch is None:
            self._batch = self._kept.batch(count, device)
        return self._batch

    # ----------------------------------------------------- whole-column work
    def _rows(self, block: Block, path: Path, count: int) -> torch.Tensor:
        """Return the column at `path` with the environments flattened, ``(P, count, *leaf)``."""
        column = block.column(path)
        column = column.reshape(self.num_envs, block.num_steps, *column.shape[len(block.batch_size) :])
        return column if count == block.num_steps else column[:, :count]

    def _done(self, block: Block, count: int) -> torch.Tensor:
        """Return ``(P, count)`` bool: whether the episode ended, by any of the flags that say so."""
        flags = [self._rows(block, path, count) for path in self.plan.done_paths]
        ended = [
            f.flatten(2).any(-1) if math.prod(f.shape[2:]) != 1 else f.reshape(f.shape[:2]) for f in flags
        ]
        return ended[0] if len(ended) == 1 else torch.stack(ended).any(0)

    def _mask(self, block: Block, count: int) -> torch.Tensor | None:
        """Return ``(P, count)`` bool, False on the steps that are no frames; None if all are."""
        return self._rows(block, MASK, count) if MASK in self._schema else None

    def _cut(self, mask: torch.Tensor, most: int) -> None:
        """Mask the last frames of the last step, down to `most`."""
        excess = int(mask.sum()) - most
        if excess > 0:
            last = mask[:, -1]
            last[last.nonzero()[-excess:, 0]] = False
            self.ledger.discard(excess, "budget")

    def _complete(self, block: Block, count: int, most: int | None) -> None:
        """Check the columns, then fill in ids and counts and account for the frames."""
        check_actions([(p, self._rows(block, p, count)) for p in self._action_paths], count)
        flagged = 0
        mask = self._mask(block, count)
        if mask is not None and most is not None:
            self._cut(mask, most)
        env_columns = [(p, self._rows(block, p, count)) for p in self._env_paths]
        if self.options.nonfinite == "raise":
            check_finite(env_columns, count, type(self.env).__name__)
        elif self.options.nonfinite == "mark":
            mark = self._rows(block, NONFINITE, count)
            mark.copy_(nonfinite_rows(env_columns, mark))
            if mask is not None:
                mark &= mask
            flagged = int(mark.sum())
        self._number(block, count, None if mask is None else mask.cpu().numpy())
        self._pending = (count * self.num_envs if mask is None else int(mask.sum()), flagged)

    def _number(self, block: Block, count: int, mask: Any) -> None:
        done = self._done(block, count).cpu().numpy()
        reward = None
        if self._reward_path is not None:
            rewards = self._rows(block, self._reward_path, count)
            reward = rewards.reshape(self.num_envs, count, -1).sum(-1).double().cpu().numpy()
        ids = self._rows(block, IDS, count)
        on_cpu = ids.device.type == "cpu"
        ids_array = numpy_view(ids) if on_cpu else ids.cpu().numpy()
        counts_array = None
        if self.options.max_steps is not None:
            counts = self._rows(block, _COUNT, count).squeeze(-1)
            counts_array = numpy_view(counts) if on_cpu else counts.cpu().numpy()
        self.episodes.record(done, reward, ids_array, counts_array, mask)
        if not on_cpu:
            ids.copy_(torch.from_numpy(ids_array))
            if counts_array is not None:
                counts.copy_(torch.from_numpy(counts_array))
        if counts_array is not None:
            self._rows(block, _NEXT_COUNT, count).copy_(self._rows(block, _COUNT, count)).add_(1)

    def _abandon(self, block: Block, reason: str, made: Sequence[int] | None = None) -> None:
        """Lose the block; `made` are the steps of each environment, None for `num_whole` of each."""
        steps = made or [block.num_whole] * self.num_envs
        mask = self._mask(block, max(steps))
        frames = sum(
            steps if mask is None else (int(row[:n].sum()) for row, n in zip(mask, steps, strict=True))
        )
        self._discard(frames, reason)

    def _discard(self, frames: int, reason: str) -> None:
        """Lose frames: what follows belongs to new trajectories, so that none has a hole."""
        self.ledger.discard(frames, reason)
        self.episodes.abandon()
        self._reset_first = True

    def _explain(self, fault: StepFault, block: Block) -> Exception:
        if fault.env < 0:
            return explain(fault, self.env)
        done = self._done(block, block.num_whole).cpu().numpy()
        actions = [as_path(key) for key in self.env.action_keys]
        action = self._rows(block, actions[0], block.num_steps)[fault.env, fault.t] if actions else None
        return explain(fault, self.env, *self.episodes.where(done, fault.env), action)
