"""Transforms of actions: `ActionMask`, `ActionDiscretizer`, `DiscreteActionProjection`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gleanrl.data.specs import Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from gleanrl.data.specs.encodings import ChoiceSpec
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.following import Following
from gleanrl.envs.transforms.keys import missing_key
from gleanrl.envs.transforms.rows import Record, trailing
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, UnsupportedError
from gleanrl.schema import Field
from gleanrl.seeding import OwnedTorchGenerator
from gleanrl.tree import NestedKey, as_key, as_path


class ActionMask(Following):
    """Keeps random actions among those that an observation allows.

    Each root's mask becomes the mask of the action spec, so that what is drawn from `env.action_spec` (`rand_action`, a
    collector's random frames) is allowed. Policies must respect the mask themselves. The last observation of an episode
    may allow nothing: nobody acts on it, and the action spec allows everything until the reset.

    Args:
        action_key: a discrete action.
        mask_key: an observation, bool or integers 0 and 1, as `ChoiceSpec.update_mask` takes it: with one number for
            each choice, or for several choices one for each combination.
    """

    on_rows = True
    actions_vary = True

    def __init__(self, action_key: NestedKey = "action", mask_key: NestedKey = "action_mask") -> None:
        super().__init__()
        self.action_key, self.mask_key = as_key(as_path(action_key)), as_key(as_path(mask_key))

    def carries(self) -> dict[NestedKey, Field]:
        """Return the present mask."""
        shape = self.surroundings().full_observation_spec[self.mask_key].shape
        mask = self._choices().expanded_mask(torch.ones(shape, dtype=torch.bool))
        return {self.mask_key: Field(mask.shape, mask.dtype)}

    def _choices(self) -> Any:
        """Return the spec of the action as the environment before this transform has it."""
        return self.surroundings().full_action_spec[self.action_key]

    def carry(self, values: Mapping[NestedKey, Tensor]) -> None:
        """Carry a mask, and let the action spec have it."""
        super().carry(values)
        if values:
            self._show(values[self.mask_key])

    def written_keys(self) -> list[NestedKey]:
        """Return nothing: the mask is only read."""
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
        """Return where the episode has ended, so that no action follows: bool, of the shape of `nothing`."""
        ended = torch.zeros_like(nothing)
        for (done,) in self.groups():
            flag = outcome.get(done, None)
            if flag is not None and flag.shape[:-1] == nothing.shape[: flag.ndim - 1]:
                ended |= trailing(flag.squeeze(-1), nothing)
        return ended

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        mask, rows = self._mask(tensordict_reset), self.asked(tensordict)
        self._show(self.renewed(self.mask_key, mask, None if rows is None else trailing(rows, mask)))
        return tensordict_reset

    def _mask(self, record: Record) -> Tensor:
        """Return the mask as new booleans of the shape that the action's spec gives it."""
        mask: Tensor | None = record.get(self.mask_key, None)
        if mask is None:
            raise missing_key(self, self.mask_key, record)
        try:
            return self._choices().expanded_mask(mask).clone()
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"ActionMask: {self.mask_key!r}: {error}") from error

    def _show(self, mask: Tensor, space: Any = None) -> None:
        """Give the user's action spec a mask; `space` is that of the mask, if it's known."""
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
            self.container.empty_cache()  # a later transform renames or replaces the action: derive its spec anew

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Give the action the present mask, after checking that it can be masked."""
        leaf = action_spec.get(self.action_key, None)
        if not isinstance(leaf, ChoiceSpec):
            raise InvalidTypeError(f"ActionMask: {self.action_key!r} can't be masked: {leaf!r}")
        mask = self.carried.get(self.mask_key)
        if mask is None:
            return action_spec
        out = action_spec.clone()
        out[self.action_key].update_mask(mask)
        return out


class ActionDiscretizer(Transform):
    """Replaces a bounded continuous action by the number of an interval.

    Each component's range is cut into equal intervals. An action without dimensions of its own, ``(*batch,)``, becomes
    integers of that shape or one-hot vectors ``(*batch, n)``; one with d components ``(*batch, d)`` integers, also if d
    is 1, or the vectors side by side.

    Args:
        num_intervals: how many intervals; one number, or one for each component.
        action_key: the environment's action.
        out_action_key: the user's action; None for the same key.
        sampling: which number of an interval is taken: its middle, its lower or upper end, or a random one.
        categorical: whether the choice is an integer; if not, a one-hot vector.
        seed: of random numbers; None for one drawn from torch's global generator at the first draw.
    """

    on_rows = True
    generator: OwnedTorchGenerator

    class SamplingStrategy(Enum):
        """Which number of an interval an action stands for."""

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
        """Return whether the action has no dimensions beside the environment's."""
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
        if not self.categorical:
            index = torch.stack([part.long().argmax(-1) for part in value.split(counts.tolist(), -1)], -1)
        if self._is_scalar(spec):
            counts = counts[0]
            index = index if self.categorical else index.squeeze(-1)
        offset: Any = {"MEDIAN": 0.5, "LOW": 0.0, "HIGH": 1.0}.get(self.sampling.name)
        if offset is None:
            drawn = torch.rand(index.shape, dtype=low.dtype, device="cpu", generator=self.generator.get())
            offset = drawn.to(low.device)
        fraction = (index.to(low.dtype) + offset) / counts.to(low.device)
        return low + fraction * (high - low)

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Replace the continuous action by the discrete one."""
        (key,), (out_key,) = self.in_keys_inv, self.out_keys_inv
        leaf = action_spec.get(key, None)
        if leaf is None:
            raise MissingKeyError(f"ActionDiscretizer: no action {key!r} in {action_spec!r}")
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
    """Lets a policy with more choices than the environment has act in it: choices beyond are replaced by random ones.

    Args:
        num_actions_effective: how many choices the environment has.
        max_actions: how many the user's one-hot actions have, no fewer.
        action_key: the action.
        include_forward: whether actions in a buffer's batches are padded to `max_actions` on the way out.
        seed: of random choices; None for one drawn from torch's global generator at the first draw.
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
            drawn = torch.randint(
                self.num_actions_effective, choice.shape, device="cpu", generator=self.generator.get()
            )
            choice = torch.where(beyond, drawn.to(choice.device), choice)
        return torch.nn.functional.one_hot(choice, self.num_actions_effective).to(value.dtype)

    def forward(self, tensordict: Any) -> Any:
        """Pad the actions of a batch that is read."""
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
        """Give the action `max_actions` choices."""
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
