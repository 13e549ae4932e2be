"""`VectorGymStepper`: steps a gymnasium vector environment into a block; it writes rows ``(P, ...)`` with NumPy.

A step adds a few microseconds to the environment's own `step`, for any P. It builds no TensorDict and no dictionary.
`gleanrl.envs.libs.gym_vector_simulator` handles the autoreset modes.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import FLAGS, Path
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import EpisodeRules, Lease, StepLimit, Stepper
from gleanrl.data.trajectories import MASK
from gleanrl.envs.libs.gym_codecs import Array
from gleanrl.envs.libs.gym_stepper import GymCodecs, GymRows, loaded
from gleanrl.envs.libs.gym_vector_simulator import VectorSimulator
from gleanrl.errors import UnsupportedError

_Array = np.ndarray


class VectorGymStepper(Stepper):
    """Steps a gymnasium vector environment; see `Stepper` for the contract.

    The carry refers to the environment's last observations without a copy, as in `GymStepper`.

    If the environment resets in the step after an end (NEXT_STEP), the rows of such resets are no frames: the column
    ``("collector", "mask")`` is False there.

    Args:
        simulator: the environment.
        codecs: its codecs, batched for P environments.
        rules: see `Stepper`.
        lease: see `Stepper`.

    Raises:
        UnsupportedError: for a step limit, if the environment can't reset some rows without the others.
    """

    shows_nothing = True

    def __init__(
        self, simulator: VectorSimulator, codecs: GymCodecs, rules: EpisodeRules, lease: Lease
    ) -> None:
        if rules.max_steps is not None and not simulator.partial:
            raise UnsupportedError(
                f"max_frames_per_traj: {simulator.env} can't reset some environments without the others; make it "
                f"with max_episode_steps={rules.max_steps}"
            )
        self._num_envs = simulator.num_envs
        super().__init__(torch.Size((self._num_envs,)), None, rules, lease)
        self._codecs, self._rows = codecs, GymRows(codecs, self.batch_size)
        self._root_leaves, self._plain = self._rows.root_leaves, self._rows.plain
        self._action = self._rows.action
        self._simulator = simulator
        self._masked = simulator.mode is AutoresetMode.NEXT_STEP
        # The carry: the root of the next step. `bind` writes it into row 0 of the next block.
        self._carry: list[Array] | None = None
        self._carry_flags = np.zeros((len(FLAGS), self._num_envs), np.bool_)
        self._limit = StepLimit(self.batch_size, rules.max_steps)

    # ----------------------------------------------------------------- carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Start new episodes where `mask` is True; in all environments if `mask` is None or there is no carry."""
        rows = None if mask is None or self._carry is None else mask.reshape(-1).cpu().numpy()
        if rows is not None and not rows.any():
            return
        # The rows to keep are copied, since the environment may overwrite its arrays in the reset.
        old = None if rows is None else [np.array(array) for array in self._carry or ()]
        self._carry = None
        self._carry = self._new_carry(0, rows, old)
        self._carry_flags[:, slice(None) if rows is None else rows] = False
        self.lease.take()

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps that each episode has taken, int64 ``(P,)``; zero without a step limit."""
        return torch.from_numpy(self._limit.counts.copy())

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take copies of the entries of `root` as the carry; flags that it lacks are False.

        Raises:
            SchemaError: if an entry is missing, or has another shape or dtype.
        """
        self.lease.take()
        self._carry = [loaded(root, c.key, c.shape, c.spec.dtype) for c in self._root_leaves]
        self._carry_flags[:] = False
        for k, name in enumerate(FLAGS):
            if name in root.keys():
                self._carry_flags[k] = loaded(root, (name,), (self._num_envs, 1), torch.bool)[:, 0]
        self._limit.counts[:] = 0 if steps is None else steps.numpy()

    def root(self) -> dict[Path, torch.Tensor]:
        """Return copies of the carry's leaves, ``(P, *leaf)``; reset first if there is no carry."""
        out = self._rows.copied(self._carry_arrays())
        flags = torch.from_numpy(self._carry_flags.copy()).unsqueeze(-1)
        return out | {(name,): flags[k] for k, name in enumerate(FLAGS)}

    def schema(self) -> Schema:
        """Return the columns of `GymRows`; with NEXT_STEP also the mask of frames. Reset first if there is no carry."""
        self._carry_arrays()
        mask = {MASK: Field(torch.Size(), torch.bool)} if self._masked else {}
        return Schema({**self._rows.schema().items(), **mask})

    # ----------------------------------------------------------------- block
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Write into `block` from now on; copy the carry into its row 0, and set all other flags to False."""
        self._simulator.require_open()
        carry = self._carry_arrays()
        self._last = block.num_steps - 1
        self._roots = [_by_time(block, codec.key) for codec in self._root_leaves]
        self._nexts = [_by_time(block, ("next", *codec.key)) for codec in self._root_leaves]
        self._next_rows = self._nexts[0]
        for rows, array in zip(self._roots, carry, strict=True):
            rows[0] = array
        self._root_flags = [_by_time(block, (name,))[..., 0] for name in FLAGS]
        self._next_flags = [_by_time(block, ("next", name))[..., 0] for name in FLAGS]
        for name in FLAGS:
            block.column((name,)).zero_()
            block.column(("next", name)).zero_()
        for flags, flag in zip(self._root_flags, self._carry_flags, strict=True):
            flags[0] = flag
        self._carry_flags[:] = False  # after any further step, the root is no longer done
        self._rewards = _by_time(block, ("next", "reward"))
        self._flat_rewards, self._row = self._rewards[..., 0], (self._num_envs,)
        single = self._codecs.reward.shape == (self._num_envs, 1)
        self._reward_dtype = self._codecs.reward.dtype if single else None
        if self._masked:
            block.column(MASK).fill_(True)
            self._frames = _by_time(block, MASK)
        self._rows.see(block)
        self._actions = self._rows.all_actions() if actions_ready else None

    # ------------------------------------------------------------------ loop
    def step(self, t: int) -> None:
        """Step with the actions of row `t`; reset where episodes end if `rules.reset_when_done` is True."""
        actions = self._actions
        try:
            action = self._action(t) if actions is None else actions[t]
            obs, reward, terminated, truncated, info = self._simulator.step(action)
            if self._plain is not None:
                arrays = [self._plain.encode(obs)]
                self._next_rows[t] = arrays[0]
            else:
                arrays = self._codecs.encode(obs, info)
                for rows, array in zip(self._nexts, arrays, strict=True):
                    rows[t] = array
            if (
                reward.__class__ is _Array
                and reward.dtype is self._reward_dtype
                and reward.shape == self._row
            ):
                self._flat_rewards[t] = reward
            else:
                self._rewards[t] = self._codecs.reward.encode(reward)
            skipped = self._simulator.skipped
            if skipped is not None:
                self._frames[t] = ~skipped
            over = self._limit.step(skipped)
            if np.count_nonzero(terminated) or np.count_nonzero(truncated) or over is not None:
                arrays = self._end(t, arrays, terminated, truncated, over)
            if t < self._last:
                for rows, array in zip(self._roots, arrays, strict=True):
                    rows[t + 1] = array
            self._carry = arrays
        except BaseException as cause:
            self._carry = None  # the next rollout begins with a reset
            if not isinstance(cause, Exception) or isinstance(cause, StepFault):
                raise
            raise self.fault(t, "step", cause) from cause

    def _end(
        self, t: int, arrays: list[Array], terminated: Array, truncated: Array, over: Array | None
    ) -> list[Array]:
        """Write the flags of the episodes that end at row `t`; return the leaves of the next root."""
        natural = terminated | truncated
        truncated = truncated if over is None else truncated | over
        done = terminated | truncated
        for flags, flag in zip(self._next_flags, (done, terminated, truncated), strict=True):
            flags[t] = flag
        if not self.rules.reset_when_done:
            self._carry_flags[:] = (done, terminated, truncated)
            if t < self._last:
                for flags, flag in zip(self._root_flags, self._carry_flags, strict=True):
                    flags[t + 1] = flag
            return arrays
        if self._masked:  # the environment itself resets the rows that it ended
            done &= ~natural
            if not np.count_nonzero(done):
                return arrays
        return self._new_carry(t, done, [np.array(rows[t]) for rows in self._nexts])

    # -------------------------------------------------------------- episodes
    def _new_carry(self, t: int, mask: Array | None, old: list[Array] | None) -> list[Array]:
        """Reset the rows of `mask`; return their first observations, with the rows of `old` elsewhere."""
        try:
            obs, info = self._simulator.reset(mask)
            arrays = self._codecs.encode(obs, info)
        except Exception as cause:
            raise self.fault(t, "reset", cause) from cause
        self._limit.restart(mask)
        if mask is None or old is None:
            return arrays
        for array, new in zip(old, arrays, strict=True):
            where = mask.reshape(-1, *[1] * (array.ndim - 1))
            np.copyto(array, new, "unsafe", where)  # takes a third of the time of indexing
        return old

    def _carry_arrays(self) -> list[Array]:
        """Return the carry as one array for each root leaf. Resets first if there is no carry."""
        if self._carry is None:
            self.reset()
        assert self._carry is not None
        return self._carry


def _by_time(block: Block, path: Path) -> Array:
    """Return a view of the column at `path` with time first, ``(T, P, *leaf)``."""
    return np.moveaxis(block.array(path), 1, 0)
