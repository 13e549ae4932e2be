"""Transforms of actions: `ActionMask`, `ActionDiscretizer`, `DiscreteActionProjection`, `MultiAction`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl._rollout.step_mdp import step_on
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl._util import positive
from gleanrl.data.specs import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from gleanrl.data.specs.categorical import ChoiceSpec
from gleanrl.envs.transforms.base import Transform, missing_key
from gleanrl.envs.transforms.episodic import Following
from gleanrl.envs.transforms.row_view import Record, trailing
from gleanrl.envs.transforms.spec_tools import map_leaves
from gleanrl.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)


class ActionMask(Following):
    """Restricts random actions to the choices that an observation allows.

    Each root's mask becomes the mask of the action spec. So `rand_action` and a collector's random frames draw allowed
    actions only. Policies must respect the mask themselves.

    The last observation of an episode may forbid all choices, because no action follows it. The action spec then
    allows all choices until the reset.

    Args:
        action_key: key of a discrete action.
        mask_key: key of the mask, an observation of booleans or of integers 0 and 1. It has one value for each choice,
            or for several choices one for each combination; see `ChoiceSpec.update_mask`.

    Raises:
        InvalidTypeError: when specs are derived, if the action isn't discrete.
        MissingKeyError: at a step or reset without the mask.
        InvalidArgumentError: at a step or reset, if the mask doesn't fit, or forbids all choices in mid-episode.
    """

    on_rows = True
    actions_vary = True

    def __init__(self, action_key: NestedKey = "action", mask_key: NestedKey = "action_mask") -> None:
        super().__init__()
        self.action_key, self.mask_key = as_key(as_path(action_key)), as_key(as_path(mask_key))

    def carries(self) -> dict[NestedKey, Field]:
        """Return the field of the current mask."""
        shape = self.surroundings().full_observation_spec[self.mask_key].shape
        mask = self._choices().expanded_mask(torch.ones(shape, dtype=torch.bool))
        return {self.mask_key: Field(mask.shape, mask.dtype)}

    def _choices(self) -> Any:
        """Return the action's spec in the parent environment."""
        return self.surroundings().full_action_spec[self.action_key]

    def carry(self, values: Mapping[NestedKey, Tensor]) -> None:
        """Set the carried mask, and give it to the action spec."""
        super().carry(values)
        if values:
            self._show(values[self.mask_key])

    def written_keys(self) -> list[NestedKey]:
        """Return an empty list: the mask is only read."""
        return []

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        mask = self._mask(next_tensordict)
        ours = self._choices()
        space = ours.masked(mask)
        nothing = space.forbids_all()
        if bool(nothing.any()):
            mask |= trailing(nothing & self._ended(next_tensordict, nothing), mask)
            space = ours.masked(mask)
        self.renewed(self.mask_key, mask, None)
        self._show(mask, space)
        return next_tensordict

    def _ended(self, outcome: Record, nothing: Tensor) -> Tensor:
        """Return where the episode has ended, and no action follows: bool, of the shape of `nothing`."""
        ended = torch.zeros_like(nothing)
        for (done,) in self.groups():
            flag = outcome.get(done, None)
            if flag is not None and flag.shape[:-1] == nothing.shape[: flag.ndim - 1]:
                ended |= trailing(flag.squeeze(-1), nothing)
        return ended

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        mask, rows = self._mask(tensordict_reset), self.reset_mask(tensordict)
        self._show(self.renewed(self.mask_key, mask, None if rows is None else trailing(rows, mask)))
        return tensordict_reset

    def _mask(self, record: Record) -> Tensor:
        """Return a new bool tensor with the mask in `record`, in the shape that the action's spec expects."""
        mask: Tensor | None = record.get(self.mask_key, None)
        if mask is None:
            raise missing_key(self, self.mask_key, record)
        try:
            return self._choices().expanded_mask(mask).clone()
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"ActionMask: {self.mask_key!r}: {error}") from error

    def _show(self, mask: Tensor, space: Any = None) -> None:
        """Set the mask of the user's action spec.

        Args:
            mask: bool, in the shape that the spec expects.
            space: the space with that mask, if the caller has it; it saves computing it again.
        """
        ours, users = self._choices(), self.container.full_action_spec.get(self.action_key, None)
        if (
            type(users) is type(ours)
            and users.shape == ours.shape
            and users.space.common == ours.space.common
        ):
            if space is None or users.device != ours.device:
                users.update_mask(mask)
            else:
                users.take(space)
        else:
            self.container.empty_cache()  # a later transform renames or replaces the action: derive the spec again

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Return a copy of the spec with the current mask; before the first reset, return the spec itself.

        Raises:
            InvalidTypeError: if the action's spec isn't a `ChoiceSpec`.
        """
        leaf = action_spec.get(self.action_key, None)
        if not isinstance(leaf, ChoiceSpec):
            raise InvalidTypeError(
                f"ActionMask: action_key: expected a discrete action that can be masked at {self.action_key!r}, got "
                f"{leaf!r}"
            )
        mask = self.carried.get(self.mask_key)
        if mask is None:
            return action_spec
        out = action_spec.clone()
        out[self.action_key].update_mask(mask)
        return out


class ActionDiscretizer(Transform):
    """Replaces a bounded continuous action by the index of an interval.

    Each component's range is divided into equal intervals. A scalar action, ``(*batch,)``, becomes integers of that
    shape, or one-hot vectors ``(*batch, n)``. An action with d components becomes integers ``(*batch, d)``, also if d
    is 1. Its one-hot vectors are concatenated along the last dimension.

    Args:
        num_intervals: number of intervals, one for all components or one for each.
        action_key: the environment's action.
        out_action_key: the user's action; None for the same key.
        sampling: the value in an interval that the environment gets: its middle, its lower or upper end, or a random
            one; None for the middle.
        categorical: whether the user's action is an integer; otherwise it is a one-hot vector.
        seed: seed of random values; None draws one from torch's global generator at the first use.

    Raises:
        InvalidArgumentError: if `num_intervals` isn't positive integers. When specs are derived, also if it has another
            number of components, or the action's bounds aren't finite.
        InvalidTypeError: for another `sampling`. When specs are derived, also if the action isn't bounded and
            floating-point.
        MissingKeyError: when specs are derived, if the environment has no such action.
        UnsupportedError: at use outside an environment.
    """

    on_rows = True
    generator: OwnedTorchGenerator

    class SamplingStrategy(Enum):
        """The value in an interval that the environment gets."""

        MEDIAN = 0
        LOW = 1
        HIGH = 2
        RANDOM = 3

    def __init__(
        self,
        num_intervals: int | Tensor,
        action_key: NestedKey = "action",
        out_action_key: NestedKey | None = None,
        sampling: SamplingStrategy | None = None,
        categorical: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(None, None, [action_key], [action_key if out_action_key is None else out_action_key])
        counts = torch.as_tensor(num_intervals)
        if counts.dtype.is_floating_point or counts.ndim > 1 or bool((counts < 1).any()):
            raise InvalidArgumentError(f"num_intervals: expected positive integers, got {num_intervals!r}")
        self.num_intervals = counts.to(torch.int64)
        self.sampling = self.SamplingStrategy.MEDIAN if sampling is None else sampling
        if not isinstance(self.sampling, self.SamplingStrategy):
            raise InvalidTypeError(f"sampling: expected a SamplingStrategy, got {sampling!r}")
        self.categorical = categorical
        self._box: tuple[Tensor, Tensor] | None = None
        self.generator = OwnedTorchGenerator(seed)

    def empty_cache(self) -> None:
        """Forget the action's bounds."""
        super().empty_cache()
        self._box = None

    def _bounds(self, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
            raise InvalidTypeError(f"ActionDiscretizer: expected a bounded continuous action, got {spec!r}")
        low, high = spec.bounds
        if not bool(low.isfinite().all() & high.isfinite().all()):
            raise InvalidArgumentError(f"ActionDiscretizer: expected finite bounds, got {spec!r}")
        return low, high

    def _is_scalar(self, spec: TensorSpec) -> bool:
        """Return whether the action has batch dimensions only."""
        return len(spec.shape) == len(self.parent.batch_size)

    def _counts(self, spec: TensorSpec) -> Tensor:
        """Return the number of intervals of each component, ``(d,)``."""
        size = 1 if self._is_scalar(spec) else spec.shape[-1]
        if self.num_intervals.ndim and len(self.num_intervals) != size:
            raise InvalidArgumentError(
                f"num_intervals: expected {size} numbers, got {self.num_intervals.tolist()}"
            )
        return self.num_intervals.expand(size)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        if self.parent is None:
            raise UnsupportedError(
                "ActionDiscretizer: it needs an environment's action spec; it can't be used in a replay buffer"
            )
        spec = self.parent.full_action_spec[self.in_keys_inv[0]]
        if self._box is None:
            self._box = self._bounds(spec)
        low, high = self._box
        counts = self._counts(spec)
        index = value
        if not self.categorical:  # concatenated one-hot vectors, one for each component
            index = torch.stack([part.long().argmax(-1) for part in value.split(counts.tolist(), -1)], -1)
        if self._is_scalar(spec):
            counts = counts[0]
            index = index if self.categorical else index.squeeze(-1)
        offset: Any = {"MEDIAN": 0.5, "LOW": 0.0, "HIGH": 1.0}.get(self.sampling.name)
        if offset is None:
            # Drawn on the CPU, so that a seed yields the same actions on every device.
            drawn = torch.rand(index.shape, dtype=low.dtype, device="cpu", generator=self.generator.get())
            offset = drawn.to(low.device)
        fraction = (index.to(low.dtype) + offset) / counts.to(low.device)
        return low + fraction * (high - low)

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Return a copy of the spec with the discrete action in place of the continuous one."""
        (key,), (out_key,) = self.in_keys_inv, self.out_keys_inv
        leaf = action_spec.get(key, None)
        if leaf is None:
            raise MissingKeyError(
                f"ActionDiscretizer: action_key: expected an action of the environment, got {key!r}; its actions are "
                f"{action_spec!r}"
            )
        self._bounds(leaf)
        counts = self._counts(leaf)
        scalar = self._is_scalar(leaf)
        out = action_spec.clone()
        del out[key]
        out[out_key] = self._choice(counts, leaf.shape if scalar else leaf.shape[:-1], leaf.device, scalar)
        return out

    def _choice(self, counts: Tensor, batch: torch.Size, device: Any, scalar: bool) -> TensorSpec:
        if scalar:
            n = int(counts[0])
            if self.categorical:
                return Categorical(n, shape=batch, device=device)
            return OneHot(n, shape=(*batch, n), device=device)
        if self.categorical:
            return MultiCategorical(counts, shape=(*batch, len(counts)), device=device)
        return MultiOneHot(counts.tolist(), shape=(*batch, int(counts.sum())), device=device)


class DiscreteActionProjection(Transform):
    """Maps one-hot actions with more choices than the environment has; excess choices become random ones.

    Args:
        num_actions_effective: number of choices in the environment.
        max_actions: number of choices in the user's one-hot actions, at least `num_actions_effective`.
        action_key: key of the action.
        include_forward: whether actions in sampled batches of a buffer are padded to `max_actions`.
        seed: seed of random choices; None draws one from torch's global generator at the first use.

    Raises:
        InvalidArgumentError: for bad numbers of choices; at a step, for an action with another number of choices.
        InvalidTypeError: when specs are derived, if the environment's action has another form.
    """

    on_rows = True
    generator: OwnedTorchGenerator

    def __init__(
        self,
        num_actions_effective: int,
        max_actions: int,
        action_key: NestedKey = "action",
        include_forward: bool = True,
        seed: int | None = None,
    ) -> None:
        if not 1 <= num_actions_effective <= max_actions:
            raise InvalidArgumentError(
                f"expected 1 <= num_actions_effective <= max_actions, got {num_actions_effective} and {max_actions}"
            )
        super().__init__(None, None, [action_key])
        self.num_actions_effective, self.max_actions = num_actions_effective, max_actions
        self.include_forward = include_forward
        self.generator = OwnedTorchGenerator(seed)

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        if value.shape[-1] != self.max_actions:
            raise InvalidArgumentError(
                f"DiscreteActionProjection: expected one-hot actions with {self.max_actions} choices, got shape "
                f"{tuple(value.shape)}"
            )
        choice = value.long().argmax(-1)
        beyond = choice >= self.num_actions_effective
        if bool(beyond.any()):
            # As many draws as actions, on the CPU: a seed yields the same choices on every device.
            drawn = torch.randint(
                self.num_actions_effective, choice.shape, device="cpu", generator=self.generator.get()
            )
            choice = torch.where(beyond, drawn.to(choice.device), choice)
        return torch.nn.functional.one_hot(choice, self.num_actions_effective).to(value.dtype)

    def forward(self, tensordict: Any) -> Any:
        """Pad the actions of a sampled batch with zeros to `max_actions`, in place; only with `include_forward`."""
        if self.include_forward:
            for key in self.in_keys_inv:
                action = tensordict.get(key)
                missing = self.max_actions - action.shape[-1]
                if missing > 0:
                    tensordict.set(
                        key, torch.nn.functional.pad(action.to(torch.uint8), (0, missing)).to(action.dtype)
                    )
        return tensordict

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Return a copy of the spec in which the action has `max_actions` choices."""
        out = action_spec.clone()
        for key in self.in_keys_inv:
            leaf = action_spec[key]
            if not isinstance(leaf, OneHot) or leaf.shape[-1] != self.num_actions_effective:
                raise InvalidTypeError(
                    f"DiscreteActionProjection: expected one-hot actions with {self.num_actions_effective} choices, "
                    f"the environment has {leaf!r}"
                )
            shape = (*leaf.shape[:-1], self.max_actions)
            out[key] = OneHot(self.max_actions, shape=shape, device=leaf.device, dtype=leaf.dtype)
        return out


class MultiAction(Transform):
    """Takes a chunk of actions, one after the other, as one step.

    It steps the parent environment once for each action. Transforms before it see every action; transforms after it see
    the chunk.

    If an episode ends within the chunk, its environment isn't stepped any more. In a batch this uses the ``"_step"``
    mask of `EnvBase.step`. In stacks the last observation is repeated, and further rewards are 0. So stacks are always
    as long as the chunk. Specs declare that length as -1: rollouts and collectors keep such entries in lists (see
    `Field`), and random actions are chunks of length 1.

    Args:
        dim: position of the chunk's dimension after the batch dimensions; 1 for directly after them.
        stack_rewards: whether the step returns all rewards, stacked along that dimension; otherwise the last reward
            that the environment returned.
        stack_observations: whether the step returns all observations, stacked along that dimension; otherwise the last
            one. A reset then returns a stack of length 1.
        action_key: the environment's action; None for all of its actions.
        chunk_key: key under which the policy writes the chunk; None for the action's key.

    Raises:
        InvalidArgumentError: a bad `dim`; at use, `chunk_key` for several actions.
        MissingKeyError: at a step without a chunk.
        SchemaError: at a step, if a chunk is empty or lacks its dimension, or chunks have different lengths.
        UnsupportedError: at a step, if an episode ends early in a batch that can't leave members out.

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
        """Return a `MultiAction` that reads the chunk at ``("vla_action", "chunk")``.

        Args:
            action_key: the environment's action.
            **options: other arguments of the class.
        """
        return cls(action_key=action_key, **{"chunk_key": ("vla_action", "chunk"), **options})

    def _default_in_keys_inv(self) -> list[NestedKey]:
        return [] if self.parent is None else list(self.parent.action_keys)

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return an empty list: entries aren't mapped one by one."""
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
                "MultiAction: expected chunks of the same length for all actions, got "
                f"{ {k: len(c) for k, c in chunks.items()} }"
            )
        each = [dict(zip(chunks, actions, strict=True)) for actions in zip(*chunks.values(), strict=True)]
        # The environment takes the first action in its usual step. `_step` takes the others, and needs the root for it.
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
            for key, collected in rewards.items():
                collected.append(self._reward(next_tensordict.get(key), collected[-1], going))
        axis = len(next_tensordict.batch_size) + self.dim - 1
        for stacked, found in ((self.stack_rewards, rewards), (self.stack_observations, observations)):
            for key, values in found.items():
                next_tensordict.set(key, torch.stack(values, axis) if stacked else values[-1])
        return next_tensordict

    def _reward(self, reward: Tensor, before: Tensor, going: Tensor) -> Tensor:
        """Return a step's reward; environments that weren't stepped get 0 in stacks, else their last reward."""
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
            raise UnsupportedError(
                "MultiAction: expected to be part of an environment; put it into a TransformedEnv"
            )
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
        """Return the spec of stacks of any length if rewards are stacked; otherwise the spec itself."""
        return self._stacked(reward_spec) if self.stack_rewards else reward_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Return the spec of stacks of any length if observations are stacked; otherwise the spec itself."""
        found: Composite = self._stacked(observation_spec) if self.stack_observations else observation_spec
        return found

    def _stacked(self, spec: Any) -> Any:
        keys = list(spec.keys(True, True))
        return map_leaves(spec, zip(keys, keys, strict=True), lambda leaf: self._many(leaf, spec))

    def _many(self, leaf: TensorSpec, spec: Composite) -> TensorSpec:
        """Return `leaf` with a dimension of length -1, which means any length."""
        axis = spec.ndim + self.dim - 1
        many = leaf.unsqueeze(axis).clone()
        many.shape = torch.Size((*many.shape[:axis], -1, *many.shape[axis + 1 :]))
        return many
