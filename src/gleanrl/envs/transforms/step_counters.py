"""Transforms that count and time: `StepCounter`, `InitTracker`, `TrajCounter`, `Timer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl._os import clock
from gleanrl.data.specs import Categorical, Composite, Unbounded
from gleanrl.envs.transforms.base import Keys
from gleanrl.envs.transforms.compose import flattened
from gleanrl.envs.transforms.counting import Counting, SkippedRows
from gleanrl.envs.transforms.episodic import EnvTransform, Following, require_free
from gleanrl.envs.transforms.row_view import Record, Row, sibling, trailing
from gleanrl.envs.transforms.spec_tools import count_spec
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


class StepCounter(Counting):
    """Counts the steps of each episode, from 0 at its reset, and truncates the episode at a limit.

    Every group of flags, such as that of a group of agents, has its own count. It is next to the group's done flag, in
    the same shape, and truncates that group. Several counters may share a count. The root holds the count before the
    step, ``"next"`` the count after it.

    Args:
        max_steps: number of steps after which an episode is truncated, at least 1; None for no limit.
        truncated_key: name of the flag to set. With a limit it is added to groups without it.
        step_count_key: name of the count.
        update_done: whether done is set too; otherwise the environment isn't reset at the limit.

    Raises:
        InvalidTypeError: if `max_steps` is no integer, or a key is no string.
        InvalidArgumentError: if `max_steps` is below 1. When specs are derived, also if the environment has such an
            observation already (also a ValueError).

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=3))
        >>> env.rollout(10)["next", "truncated"].flatten()
        tensor([False, False,  True])
    """

    on_rows = True
    shows = ("max_steps", "step_count_key")
    _counted: list[tuple[NestedKey, ...]] | None
    _added: list[NestedKey] | None

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
        # For each count, the tensor that the last step made, and its maximum: see `_highest_of`.
        self._highest: dict[NestedKey, tuple[torch.Tensor, int]] = {}
        # Adding a tensor is faster than adding a Python number.
        self._one = torch.ones((), dtype=torch.int64, device="cpu")

    def _groups(self) -> list[tuple[NestedKey, ...]]:
        """Return the keys of done, truncated and count for each group of flags."""
        if self._counted is None:
            self._counted = self.groups(self.truncated_key, self.step_count_key)
        return self._counted

    def _own_flags(self) -> list[NestedKey]:
        """Return the keys of the truncated flags that the environment lacks and this counter adds."""
        if self._added is None:
            flags = set(self.surroundings().full_done_spec.keys(True, True))
            self._added = [] if self.max_steps is None else [k for k in self.truncated_keys if k not in flags]
        return self._added

    def empty_cache(self) -> None:
        """Forget the groups of flags."""
        super().empty_cache()
        self._counted = self._added = None

    def carries(self) -> dict[NestedKey, Field]:
        """Return fields of the counts."""
        spec = self.surroundings().full_done_spec
        return {count: Field(spec[done].shape, torch.int64) for done, _, count in self._groups()}

    def written_keys(self) -> list[NestedKey]:
        """Return the keys of counts, and with a limit of truncated and done flags."""
        limited = self.max_steps is not None
        return [
            key
            for done, truncated, count in self._groups()
            for key in (count, *((truncated, done) if limited else ()))
        ]

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        limit = self.max_steps
        for done_key, truncated_key, count_key in self._counted or self._groups():
            before = self.last(tensordict, count_key)
            count = torch.add(before, self._one)
            self.carried[count_key] = count
            next_tensordict.set(count_key, count)
            if limit is None:
                continue
            if self._highest_of(tensordict, count_key, before, count) >= limit:
                over = count >= limit
                truncated = next_tensordict.get(truncated_key, None)
                next_tensordict.set(truncated_key, over if truncated is None else truncated | over)
                if self.update_done:
                    next_tensordict.set(done_key, next_tensordict.get(done_key) | over)
            elif next_tensordict.get(truncated_key, None) is None:
                next_tensordict.set(truncated_key, count >= limit)
        return next_tensordict

    def skippable_steps(self, root: Mapping[NestedKey, torch.Tensor]) -> int | None:
        """Return the number of next steps that stay below the limit; None without a limit."""
        if self.max_steps is None:
            return None
        highest = max(int(root[count].max()) if root[count].numel() else 0 for _, _, count in self._groups())
        return max(0, self.max_steps - 1 - highest)

    def catch_up(self, rows: SkippedRows) -> None:
        """Continue the counts. Truncated flags are cleared, because skippable rows are below the limit."""
        for _, truncated, count in self._groups():
            self.carried[count] = rows.count_on(count)
            if self.max_steps is not None:
                rows.clear(truncated)

    def _highest_of(self, root: Record, key: NestedKey, before: torch.Tensor, count: torch.Tensor) -> int:
        """Return the maximum of `count` after a step.

        If the root's count is the very tensor that the last step made, nothing was reset: the maximum is one higher.
        That saves a reduction in every step.
        """
        last, highest = self._highest.get(key, (None, 0))
        if last is before and isinstance(root, Row):  # a TensorDict's tensor could have been changed in place
            highest += 1
        else:
            highest = int(count.max()) if count.numel() else 0
        self._highest[key] = count, highest
        return highest

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        own = self._own_flags()
        for done_key, truncated_key, count_key in self._groups():
            done = tensordict_reset.get(done_key)
            reset_mask = tensordict.get(sibling(done_key, "_reset"), None)
            mask = None if reset_mask is None else reset_mask.reshape(done.shape)
            count = self.renewed(count_key, torch.zeros_like(done, dtype=torch.int64), mask)
            tensordict_reset.set(count_key, count)
            if truncated_key in own:
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
                    continue  # the other counter's spec is right
            else:
                require_free(self, observation_spec, count_key, "step_count_key")
            ends = self.max_steps is not None and self.update_done  # otherwise counts exceed the limit
            out[count_key] = count_spec(leaf.shape, leaf.device, self.max_steps if ends else None)
        return out

    def _counted_before(self, count_key: NestedKey) -> bool:
        """Return whether a counter before this one writes the same count, with the same values."""
        return any(
            isinstance(transform, StepCounter) and count_key in transform.step_count_keys
            for transform in flattened(self.surroundings().transform)
        )

    @property
    def done_keys(self) -> list[NestedKey]:
        """The keys of the done flags, one for each group."""
        return [done for done, _, _ in self._groups()]

    @property
    def terminated_keys(self) -> list[NestedKey]:
        """The keys of the terminated flags, one for each group."""
        return [sibling(done, "terminated") for done in self.done_keys]

    @property
    def step_count_keys(self) -> list[NestedKey]:
        """The keys of the counts, one for each group of flags."""
        return [count for _, _, count in self._groups()]

    @property
    def truncated_keys(self) -> list[NestedKey]:
        """The keys of the flags that are set at the limit, one for each group."""
        return [truncated for _, truncated, _ in self._groups()]

    def transform_done_spec(self, done_spec: Any) -> Any:
        """Add the specs of missing truncated flags if there is a limit."""
        out = done_spec.clone()
        own = self._own_flags()
        for done_key, truncated_key, _ in self._groups():
            if truncated_key in own:
                out[truncated_key] = done_spec[done_key].clone()
        return out


class InitTracker(Counting):
    """Marks the first root of each episode: True there, False in all other roots and below ``"next"``.

    Args:
        init_key: name of the mark; every group of flags has its own, in the shape of its done flag.

    Raises:
        InvalidTypeError: if `init_key` is no string.
        InvalidArgumentError: when specs are derived, if the environment has such an observation already.

    Examples:
        >>> from gleanrl.envs import GymEnv, TransformedEnv
        >>> TransformedEnv(GymEnv("CartPole-v1"), InitTracker()).rollout(3)["is_init"].flatten()
        tensor([ True, False, False])
    """

    on_rows = True
    _marked: list[tuple[NestedKey, ...]] | None

    def __init__(self, init_key: str = "is_init") -> None:
        if not isinstance(init_key, str):
            raise InvalidTypeError(
                f"init_key: expected a name, the same in every group of flags, got {init_key!r}"
            )
        super().__init__()
        self.init_key = init_key

    @property
    def init_keys(self) -> list[NestedKey]:
        """The keys of the marks, one for each group of flags."""
        return [mark for _, mark in self._marks()]

    def _marks(self) -> list[tuple[NestedKey, ...]]:
        """Return the keys of done and mark for each group of flags; cached."""
        if self._marked is None:
            self._marked = self.groups(self.init_key)
        return self._marked

    def empty_cache(self) -> None:
        """Forget the groups of flags."""
        super().empty_cache()
        self._marked = None

    def written_keys(self) -> list[NestedKey]:
        """Return the keys of the marks."""
        return self.init_keys

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for done_key, mark in self._marked or self._marks():
            next_tensordict.set(mark, torch.zeros_like(next_tensordict.get(done_key)))
        return next_tensordict

    def catch_up(self, rows: SkippedRows) -> None:
        """Write False for all marks: no skippable row begins an episode."""
        for mark in self.init_keys:
            rows.clear(mark)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        for done_key, mark in self._marks():
            done = tensordict_reset.get(done_key)
            reset_mask = tensordict.get(sibling(done_key, "_reset"), None)
            first = torch.ones_like(done) if reset_mask is None else reset_mask.reshape(done.shape).clone()
            tensordict_reset.set(mark, first)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the specs of the marks."""
        out = observation_spec.clone()
        spec = self.surroundings().full_done_spec
        for done_key, mark in self._marks():
            require_free(self, observation_spec, mark, "init_key")
            leaf = spec[done_key]
            out[mark] = Categorical(2, shape=leaf.shape, dtype=torch.bool, device=leaf.device)
        return out


