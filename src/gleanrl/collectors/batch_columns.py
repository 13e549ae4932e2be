"""Whole-column work on a collected batch: checks for NaN, trajectory ids, step counts and masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gleanrl._arrays.block import Block
from gleanrl._arrays.native import are_finite, first_nonfinite_f32, first_nonfinite_f64
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import Path, as_key, as_path
from gleanrl._rollout.env_traits import Env, EnvTraits
from gleanrl._rollout.plan import RolloutPlan
from gleanrl.collectors.frame_accounting import Numbering, TrajectoryIds
from gleanrl.collectors.source import CollectionOptions
from gleanrl.data.trajectories import MASK
from gleanrl.errors import InvalidArgumentError, NonFiniteError, PolicyError

_SCANS = {torch.float32: first_nonfinite_f32, torch.float64: first_nonfinite_f64}


def first_nonfinite(column: torch.Tensor) -> int:
    """Return the flat position of the first NaN or infinity in `column`; -1 without one, or for other dtypes.

    Contiguous float32 and float64 columns on the CPU are scanned in one pass, without a temporary.
    """
    if not column.dtype.is_floating_point:
        return -1
    scan = _SCANS.get(column.dtype)
    if scan is not None and column.device.type == "cpu" and column.is_contiguous():
        return scan(column.data_ptr(), column.numel())
    bad = ~torch.isfinite(column).reshape(-1)
    return int(bad.int().argmax()) if bool(bad.any()) else -1


def check_finite(columns: Iterable[tuple[Path, torch.Tensor]], num_steps: int, env_name: str) -> None:
    """Raise an error at the first NaN or infinity.

    Args:
        columns: pairs of path and column. Columns are ``(P, T, *leaf)``, with the batch dimensions of environments
            flattened into P.
        num_steps: T.
        env_name: the environment's name for the message.

    Raises:
        NonFiniteError: a value is NaN or infinite. The message names the key, the environment and the step of the
            batch.
    """
    for path, column in columns:
        position = first_nonfinite(column)
        if position < 0:
            continue
        row = position // max(1, math.prod(column.shape[2:]))
        env, t = divmod(row, num_steps)
        value = column.reshape(-1)[position].item()
        raise NonFiniteError(
            f"{env_name}: environment {env} put out {value} in {as_key(path)!r} at step {t} of the batch; "
            "pass nonfinite='mark' or 'pass' to the collector to accept such data"
        )


def check_actions(columns: Iterable[tuple[Path, torch.Tensor]], num_steps: int) -> None:
    """Raise an error if an action is NaN. The environment judges infinite and out-of-range actions.

    Raises:
        PolicyError: an action is NaN. The message names the key, the environment and the step of the batch.
    """
    for path, column in columns:
        if first_nonfinite(column) < 0:
            continue
        bad = torch.isnan(column).reshape(-1)
        if not bool(bad.any()):
            continue
        row = int(bad.int().argmax()) // max(1, math.prod(column.shape[2:]))
        env, t = divmod(row, num_steps)
        raise PolicyError(f"policy: NaN in {as_key(path)!r} for environment {env} at step {t} of the batch")


def nonfinite_rows(columns: Iterable[tuple[Path, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Return ``(P, T)`` bool: whether any of `columns` holds a NaN or an infinity in that row.

    Args:
        columns: as in `check_finite`.
        like: a ``(P, T)`` tensor on the device of the result.
    """
    rows = torch.zeros_like(like, dtype=torch.bool)
    for _, column in columns:
        if column.dtype.is_floating_point:
            rows |= ~torch.isfinite(column).reshape(*rows.shape, -1).all(-1)
    return rows


IDS: Path = ("collector", "traj_ids")
NONFINITE: Path = ("collector", "nonfinite")
VERSIONS: tuple[Path, ...] = (("policy_version",), ("collector", "policy_version"))
_COUNT = ("step_count",)
_NEXT_COUNT = ("next", "step_count")
_REAL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Completed:
    """Result of `BatchColumns.complete`."""

    frames: int
    """Frames over all environments, flagged ones included, masked ones excluded."""
    flagged: int
    """Frames that are marked as not finite."""
    excess: int
    """Frames beyond the budget; they are masked."""
    trajectories: TrajectoryIds
    """The open trajectories after the batch."""


