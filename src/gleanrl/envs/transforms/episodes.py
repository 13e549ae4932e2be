"""Transforms that follow an episode: `StepCounter`, `InitTracker`, `RewardSum`, `TargetReturn`."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.block import Field
from gleanrl.data.specs import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs.transforms.compose import flattened
from gleanrl.envs.transforms.following import Following
from gleanrl.envs.transforms.keys import Keys, as_keys
from gleanrl.envs.transforms.rows import Record, sibling, trailing
from gleanrl.envs.transforms.spec_tools import keys_of
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError
from gleanrl.tree import NestedKey, as_key, as_path


class StepCounter(Following):
    """Counts the steps of each episode from 0 at its reset, and truncates it at a limit.

    Every group of flags (of agents, say) has its count beside its done flag, with that flag's shape, and is truncated
    by it. Several counters may share a count. The root's count is that before the step, the one below ``"next"`` that
    after it.

    Args:
        max_steps: truncate at so many steps, at least 1; None for no limit.
        truncated_key: the name of the flag to set; added where a group has none.
        step_count_key: the name of the count.
        update_done: whether done is set too; without it the environment isn't reset at the limit.

    Raises:
        InvalidArgumentError: if `max_steps` is below 1 (also a ValueError).

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=3))
        >>> env.rollout(10)["next", "truncated"].flatten()
        tensor([False, False,  True])
    """

    on_rows = True
    shows = ("max_steps", "step_count_key")

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str | None = "truncated",
        step_count_key: str | None = "step_count",
        update_done: bool = True,
    ) -> None:
        if max_steps is not None:
            if isinstance(max_steps, bool) or not isinstance(max_steps, int):
                raise InvalidTypeError(f"max_steps: expected an integer or None, got {max_steps!r}")
            if max_steps < 1:
                raise InvalidArgumentError(f"max_steps: expected at least 1, got {max_steps}")
        for name, key in (("truncated_key", truncated_key), ("step_count_key", step_count_key)):
            if key is not None and not isinstance(key, str):
                raise InvalidTypeError(
                    f"{name}: expected a name, the same in every group of flags, got {key!r}"
                )
        super().__init__()
        self.max_steps = max_steps
        self.truncated_key = truncated_key or "truncated"
        self.step_count_key = step_count_key or "step_count"
        self.update_done = update_done
        # To add it is faster than to add a number.
        self._one = torch.ones((), dtype=torch.int64, device="cpu")

    def _groups(self) -> list[tuple[NestedKey, ...]]:
        """Return done, truncated and count of each group of flags."""
        return self.groups(self.truncated_key, self.step_count_key)

    def carries(self) -> dict[NestedKey, Field]:
        """Return the counts."""
        spec = self.surroundings().full_done_spec
        return {count: Field(spec[done].shape, torch.int64) for done, _, count in self._groups()}

    def written_keys(self) -> list[NestedKey]:
        """Return counts and flags."""
        limited = self.max_steps is not None
        return [
            key
            for done, truncated, count in self._groups()
            for key in (count, *((truncated, done) if limited else ()))
        ]

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        limit = self.max_steps
        for done_key, truncated_key, count_key in self._groups_found or self._groups():
            count = torch.add(self.last(tensordict, count_key), self._one)
            self.carried[count_key] = count
            next_tensordict.set(count_key, count)
            if limit is None:
                continue
            over = count >= limit
            if bool(over.any()):
                before = next_tensordict.get(truncated_key, None)
                next_tensordict.set(truncated_key, over if before is None else before | over)
                if self.update_done:
                    next_tensordict.set(done_key, next_tensordict.get(done_key) | over)
            elif next_tensordict.get(truncated_key, None) is None:
                next_tensordict.set(truncated_key, over)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        for done_key, truncated_key, count_key in self._groups():
            done = tensordict_reset.get(done_key)
            asked = tensordict.get(sibling(done_key, "_reset"), None)
            mask = None if asked is None else asked.reshape(done.shape)
            count = self.renewed(count_key, torch.zeros_like(done, dtype=torch.int64), mask)
            tensordict_reset.set(count_key, count)
            if self.max_steps is not None and tensordict_reset.get(truncated_key, None) is None:
                tensordict_reset.set(truncated_key, torch.zeros_like(done))
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the counts."""
        out = observation_spec.clone()
        spec = self.surroundings().full_done_spec
        for done_key, _, count_key in self._groups():
            leaf = spec[done_key]
            if self._counted_before(count_key):
                if self.max_steps is None:
                    continue  # what the other one declares is right
            else:
                self._require_free(observation_spec, count_key, "step_count_key")
            if self.max_steps is None or not self.update_done:  # without it the episode goes on
                out[count_key] = Unbounded(leaf.shape, device=leaf.device, dtype=torch.int64)
            else:
                out[count_key] = Bounded(0, self.max_steps, leaf.shape, leaf.device, torch.int64)
        return out

    def _counted_before(self, count_key: NestedKey) -> bool:
        """Return whether another counter writes the same count, which is the same number."""
        return any(
            isinstance(transform, StepCounter) and count_key in transform.step_count_keys
            for transform in flattened(self.surroundings().transform)
        )

    @property
    def step_count_keys(self) -> list[NestedKey]:
        """The counts, one for each group of flags."""
        return [count for _, _, count in self._groups()]

    @property
    def truncated_keys(self) -> list[NestedKey]:
        """The flags that are set at the limit, one for each group."""
        return [truncated for _, truncated, _ in self._groups()]

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add missing truncated flags if there is a limit."""
        out = done_spec.clone()
        for done_key, truncated_key, _ in self._groups():
            if self.max_steps is not None and truncated_key not in done_spec.keys(True, True):
                out[truncated_key] = done_spec[done_key].clone()
        return out


class InitTracker(Following):
    """Marks the first root of each episode: True there, False everywhere else.

    Args:
        init_key: the name of the mark; every group of flags has its own, with the shape of its done flag.

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> TransformedEnv(GymEnv("CartPole-v1"), InitTracker()).rollout(3)["is_init"].flatten()
        tensor([ True, False, False])
    """

    on_rows = True

    def __init__(self, init_key: str = "is_init") -> None:
        if not isinstance(init_key, str):
            raise InvalidTypeError(
                f"init_key: expected a name, the same in every group of flags, got {init_key!r}"
            )
        super().__init__()
        self.init_key = init_key

    @property
    def init_keys(self) -> list[NestedKey]:
        """The marks, one for each group of flags."""
        return [mark for _, mark in self._marks()]

    def _marks(self) -> list[tuple[NestedKey, ...]]:
        """Return done and mark of each group of flags."""
        return self.groups(self.init_key)

    def written_keys(self) -> list[NestedKey]:
        """Return the marks."""
        return self.init_keys

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for done_key, mark in self._marks():
            next_tensordict.set(mark, torch.zeros_like(next_tensordict.get(done_key)))
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        for done_key, mark in self._marks():
            done = tensordict_reset.get(done_key)
            asked = tensordict.get(sibling(done_key, "_reset"), None)
            first = torch.ones_like(done) if asked is None else asked.reshape(done.shape).clone()
            tensordict_reset.set(mark, first)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the marks."""
        out = observation_spec.clone()
        spec = self.surroundings().full_done_spec
        for done_key, mark in self._marks():
            self._require_free(observation_spec, mark, "init_key")
            leaf = spec[done_key]
            out[mark] = Categorical(2, shape=leaf.shape, dtype=torch.bool, device=leaf.device)
        return out