class TrajCounter(Following):
    """Numbers trajectories from 0 in the order of their resets, across all environments of the batch.

    The count is a part of the state: an environment that loads it continues the numbers. Each process counts its own
    environments, so numbers in different processes overlap.

    Args:
        out_key: key of the number, ``(*batch, 1)`` int64, in the root and below ``"next"``.
        repeats: no effect; accepted for compatibility.
    """

    on_rows = True
    total: Tensor

    def __init__(self, out_key: NestedKey = "traj_count", *, repeats: int | None = None) -> None:
        super().__init__()
        self.out_keys = [out_key]
        self.register_buffer("total", torch.zeros((), dtype=torch.int64, device="cpu"))

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return an empty list: the number is added, no entry is mapped."""
        return []

    def written_keys(self) -> list[NestedKey]:
        """Return the key of the number."""
        return self.out_keys

    def carries(self) -> dict[NestedKey, Field]:
        """Return the field of the numbers."""
        return {self.out_keys[0]: Field(torch.Size((*self.surroundings().batch_size, 1)), torch.int64)}

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        (key,) = self.out_keys
        return next_tensordict.set(key, self.last(tensordict, key).clone())

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        (key,), rows = self.out_keys, self.reset_mask(tensordict)
        size = tensordict_reset.batch_size
        begins = torch.ones(size, dtype=torch.bool, device="cpu") if rows is None else rows.cpu()
        numbers = self.total.cpu() + begins.flatten().cumsum(0).reshape(size) - 1
        self.total += int(begins.sum())
        numbers = numbers.unsqueeze(-1).to(self.home())
        mask = None if rows is None else trailing(rows, numbers)
        return tensordict_reset.set(key, self.renewed(key, numbers, mask, self.own(tensordict, key)))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the spec of the number."""
        (key,), out = self.out_keys, observation_spec.clone()
        require_free(self, observation_spec, key, "out_key")
        out[key] = count_spec(self.carries()[key].shape, self.home())
        return out


