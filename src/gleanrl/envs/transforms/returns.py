"""Transforms that follow the rewards of an episode: `RewardSum`, `TargetReturn`."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data.specs import Composite
from gleanrl.envs.transforms.counting import Counting, QuietRows
from gleanrl.envs.transforms.following import Following, reward_fields, with_carried
from gleanrl.envs.transforms.keys import Keys, as_keys
from gleanrl.envs.transforms.rows import Record, sibling, trailing
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import InvalidArgumentError, MissingKeyError
from gleanrl.schema import Field
from gleanrl.tree import NestedKey, as_key, as_path


class RewardSum(Counting):
    """Sums up the rewards of each episode; the root's sum is that before the step.

    Args:
        in_keys: rewards; None for all of the environment's.
        out_keys: where the sums stand; None for ``"episode_reward"`` beside ``"reward"``, and so on.
        reset_keys: for each sum the ``"_reset"`` mask that sets it to zero; None for that of the group of flags that
            the reward stands in, or the environment's.
        reward_spec: whether the sums are declared as rewards rather than observations: then they stand below
            ``"next"`` only.

    Raises:
        InvalidArgumentError: if there are more keys of one kind than of the other.

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
    """

    on_rows = True
    _summed: list[tuple[NestedKey, NestedKey]] | None
    _begins: list[tuple[NestedKey, NestedKey, torch.Tensor]] | None

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        reset_keys: Keys | None = None,
        *,
        reward_spec: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if in_keys is not None and out_keys is not None:
            self.pairs()  # raises if they don't fit
        self._reset_keys = as_keys("reset_keys", reset_keys)
        self.reward_spec = reward_spec

    def _default_in_keys(self) -> list[NestedKey]:
        return list(self.surroundings().reward_keys)

    def _default_out_keys(self) -> list[NestedKey]:
        return [sibling(key, f"episode_{as_path(key)[-1]}") for key in self.in_keys]

    def empty_cache(self) -> None:
        """Forget the keys that were found in the environment."""
        super().empty_cache()
        self._summed = self._begins = None

    def carries(self) -> dict[NestedKey, Field]:
        """Return the sums."""
        return reward_fields(self)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        root = {} if self.reward_spec else tensordict  # as a reward the root's isn't that of this step
        if self._summed is None:
            self._summed = self.pairs()
        for in_key, out_key in self._summed:
            reward = next_tensordict.get(in_key)
            total = torch.add(self.last(root, out_key, reward.device), reward)
            self.carried[out_key] = total
            next_tensordict.set(out_key, total)
        return next_tensordict

    def summands(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return rewards and sums."""
        return self.pairs()

    def catch_up(self, rows: QuietRows) -> None:
        """Add one reward after the other, as steps do: sums of floats depend on the order."""
        for _, out_key in self.pairs():
            self.carried[out_key] = rows.add_up(out_key)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        here = tensordict_reset.device
        if self._begins is None:
            self._begins = self._find_begins()
        for out_key, reset_key, zero in self._begins:
            zero = zero.clone() if here is None else zero.to(here, copy=True)
            mask = tensordict.get(reset_key, None)
            before = None if self.reward_spec else self.own(tensordict, out_key)
            if mask is not None:
                if mask.ndim > zero.ndim or mask.shape != zero.shape[: mask.ndim]:
                    mask = mask.reshape(*tensordict_reset.batch_size, -1).any(-1)
                mask = trailing(mask, zero)
            zero = self.renewed(out_key, zero, mask, before)
            if not self.reward_spec:
                tensordict_reset.set(out_key, zero)
        return tensordict_reset

    def _find_begins(self) -> list[tuple[NestedKey, NestedKey, torch.Tensor]]:
        """Return each sum's key, its mask's, and what it begins with."""
        spec = self.surroundings().full_reward_spec
        asked = zip(self.pairs(), self.reset_keys, strict=True)
        return [(out_key, reset_key, spec[in_key].zero()) for (in_key, out_key), reset_key in asked]

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The mask of each sum."""
        known, given = list(self.surroundings().reset_keys), self._reset_keys
        if given is not None:
            if len(given) != len(self.in_keys) or any(key not in known for key in given):
                raise InvalidArgumentError(
                    f"RewardSum: reset_keys: expected one of {known} for each of {self.in_keys}, got {given}"
                )
            return given
        found: list[NestedKey] = []
        for key in self.in_keys:
            path = as_path(key)[:-1]
            above = [as_key((*path[:n], "_reset")) for n in range(len(path), -1, -1)]
            found.append(next((k for k in above if k in known), known[0]))
        return found

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the sums, unless they are declared as rewards."""
        return observation_spec if self.reward_spec else self._with_sums(observation_spec)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Add the sums if they are declared as rewards."""
        return self._with_sums(reward_spec) if self.reward_spec else reward_spec

    def _with_sums(self, spec: Composite) -> Composite:
        rewards = self.surroundings().full_reward_spec
        unknown = [key for key in self.in_keys if key not in keys_of(rewards)]
        if unknown:
            raise MissingKeyError(f"RewardSum: {unknown} are none of the rewards {keys_of(rewards)}")
        return with_carried(spec, self)


class TargetReturn(Following):
    """Adds the return that is still to be reached: a target at reset, from which rewards are taken off, or not.

    Args:
        target_return: the target at the beginning of each episode.
        mode: ``"reduce"`` takes each reward off, ``"constant"`` leaves the target as it is.
        in_keys: rewards; None for the environment's.
        out_keys: where the target stands; None for ``"target_return"``, which goes with one reward.
        reset_key: the ``"_reset"`` mask that sets it back; None for any of the environment's.

    Raises:
        InvalidArgumentError: for another mode.
    """

    on_rows = True
    MODES = ("reduce", "constant")

    def __init__(
        self,
        target_return: float,
        mode: str = "reduce",
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        reset_key: NestedKey | None = None,
    ) -> None:
        if mode not in self.MODES:
            raise InvalidArgumentError(f"mode: expected one of {self.MODES}, got {mode!r}")
        super().__init__(in_keys, out_keys)
        self.target_return, self.mode, self.reset_key = float(target_return), mode, reset_key

    def _default_in_keys(self) -> list[NestedKey]:
        return ["reward"] if self.parent is None else list(self.parent.reward_keys)

    def _default_out_keys(self) -> list[NestedKey]:
        return ["target_return"]

    def carries(self) -> dict[NestedKey, Field]:
        """Return the targets."""
        return reward_fields(self)

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for in_key, out_key in self.pairs():
            target = self.last(tensordict, out_key)
            reward = next_tensordict.get(in_key)
            target = target - reward if self.mode == "reduce" else target.clone()
            self.carried[out_key] = target
            next_tensordict.set(out_key, target)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows = self.asked(tensordict)
        device = self.home()
        for key, field in self.carries().items():
            fresh = torch.full(field.shape, self.target_return, dtype=field.dtype, device=device)
            mask = None if rows is None else trailing(rows, fresh)
            tensordict_reset.set(key, self.renewed(key, fresh, mask, self.own(tensordict, key)))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the targets."""
        return with_carried(observation_spec, self)
