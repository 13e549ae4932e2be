"""`HERReplayBuffer`: a buffer that relabels a part of each batch with goals achieved later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import NestedKey, as_key, key_argument
from gleanrl.data.replay_buffers.components import made
from gleanrl.data.replay_buffers.presets import TensorDictReplayBuffer
from gleanrl.data.replay_buffers.samplers.base import Sampler
from gleanrl.data.replay_buffers.samplers.episode_index import BoundaryKeys, EpisodeTable
from gleanrl.data.replay_buffers.samplers.hindsight import (
    CHOSEN,
    GOAL,
    STEPS,
    HindsightRule,
    HindsightStrategy,
    with_hindsight,
    without_hindsight,
)
from gleanrl.data.replay_buffers.samplers.transitions import RandomSampler
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, MissingKeyError, SchemaError


class HERReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that relabels a part of each batch with achieved goals (hindsight).

    In a relabelled row an achieved goal, chosen by `strategy`, replaces the desired goal. The goal under ``"next"`` is
    replaced too if it is stored. `reward_fn` computes the row's reward again; done flags stay unchanged. Stored records
    never change. Trajectories end as in `SliceSampler`. An unfinished trajectory offers its stored steps.

    `sampler` and `set_sampler` accept a `RandomSampler`, `SamplerWithoutReplacement`, `PrioritizedSampler` or a slice
    sampler. The sampler also draws the goals, so its seed and its state cover them. The passed object itself is changed
    for that. The relabelling is the transform at index 0, so indexing the buffer returns copies.

    Args:
        reward_fn: maps the relabelled rows, a TensorDict ``[k]`` with all their entries, to their rewards. It returns
            the shape of the stored rewards or ``(k,)``.
        her_ratio: the fraction of a batch that is relabelled, 0 to 1. The rows are chosen anew for each batch.
        strategy: see `HindsightStrategy`.
        goal_key: key of the desired goal.
        achieved_goal_key: key of the achieved goal; ``("next", "achieved_goal")`` for the goal that the step achieved.
        reward_key: key of the reward.
        end_key: a flag that ends trajectories. ``terminated`` in the same group ends them too. ``("next", "done")``
            means every ``done``, ``terminated`` and ``truncated`` under ``next``.
        sampler: chooses the transitions of a batch; None for `RandomSampler`.
        **options: see `TensorDictReplayBuffer`. Further transforms act on relabelled batches.

    Raises:
        InvalidTypeError: `reward_fn` isn't callable.
        InvalidArgumentError: a ratio out of range, or an unknown strategy.
        UnsupportedError: a sampler of another kind.

    Source: Andrychowicz et al., Hindsight Experience Replay, https://arxiv.org/abs/1707.01495.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from gleanrl.data import LazyTensorStorage
        >>> def reward(rows):
        ...     return (rows["achieved_goal"] == rows["desired_goal"]).float()
        >>> buffer = HERReplayBuffer(
        ...     reward, her_ratio=1.0, strategy="final", storage=LazyTensorStorage(10), batch_size=4, seed=0
        ... )
        >>> x, done = torch.arange(4.0)[:, None], torch.tensor([[False], [False], [False], [True]])
        >>> data = {"achieved_goal": x, "desired_goal": x + 9, "next": {"reward": 0 * x, "done": done}}
        >>> index = buffer.extend(TensorDict(data, [4]))
        >>> buffer.sample()["desired_goal"].flatten()
        tensor([3., 3., 3., 3.])
    """

    def __init__(
        self,
        reward_fn: Callable[[TensorDictBase], torch.Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | str = "future",
        goal_key: NestedKey = "desired_goal",
        achieved_goal_key: NestedKey = "achieved_goal",
        reward_key: NestedKey = ("next", "reward"),
        end_key: NestedKey = ("next", "done"),
        sampler: Sampler | Callable[[], Sampler] | None = None,
        **options: Any,
    ) -> None:
        if not callable(reward_fn):
            raise InvalidTypeError(f"reward_fn: expected a callable, got {reward_fn!r}")
        if not 0.0 <= her_ratio <= 1.0:
            raise InvalidArgumentError(f"her_ratio: expected a number in [0, 1], got {her_ratio!r}")
        try:
            chosen = HindsightStrategy(strategy)
        except ValueError as cause:
            names = [member.value for member in HindsightStrategy]
            raise InvalidArgumentError(f"strategy: expected one of {names}, got {strategy!r}") from cause
        achieved, end = key_argument("achieved_goal_key", achieved_goal_key), key_argument("end_key", end_key)
        self._rule = HindsightRule(chosen, float(her_ratio), achieved)
        self._ends = (
            BoundaryKeys() if end == ("next", "done") else BoundaryKeys((end, (*end[:-1], "terminated")))
        )
        self._relabel = _Relabel(
            reward_fn, key_argument("goal_key", goal_key), key_argument("reward_key", reward_key)
        )
        # The sampler draws the goals: it sees trajectories under the lock, before a writer can overwrite them.
        base_sampler = RandomSampler() if sampler is None else sampler
        super().__init__(sampler=partial(self._seeing_goals, base_sampler), **options)

    def _seeing_goals(self, sampler: Sampler | Callable[[], Sampler]) -> Sampler:
        return with_hindsight(made("sampler", sampler), self._rule, EpisodeTable(self._ends))

    def _assemble(self, **options: Any) -> None:
        super()._assemble(**options)
        self.transforms.insert(0, self._relabel, False)

    def set_sampler(self, sampler: Sampler | Callable[[], Sampler]) -> Sampler:
        """Use another sampler, which draws the goals from now on. Return the old one, without hindsight.

        Raises:
            UnsupportedError: a sampler of a kind that can't draw goals; the buffer keeps its sampler.
        """
        return without_hindsight(super().set_sampler(partial(self._seeing_goals, sampler)))


class _Relabel:
    """The transform that writes the drawn goals into a batch and computes the rewards for them.

    Args:
        reward_fn: the user's function.
        goal: path of the desired goal.
        reward: path of the reward.
    """

    def __init__(
        self,
        reward_fn: Callable[[TensorDictBase], torch.Tensor],
        goal: tuple[str, ...],
        reward: tuple[str, ...],
    ) -> None:
        self._reward_fn, self._goal, self._reward = reward_fn, goal, reward

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Relabel a batch in place if it was drawn with goals, and return it; leave any other batch unchanged.

        Raises:
            MissingKeyError: the batch lacks the desired goal or the reward.
            SchemaError: the goals differ in shape, or `reward_fn` returned no tensor or another number of rewards.
        """
        chosen: Any = batch.pop(CHOSEN, None)
        if chosen is None:
            return batch
        batch.pop(STEPS, None)
        goals, rows = batch.pop(GOAL), torch.nonzero(chosen).squeeze(-1)
        if not len(rows):
            return batch
        part = batch[rows]
        for path in (self._goal, ("next", *self._goal)):
            wanted = batch.get(path, None)
            if wanted is None and path == self._goal:
                raise MissingKeyError(
                    f"goal_key: {as_key(path)!r} isn't in the batch; pass the key of the desired goal"
                )
            if wanted is not None:
                if wanted.shape != goals.shape:
                    raise SchemaError(
                        f"goal_key: {as_key(path)!r} has the shape {tuple(wanted.shape)}, but the achieved goals "
                        f"have {tuple(goals.shape)}; pass an achieved_goal_key of the same shape"
                    )
                wanted[rows] = goals[rows].to(wanted.dtype)
                part.set(path, wanted[rows])
        before = part.get(self._reward, None)
        if before is None:
            raise MissingKeyError(
                f"reward_key: {as_key(self._reward)!r} isn't in the batch; pass the key of the reward"
            )
        reward = self._reward_fn(part)
        if not isinstance(reward, torch.Tensor) or reward.numel() != before.numel():
            raise SchemaError(
                f"reward_fn: expected rewards of shape {tuple(before.shape)} or ({len(rows)},), got {reward!r:.99}"
            )
        batch.get(self._reward)[rows] = reward.reshape(before.shape).to(before.dtype)
        return batch

    def inv(self, data: Any) -> Any:
        """Return written data unchanged: only batches are relabelled."""
        return data
