"""`MultiAction`: several actions at once, each a step of the environment."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl.arguments import positive
from gleanrl.data.specs import Composite, TensorSpec
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.keys import missing_key
from gleanrl.envs.transforms.rows import Record, trailing
from gleanrl.envs.transforms.spec_tools import map_leaves
from gleanrl.errors import SchemaError, UnsupportedError
from gleanrl.rollouts.stepping import step_on
from gleanrl.tree import NestedKey


class MultiAction(Transform):
    """Takes a chunk of actions, one after the other, as one step.

    It steps the environment with the transforms before it, which see every single action; those behind it see the
    chunk. An environment whose episode ends within the chunk is stepped no further, in a batch by the ``"_step"`` mask
    of `EnvBase.step`: its last observation stays, and its rewards are 0 from there on. Stacks are as long as the chunk
    always. Specs say -1 for that length: rollouts and collectors keep such entries in lists (see `Field`), and random
    actions are chunks of one.

    Args:
        dim: where the chunk's dimension stands behind the batch dimensions, 1 for right behind them.
        stack_rewards: whether the step has all rewards, stacked along the same dimension; else the last one that the
            environment gave.
        stack_observations: whether it has all observations, stacked likewise; those of a reset are a stack of one. Else
            it has the last one.
        action_key: the environment's action; None for all that it has.
        chunk_key: where the policy writes the chunk; None for the action's own key.

    Raises:
        InvalidArgumentError: a bad `dim`, or `chunk_key` for several actions.

    Examples:
        >>> import torch
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), MultiAction())
        >>> step = env.step(env.reset().set("action", torch.zeros(4, 1)))
        >>> step["next", "reward"].shape, step["next", "observation"].shape
        (torch.Size([4, 1]), torch.Size([3]))
    """

    def __init__(
        self,
        *,
        dim: int = 1,
        stack_rewards: bool = True,
        stack_observations: bool = False,
        action_key: NestedKey | None = None,
        chunk_key: NestedKey | None = None,
    ) -> None:
        super().__init__(
            in_keys_inv=None if action_key is None else [action_key],
            out_keys_inv=None if chunk_key is None else [chunk_key],
        )
        self.dim = positive("dim", dim)
        self.stack_rewards, self.stack_observations = bool(stack_rewards), bool(stack_observations)
        self._root: TensorDictBase | None = None
        self._rest: list[dict[NestedKey, Tensor]] = []

    @classmethod
    def from_vla(cls, *, action_key: NestedKey = "action", **options: Any) -> MultiAction:
        """Return one that reads the chunk at ``("vla_action", "chunk")``; see the class for the other arguments."""
        return cls(action_key=action_key, **{"chunk_key": ("vla_action", "chunk"), **options})

    def _default_in_keys_inv(self) -> list[NestedKey]:
        return [] if self.parent is None else list(self.parent.action_keys)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return nothing: entries aren't mapped one by one."""
        return []

    def _inv_call(self, tensordict: Record) -> Record:
        axis = len(tensordict.batch_size) + self.dim - 1
        chunks: dict[NestedKey, tuple[Tensor, ...]] = {}
        for key, chunk_key in self.pairs_inv():
            chunk = tensordict.get(chunk_key, None)
            if chunk is None:
                raise missing_key(self, chunk_key, tensordict)
            if chunk.ndim <= axis or not chunk.shape[axis]:
                raise SchemaError(
                    f"MultiAction: expected a chunk of actions at {chunk_key!r} along dimension {axis}, got "
                    f"{tuple(chunk.shape)}"
                )
            chunks[key] = chunk.unbind(axis)
        if len({len(chunk) for chunk in chunks.values()}) != 1:
            raise SchemaError(
                f"MultiAction: chunks of different lengths: { {k: len(c) for k, c in chunks.items()} }"
            )
        each = [dict(zip(chunks, actions, strict=True)) for actions in zip(*chunks.values(), strict=True)]
        for key, action in each[0].items():
            tensordict.set(key, action)
        self._root, self._rest = tensordict.copy(), each[1:]
        return tensordict

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        parent, root = self._environment(), self._root
        assert root is not None
        rewards = {key: [next_tensordict.get(key)] for key in parent.reward_keys}
        observations = {key: [next_tensordict.get(key)] for key in parent.observation_keys}
        for actions in self._rest:
            root, next_tensordict, going = step_on(root, next_tensordict, actions, parent)
            for key, seen in observations.items():
                seen.append(next_tensordict.get(key))
            for key, given in rewards.items():
                given.append(self._reward(next_tensordict.get(key), given[-1], going))
        axis = len(next_tensordict.batch_size) + self.dim - 1
        for stacked, found in ((self.stack_rewards, rewards), (self.stack_observations, observations)):
            for key, values in found.items():
                next_tensordict.set(key, torch.stack(values, axis) if stacked else values[-1])
        return next_tensordict

    def _reward(self, reward: Tensor, before: Tensor, going: Tensor) -> Tensor:
        """Return a step's reward; of environments that weren't stepped 0, or the one before."""
        other = torch.zeros_like(before) if self.stack_rewards else before
        return torch.where(trailing(going, before), reward, other) if bool(going.any()) else other

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        if self.stack_observations:
            axis = len(tensordict_reset.batch_size) + self.dim - 1
            for key in self._environment().observation_keys:
                tensordict_reset.set(key, tensordict_reset.get(key).unsqueeze(axis))
        return tensordict_reset

    def _environment(self) -> Any:
        if self.parent is None:
            raise UnsupportedError("MultiAction: expected to be part of an environment")
        return self.parent

    # ----------------------------------------------------------------- specs
    def transform_action_spec(self, action_spec: Any) -> Any:
        """Return the spec of chunks of any length."""
        out = map_leaves(action_spec, self.pairs_inv(), lambda leaf: self._many(leaf, action_spec))
        for key, chunk_key in self.pairs_inv():
            if key != chunk_key and key in out.keys(True, True):
                del out[key]
        return out

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Return the spec of stacks, where rewards are stacked."""
        return self._stacked(reward_spec) if self.stack_rewards else reward_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec of stacks, where observations are stacked."""
        found: Composite = self._stacked(observation_spec) if self.stack_observations else observation_spec
        return found

    def _stacked(self, spec: Any) -> Any:
        keys = list(spec.keys(True, True))
        return map_leaves(spec, zip(keys, keys, strict=True), lambda leaf: self._many(leaf, spec))

    def _many(self, leaf: TensorSpec, whole: Composite) -> TensorSpec:
        """Return the spec of any number of values."""
        axis = whole.ndim + self.dim - 1
        many = leaf.unsqueeze(axis).clone()
        many.shape = torch.Size((*many.shape[:axis], -1, *many.shape[axis + 1 :]))
        return many
