"""`GymStepper`: steps a gymnasium environment into the rows of a block; the hot path of collection.

A step adds about two microseconds to the environment's own `step`. It builds no dictionary and no TensorDict. Views of
the columns are made once per block. Flags are zeroed once per block and set only where an episode ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import Leaf, ObjectColumn, as_leaf
from gleanrl._arrays.schema import Field, Schema, numpy_view
from gleanrl._arrays.tensordicts import FLAGS, Path, as_key
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.protocol import EpisodeRules, Lease, Stepper
from gleanrl.envs.libs.gym_codecs import Array, ArrayCodec, Codec, RewardCodec, as_flag
from gleanrl.envs.libs.gym_info import default_info_dict_reader
from gleanrl.envs.libs.gym_simulator import Simulator, checked_step
from gleanrl.envs.libs.gym_spaces import Tree, assemble, encode, leaves
from gleanrl.errors import SchemaError


@dataclass(frozen=True)
class GymCodecs:
    """The codecs of one environment: of its observations, actions, rewards and info entries."""

    observation: Tree
    action: Tree
    reward: RewardCodec
    readers: tuple[default_info_dict_reader, ...] = ()

    def root_leaves(self) -> list[Codec]:
        """Return the codecs of the root's leaves (without flags): the observation's, then the info entries'."""
        return [*leaves(self.observation), *(codec for reader in self.readers for codec in reader.codecs)]

    def encode(self, observation: Any, info: dict[str, Any]) -> list[Array]:
        """Return one array for each of `root_leaves`; they may share memory with `observation` and `info`."""
        arrays = encode(self.observation, observation)
        for reader in self.readers:
            arrays += reader.encode(info)
        return arrays


class GymRows:
    """Columns and actions of a gymnasium environment's steps; for a single environment or a vector of them.

    Args:
        codecs: the environment's codecs.
        batch_size: ``()`` for one environment, ``(P,)`` for a vector environment.

    Attributes:
        root_leaves: see `GymCodecs.root_leaves`.
        plain: the codec of the only root leaf, if values are written unchanged; otherwise None.
        actions: the codec and the block's column ``(T, *batch, *leaf)`` of each action leaf; see `see`.
    """

    def __init__(self, codecs: GymCodecs, batch_size: torch.Size) -> None:
        self._codecs, self._batch_size = codecs, batch_size
        self._action_leaves = leaves(codecs.action)
        self.root_leaves = codecs.root_leaves()
        first = self.root_leaves[0]
        alone = len(self.root_leaves) == 1 and not codecs.readers and codecs.observation is first
        self.plain = first if alone and isinstance(first, ArrayCodec) and first.start is None else None
        self.actions: list[tuple[Codec, Array]] = []

    def schema(self) -> Schema:
        """Return the columns: observations, info entries and flags; below ``"next"`` the same and the reward."""
        root = {codec.key: self._field(codec) for codec in self.root_leaves}
        root |= {(name,): Field(torch.Size((1,)), torch.bool) for name in FLAGS}
        outcome = {**root, ("reward",): self._field(self._codecs.reward)}
        return Schema({**root, **{("next", *path): field for path, field in outcome.items()}})

    def _field(self, codec: Codec) -> Field:
        return Field(torch.Size(codec.shape[len(self._batch_size) :]), codec.spec.dtype)

    def copied(self, carry: Sequence[Array]) -> dict[Path, Leaf]:
        """Return copies of a root's leaves, without flags.

        Args:
            carry: an array for each of `root_leaves`.
        """
        return {
            codec.key: ObjectColumn.of([array], (), self._field(codec).blank).clone()
            if codec.is_list
            else torch.from_numpy(np.array(array, codec.dtype))
            for codec, array in zip(self.root_leaves, carry, strict=True)
        }

    def see(self, block: Block) -> None:
        """Read actions from `block` from now on.

        Raises:
            PolicyError: if its columns don't match the action spec.
        """
        columns: list[Array] = []
        for codec in self._action_leaves:
            column = block.time_first(codec.key)
            codec.check_action(column.shape[1:], column.dtype)
            columns.append(numpy_view(column))
        self.actions = list(zip(self._action_leaves, columns, strict=True))

    def all_actions(self) -> Sequence[Any]:
        """Return all T actions of the block, decoded for the environment's `step`; they must already be written.

        In a one-hot action with several ones, all but the first are set to 0 in the block.
        """
        decoded = [codec.decode_all(column) for codec, column in self.actions]
        tree = self._codecs.action
        if isinstance(tree, Codec):
            return decoded[0]
        return [assemble(tree, list(v)) for v in zip(*decoded, strict=True)]

    def action(self, t: int) -> Any:
        """Return the action of row `t`, decoded for the environment's `step`; see `all_actions`."""
        values = [codec.decode(column[t]) for codec, column in self.actions]
        return assemble(self._codecs.action, values)