class BatchColumns:
    """Completes blocks: fills in all columns that are not needed at every step, once a batch.

    Args:
        env: the environment.
        plan: the rollout plan.
        options: which columns are added and which values are checked.
        numbering: maps local trajectory ids to global ones.

    Raises:
        InvalidArgumentError: the environment already has an entry that `options` would add: ``"step_count"`` or
            ``"policy_version"``.
    """

    def __init__(
        self, env: Env, plan: RolloutPlan, options: CollectionOptions, numbering: Numbering | None = None
    ) -> None:
        self.num_envs = max(1, plan.batch_size.numel())
        self._env_name, self._numbering = type(env).__name__, numbering
        self.first_env = 0 if numbering is None else numbering.worker * self.num_envs
        """Index of the first environment, counted over all workers."""
        self._nonfinite, self._counted = options.nonfinite, options.max_steps is not None
        self._versioned = options.versioned
        self._done_paths = plan.done_paths
        self.schema = Schema({**plan.schema.items(), **self._added(plan)}, plan.schema.groups)
        rewards = {("next", *as_path(key)) for key in env.reward_keys} - {*plan.schema.lists}
        self._reward_path = next((p for p in plan.schema.paths if p in rewards), None)
        actions = {as_path(key) for key in env.action_keys}
        self._first_action = next((p for p in plan.schema.paths if p in actions), None)
        fields = plan.schema.items()
        floats = [
            p
            for p, f in fields.items()
            if f.dtype is not None and f.dtype.is_floating_point and not f.is_list
        ]
        self._action_paths = [p for p in floats if p in actions]
        # A bad value is put out under "next" first, so the check of these columns reports the earliest step.
        outcomes_first = sorted(floats, key=lambda path: path[0] != "next")
        self._env_paths = [p for p in outcomes_first if p not in plan.policy_paths]
        if EnvTraits.of(env).loses_last:
            # All other next observations are copied to the next root and checked there.
            lost = {("next", *as_path(key)) for key in env.full_observation_spec.keys(True, True)}
            self._env_paths = [p for p in self._env_paths if p not in lost]
        self._scanned_paths = [*self._action_paths, *self._env_paths]

    def _added(self, plan: RolloutPlan) -> dict[Path, Field]:
        """Return the fields of the columns that this class adds, by path."""
        added = {IDS: Field(torch.Size(), torch.int64)}
        if self._counted:
            if any(path[-1] == "step_count" for path in plan.schema.paths):
                raise InvalidArgumentError(
                    "max_frames_per_traj: the environment already has a 'step_count'; "
                    "leave max_frames_per_traj out, or remove that entry"
                )
            added[_COUNT] = added[_NEXT_COUNT] = Field(torch.Size((1,)), torch.int64)
        if self._versioned:
            if VERSIONS[0] in plan.schema:
                raise InvalidArgumentError(
                    "track_policy_version: the environment already has a 'policy_version'; remove or rename that entry"
                )
            added.update(dict.fromkeys(VERSIONS, Field(torch.Size(), torch.int64)))
        if self._nonfinite == "mark":
            added[NONFINITE] = Field(torch.Size(), torch.bool)
        return added

    def complete(
        self, block: Block, count: int, trajectories: TrajectoryIds, most: int | None = None
    ) -> Completed:
        """Check the first `count` steps of a block, and fill in ids, step counts and marks of nonfinite values.

        Args:
            block: a block of `schema`.
            count: number of written steps.
            trajectories: the open trajectories before the batch.
            most: the number of frames that may be delivered; None for no limit. In a block with a mask, frames beyond
                it are masked: in the last step, from the last environment backward. Without a mask it has no effect.

        Raises:
            PolicyError: an action is NaN, for any ``nonfinite``.
            NonFiniteError: a value of the environment is not finite (with ``nonfinite="raise"``).
        """
        # One fast scan covers all columns. The checks that locate a bad value run only if it fails.
        finite = self._finite(block, count)
        if not finite:
            self._check_actions(block, count)
        mask, excess, flagged = self._mask(block, count), 0, 0
        if mask is not None and most is not None:
            excess = max(int(mask.sum()) - most, 0)
            if excess:
                last = mask[:, -1]
                last[last.nonzero()[-excess:, 0]] = False
        if self._nonfinite == "mark":
            mark = self._flat(block, NONFINITE, count)
            mark.zero_()
            if not finite:
                mark |= nonfinite_rows([(p, self._flat(block, p, count)) for p in self._env_paths], mark)
                if mask is not None:
                    mark &= mask
                flagged = int(mark.sum())
        elif self._nonfinite == "raise" and not finite:
            self._check_outcomes(block, count)
        after = self._number(block, count, trajectories, None if mask is None else mask.cpu().numpy())
        return Completed(self.frames(block, count), flagged, excess, after)

    def check(self, block: Block, acted: int, stepped: int) -> None:
        """Check the part of a block that was written before a failure.

        Args:
            block: a block of `schema`.
            acted: number of rows whose actions were written.
            stepped: number of rows whose outcomes were written for every environment.

        Raises:
            PolicyError, NonFiniteError: see `complete`.
        """
        if acted:
            self._check_actions(block, acted)
        if stepped and self._nonfinite == "raise":
            self._check_outcomes(block, stepped)

    def _finite(self, block: Block, count: int) -> bool:
        """Return whether all checked columns are known to be finite, from one fast scan on the CPU."""
        scanned = self._action_paths if self._nonfinite == "pass" else self._scanned_paths
        here = block.column(IDS).is_cpu  # on other devices `first_nonfinite` checks each column
        return here and are_finite([self._array(block, path, count) for path in scanned])

    def _check_actions(self, block: Block, count: int) -> None:
        check_actions([(p, self._flat(block, p, count)) for p in self._action_paths], count)

    def _check_outcomes(self, block: Block, count: int) -> None:
        check_finite([(p, self._flat(block, p, count)) for p in self._env_paths], count, self._env_name)

    def note_version(self, block: Block, version: int) -> None:
        """Write the version of the policy that acted into every step of the block."""
        for path in VERSIONS:
            block.column(path).fill_(version)

    def frames(self, block: Block, steps: int | Sequence[int]) -> int:
        """Return how many of the first steps are frames, over all environments.

        Args:
            block: a block of `schema`.
            steps: number of steps, one for all environments or one for each.
        """
        if isinstance(steps, int):
            mask = self._mask(block, steps)
            return steps * self.num_envs if mask is None else int(mask.sum())
        mask = self._mask(block, max(steps))
        if mask is None:
            return sum(steps)
        return sum(int(row[:count].sum()) for row, count in zip(mask, steps, strict=True))

    def done(self, block: Block, count: int) -> np.ndarray[Any, Any]:
        """Return ``(P, count)`` bool: whether a flag ended the trajectory at that step."""
        if not self._done_paths:  # trajectories of this environment never end
            return np.zeros((self.num_envs, count), np.bool_)
        flags = [self._array(block, path, count) for path in self._done_paths]
        if len(flags) == 1 and math.prod(flags[0].shape[2:]) == 1:
            return flags[0].reshape(self.num_envs, count)
        ended: list[Any] = [np.logical_or.reduce(f, axis=tuple(range(2, f.ndim))) for f in flags]
        found: np.ndarray[Any, Any] = ended[0] if len(ended) == 1 else np.logical_or.reduce(ended)
        return found

    def where(self, block: Block, trajectories: TrajectoryIds, env: int) -> tuple[int, int]:
        """Return the trajectory of environment `env` after a block's complete steps: ``(id, steps of the trajectory)``.

        Only for environments whose every step is a frame.

        Args:
            block: a block of `schema`.
            trajectories: the open trajectories before the block.
            env: index of the environment.
        """
        local, step = trajectories.where(self.done(block, block.num_complete), env)
        return (local if self._numbering is None else self._numbering(local)), step

    def action(self, block: Block, env: int, t: int) -> torch.Tensor | None:
        """Return the action of environment `env` at step `t`, for the first action key; None without actions."""
        path = self._first_action
        return None if path is None else self._flat(block, path, block.num_steps)[env, t]

    def _flat(self, block: Block, path: Path, count: int) -> torch.Tensor:
        """Return the column at `path` with the environments flattened, ``(P, count, *leaf)``."""
        column: torch.Tensor = block.flat(path)
        return column if count == block.num_steps else column[:, :count]

    def _array(self, block: Block, path: Path, count: int) -> np.ndarray[Any, Any]:
        """Return the column of `_flat` as an array: a view on the CPU, else a copy."""
        if not block.column(path).is_cpu:
            copy: np.ndarray[Any, Any] = self._flat(block, path, count).cpu().numpy()
            return copy
        array = block.array(path)
        flat = array.reshape((self.num_envs, block.num_steps, *array.shape[len(block.batch_size) :]))
        return flat if count == block.num_steps else flat[:, :count]

    def _mask(self, block: Block, count: int) -> torch.Tensor | None:
        """Return ``(P, count)`` bool, False on steps that are no frames; None if all steps are frames."""
        return self._flat(block, MASK, count) if MASK in self.schema else None

    def _rewards(self, block: Block, count: int) -> Any:
        """Return ``(P, count)``, the sum of each step's values at the first reward key; None without rewards."""
        if self._reward_path is None:
            return None
        field = self.schema[self._reward_path]
        if field.dtype in _REAL and field.shape.numel() == 1:
            return self._array(block, self._reward_path, count).reshape(self.num_envs, count)
        rewards = self._flat(block, self._reward_path, count)
        return rewards.flatten(2).sum(-1).double().cpu().numpy()

    def _number(self, block: Block, count: int, trajectories: TrajectoryIds, mask: Any) -> TrajectoryIds:
        """Write ids and step counts into the block, and return the open trajectories after it."""
        done, reward = self.done(block, count), self._rewards(block, count)
        ids = self._array(block, IDS, count)
        counts = self._array(block, _COUNT, count)[..., 0] if self._counted else None
        after = trajectories.record(done, reward, ids, counts, mask, self._numbering)
        if not block.column(IDS).is_cpu:  # `_array` returned copies
            self._flat(block, IDS, count).copy_(torch.from_numpy(ids))
            if counts is not None:
                self._flat(block, _COUNT, count).copy_(torch.from_numpy(counts)[..., None])
        if self._counted:
            self._flat(block, _NEXT_COUNT, count).copy_(self._flat(block, _COUNT, count)).add_(1)
        return after