class Timer(EnvTransform):
    """Measures the seconds that each step, the policy before it, and each reset take.

    ``"next"`` holds the times of the step and of the policy, and zero for the reset. The root after a reset holds the
    time of the reset, and zeros. The policy's time is all time from the end of the last step or reset to this step.
    Each time is ``(*batch,)`` float32, the same for all environments. With a `Timer` rollouts run on TensorDicts, which
    is slower.

    Args:
        out_keys: keys of the times of step, policy and reset. None for `time_key` followed by ``"_step"``,
            ``"_policy"`` and ``"_reset"``.
        time_key: see `out_keys`.
    """

    def __init__(self, out_keys: Keys | None = None, time_key: str = "time") -> None:
        super().__init__()
        self.time_key = time_key
        self.out_keys = (
            [f"{time_key}_{phase}" for phase in ("step", "policy", "reset")] if out_keys is None else out_keys
        )
        self._mark = clock.monotonic()
        self._policy = 0.0

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return an empty list: times are added, no entry is mapped."""
        return []

    def _lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._mark = self._mark, clock.monotonic()
        return self._mark - before

    def _inv_call(self, tensordict: Record) -> Record:
        self._policy = self._lap()
        return tensordict

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        return self._written(next_tensordict, self._lap(), self._policy, 0.0)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        self._lap()
        return super()._reset_env_preprocess(tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._written(tensordict_reset, 0.0, 0.0, self._lap())

    def _written(self, record: Record, *seconds: float) -> Record:
        for key, value in zip(self.out_keys, seconds, strict=True):
            record.set(key, torch.full(record.batch_size, value, device=record.device))
        return record

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the specs of the times."""
        out = observation_spec.clone()
        for key in self.out_keys:
            out[key] = Unbounded(observation_spec.shape, device=observation_spec.device)
        return out