def loaded(root: TensorDictBase, key: Path, shape: tuple[int, ...], dtype: torch.dtype | None) -> Array:
    """Return a copy of an entry of a foreign root; raise `SchemaError` unless it has this shape and dtype."""
    leaf = root.get(as_key(key), None)
    if not isinstance(leaf, torch.Tensor) or leaf.shape != torch.Size(shape) or leaf.dtype is not dtype:
        got = f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "none"
        raise SchemaError(f"root: key {as_key(key)!r} expected {shape} {dtype}, got {got}")
    return np.array(leaf.detach().cpu().numpy())


_NUMBERS = frozenset({float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_})
_REAL = (torch.float32, torch.float64)
_NEVER = -1
_NO_RESULT = object()
_CACHED = 1 << 18  # bytes that still fit a processor's cache when a second pass reads them
_Array = np.ndarray


class GymStepper(Stepper):
    """Steps one gymnasium environment; see `Stepper` for the contract.

    The carry refers to the environment's last observation without a copy. The environment may overwrite it at its next
    call, but by then it has been copied into a block.

    Args:
        simulator: the environment.
        codecs: its codecs.
        rules: see `Stepper`.
        lease: see `Stepper`.
    """

    shows_nothing = True

    def __init__(self, simulator: Simulator, codecs: GymCodecs, rules: EpisodeRules, lease: Lease) -> None:
        super().__init__(torch.Size(), None, rules, lease)
        self._codecs, self._rows = codecs, GymRows(codecs, self.batch_size)
        self._root_leaves, self._plain = self._rows.root_leaves, self._rows.plain
        self._simulator = simulator
        self._env_step = simulator.stepping()
        # The carry: the root of the next step. `bind` writes it into row 0 of the next block.
        self._carry: Any = None  # one array for one plain leaf, else a list
        self._carry_flags = (False, False, False)
        self._t = -1  # the last row that was written
        self._block: Block | None = None
        self._start = 0  # the row at which the episode began; negative if in an earlier block
        self._limit_at = _NEVER
        # While `run` postpones the copies of roots: the rows at which episodes began, whose roots are already written.
        self._begun: list[int] | None = None
        self._shape: tuple[int, ...] = self._root_leaves[0].shape
        self._dtype: np.dtype[Any] | None = None

    # ----------------------------------------------------------------- carry
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Start a new episode, unless `mask` is False and there is a carry."""
        self._simulator.require_open()
        if mask is None or bool(mask.all()) or self._carry is None:
            self._carry = self._new_carry(0)
            self.lease.take()
            self._begin(self._t + 1)

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps that the episode has taken, int64 ``()``."""
        return torch.tensor(self._t + 1 - self._start, device="cpu")

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take copies of the entries of `root` as the carry. If it lacks one of the three flags, all of them are False.

        Raises:
            SchemaError: if an entry is missing, or has another shape or dtype.
        """
        self.lease.take()
        arrays = [
            _object(root, codec.key)
            if codec.is_list
            else loaded(root, codec.key, codec.shape, codec.spec.dtype)
            for codec in self._root_leaves
        ]
        flags = [loaded(root, (name,), (1,), torch.bool) for name in FLAGS if name in root.keys()]
        self._carry = arrays if self._plain is None else arrays[0]
        self._carry_flags = tuple(bool(flag[0]) for flag in flags) if len(flags) == 3 else (False,) * 3  # type: ignore[assignment]
        self._begin(self._t + 1 - (0 if steps is None else int(steps)))

    def root(self) -> dict[Path, Leaf]:
        """Return copies of the carry's leaves; reset first if there is no carry."""
        out = self._rows.copied(self._carry_arrays())
        flags = zip(FLAGS, self._carry_flags, strict=True)
        return out | {(name,): torch.tensor([flag], device="cpu") for name, flag in flags}

    def schema(self) -> Schema:
        """Return the columns of `GymRows`; reset first if there is no carry."""
        self._carry_arrays()
        return self._rows.schema()

    # ----------------------------------------------------------------- block
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Write into `block` from now on; copy the carry into its row 0, and set all other flags to False."""
        self._simulator.require_open()
        carry = self._carry_arrays()
        self._begin(self._start - self._t - 1)
        self._t, self._begun = -1, None
        self._last = block.num_steps - 1
        if block is not self._block:
            self._see(block)
        self._actions = self._rows.all_actions() if actions_ready else None
        for column, array in zip(self._roots, carry, strict=True):
            column[0] = array
        for flags in (*self._root_flags, *self._next_flags):
            flags.fill(False)
        for flags, flag in zip(self._root_flags, self._carry_flags, strict=True):
            flags[0] = flag

    def _see(self, block: Block) -> None:
        """Take views of the columns of `block`."""
        # None until all views are taken: after an error, the next `bind` must take them again.
        self._block = None
        self._rows.see(block)
        self._action_column = self._rows.actions[0][1]
        tree = self._codecs.action
        self._decode = tree.decode if isinstance(tree, Codec) else None
        self._takes_rows = isinstance(tree, Codec) and tree.decodes_to_itself
        self._roots = [block.array(codec.key) for codec in self._root_leaves]
        self._nexts = [block.array(("next", *codec.key)) for codec in self._root_leaves]
        self._root_array, self._next_array = self._roots[0], self._nexts[0]
        self._root_flags = [block.array((name,)) for name in FLAGS]
        self._next_flags = [block.array(("next", name)) for name in FLAGS]
        reward = self._codecs.reward
        self._rewards = block.array(("next", "reward"))
        single = reward.shape == (1,) and reward.spec.dtype in _REAL
        # Writing a cell of a memoryview takes half as long as writing an element of an array.
        self._reward_cells: Any = memoryview(cast(Any, self._rewards.reshape(-1))) if single else None
        self._block = block

    def _action(self, t: int) -> Any:
        """Return the action of row `t`."""
        if self._takes_rows:
            return self._action_column[t]
        if self._decode is not None:
            return self._decode(self._action_column[t])
        return self._rows.action(t)

    # ------------------------------------------------------------------ loop
    def step(self, t: int) -> None:
        """Step with the action of row `t`; reset if the episode ends and `rules.reset_when_done` is True."""
        actions = self._actions
        action = self._action(t) if actions is None else actions[t]
        result: Any = _NO_RESULT
        try:
            result = self._env_step(action)
            obs, reward, terminated, truncated, info = result
            if self._plain is not None:
                # Without this check, NumPy would silently broadcast another shape and cast another dtype.
                if obs.__class__ is not _Array or obs.shape != self._shape or obs.dtype is not self._dtype:
                    obs = self._odd(obs)
                self._next_array[t] = obs
            else:
                obs = self._codecs.encode(obs, info)
                for column, array in zip(self._nexts, obs, strict=True):
                    column[t] = array
            cells = self._reward_cells
            if cells is not None and reward.__class__ in _NUMBERS:
                cells[t] = reward
            else:
                self._rewards[t] = self._codecs.reward.encode(reward)
            if terminated is not False or truncated is not False or t == self._limit_at:
                ended, cut = as_flag("terminated", terminated), as_flag("truncated", truncated)
                if ended or cut or t == self._limit_at:
                    obs = self._end(t, obs, ended, cut)
            if t < self._last and self._begun is None:
                if self._plain is not None:
                    self._root_array[t + 1] = obs
                else:
                    for column, array in zip(self._roots, obs, strict=True):
                        column[t + 1] = array
            self._carry = obs
            self._t = t
        except BaseException as cause:
            self._fail(t, result, cause)

    def run(self, block: Block) -> None:
        """Take all steps of `block`. Nothing reads its roots before the end, so small ones are copied in one go.

        A root equals the observation of the step before, unless an episode began there. Only large roots are copied row
        by row, because they wouldn't stay in the processor's cache.
        """
        roots = self._root_array
        if self._plain is None or roots.nbytes > _CACHED:
            super().run(block)
            return
        begun: list[int] = []
        self._begun = begun
        try:
            super().run(block)
        finally:
            self._begun, count = None, min(self._t + 1, self._last)
            first_roots = roots[begun]
            roots[1 : count + 1] = self._next_array[:count]
            roots[begun] = first_roots

    def _odd(self, obs: Any) -> Array:
        """Return the encoded observation of a new shape or dtype; raise if the codec doesn't accept it."""
        assert self._plain is not None
        array = self._plain.encode(obs)
        self._dtype = self._plain.accepted
        return array

    def _end(self, t: int, obs: Any, terminated: bool, truncated: bool) -> Any:
        """Write the flags of the episode that ends at row `t`; return the next root's observation."""
        truncated = truncated or t == self._limit_at
        for flags, flag in zip(self._next_flags, (True, terminated, truncated), strict=True):
            flags[t] = flag
        if self.rules.reset_when_done:
            obs = self._new_carry(t)
            self._begin(t + 1)
            if self._begun is not None and t < self._last:
                self._begun.append(t + 1)
                self._root_array[t + 1] = obs
            return obs
        self._carry_flags = (True, terminated, truncated)
        if t < self._last:
            for flags, flag in zip(self._root_flags, self._carry_flags, strict=True):
                flags[t + 1] = flag
        return obs

    def _fail(self, t: int, result: Any, cause: BaseException) -> None:
        """Drop the carry, so that the next rollout begins with a reset, and raise the error.

        An `Exception` is raised as a `StepFault`, an interrupt unchanged. If the environment's result doesn't have five
        values, that is the better explanation, so it becomes the cause.
        """
        self._carry = None
        if not isinstance(cause, Exception) or isinstance(cause, StepFault):
            raise cause
        if result is not _NO_RESULT:
            try:
                checked_step(result)
            except Exception as better:
                cause = better
        raise StepFault(t, 0, "step", cause) from cause

    # -------------------------------------------------------------- episodes
    def _new_carry(self, t: int) -> Any:
        """Reset the environment; return its first observation as a carry."""
        try:
            obs, info = self._simulator.reset()
            if self._plain is None:
                carry: Any = self._codecs.encode(obs, info)
            else:
                carry = self._odd(obs)
        except Exception as cause:
            self._carry = None
            raise StepFault(t, 0, "reset", cause) from cause
        self._carry_flags = (False, False, False)
        return carry

    def _begin(self, start: int) -> None:
        """Let the episode begin at row `start` of the block, which is negative if it began in an earlier block."""
        self._start = start
        if self.rules.max_steps is not None:
            self._limit_at = max(start + self.rules.max_steps - 1, 0)

    def _carry_arrays(self) -> list[Array]:
        """Return the carry as one array for each root leaf. Resets first if there is no carry."""
        if self._carry is None:
            self.reset()
        return self._carry if self._plain is None else [self._carry]


def _object(root: TensorDictBase, key: Path) -> Any:
    """Return the object that a foreign root holds for a list leaf."""
    leaf = as_leaf(root.get(as_key(key)))
    return leaf.array.item() if isinstance(leaf, ObjectColumn) else leaf.clone()