class RewardSum(Following):
    """Sums up the rewards of each episode; the root's sum is that before the step.

    Args:
        in_keys: rewards; None for all of the environment's.
        out_keys: where the sums stand; None for ``"episode_reward"`` beside ``"reward"``, and so on.
        reset_keys: for each sum the ``"_reset"`` mask that sets it to zero; None for that of the group of flags that
            the reward stands in, or the environment's.
        reward_spec: whether the sums are declared as rewards rather than observations: then they stand below
            ``"next"`` only.

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
    """

    on_rows = True

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        reset_keys: Keys | None = None,
        *,
        reward_spec: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.reset_keys = as_keys("reset_keys", reset_keys)
        self.reward_spec = reward_spec

    def _default_in_keys(self) -> list[NestedKey]:
        return list(self.surroundings().reward_keys)

    def _default_out_keys(self) -> list[NestedKey]:
        return [sibling(key, f"episode_{as_path(key)[-1]}") for key in self.in_keys]

    def carries(self) -> dict[NestedKey, Field]:
        """Return the sums."""
        return self._as_rewards()

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        root = {} if self.reward_spec else tensordict  # as a reward the root's isn't that of this step
        for in_key, out_key in self._pairs_found or self.pairs():
            total = torch.add(self.last(root, out_key), next_tensordict.get(in_key))
            self.carried[out_key] = total
            next_tensordict.set(out_key, total)
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        spec = self.surroundings().full_reward_spec
        for (in_key, out_key), reset_key in zip(self.pairs(), self._masks(), strict=True):
            zero = spec[in_key].zero()
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

    def _masks(self) -> list[NestedKey]:
        """Return the reset mask of each sum."""
        known = list(self.surroundings().reset_keys)
        if self.reset_keys is not None:
            unknown = [key for key in self.reset_keys if key not in known]
            if unknown or len(self.reset_keys) != len(self.in_keys):
                raise InvalidArgumentError(
                    f"RewardSum: reset_keys: expected one of {known} for each of {self.in_keys}, got {self.reset_keys}"
                )
            return self.reset_keys
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
        return self._with_carried(spec)


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
        return self._as_rewards()

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
        return self._with_carried(observation_spec)
