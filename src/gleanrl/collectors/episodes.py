"""Which episode a frame belongs to: ids, step counts and returns, from the done column, once a batch."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class EpisodeTracker:
    """Follows the episodes of P environments from batch to batch. One thread at a time.

    Ids never name two trajectories. The environments begin with 0 … P-1; each episode that ends gives its
    environment the next free id. Ends at the same step are taken in the environments' order. An id that has
    no frame yet is used again after a reset. Worker w of W multiplies: ``local id * W + w``.

    Args:
        num_envs: P.
        worker: w.
        num_workers: W.
        recent: how many ended episodes `recent_returns` and `recent_lengths` remember.
    """

    def __init__(self, num_envs: int, worker: int = 0, num_workers: int = 1, recent: int = 100) -> None:
        self._worker, self._num_workers = worker, num_workers
        self._ids = np.arange(num_envs, dtype=np.int64)
        self._next_id = num_envs
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._returns = np.zeros(num_envs, dtype=np.float64)
        self.num_ended = 0
        self.recent_returns: deque[float] = deque(maxlen=recent)
        self.recent_lengths: deque[int] = deque(maxlen=recent)

    def where(self, done: Array, env: int) -> tuple[int, int]:
        """Return where environment `env` stands after some steps: ``(episode id, steps within it)``.

        For environments whose every step is a frame.

        Args:
            done: ``(P, t)`` bool, the steps since the last `record`.
            env: its index.
        """
        ends = np.argwhere(done.T)  # (k, 2): step, environment
        mine = [k for k, (_, p) in enumerate(ends) if p == env]
        if not mine:
            return self._global(self._ids[env]), int(self._steps[env]) + done.shape[1]
        return self._global(self._next_id + mine[-1]), done.shape[1] - 1 - int(ends[mine[-1]][0])

    def record(
        self,
        done: Array,
        reward: Array | None,
        ids: Array,
        counts: Array | None = None,
        mask: Array | None = None,
    ) -> None:
        """Take note of a batch and fill in its columns.

        Args:
            done: ``(P, T)`` bool, whether the episode ended with this step.
            reward: ``(P, T)``, or None if returns aren't followed.
            ids: ``(P, T)`` int64, written: -1 on steps that are no frames.
            counts: ``(P, T)`` int64, written: steps of the episode before this one; None if not wanted.
            mask: ``(P, T)`` bool, False on steps that are no frames; None if all are.
        """
        num_envs, num_steps = done.shape
        before = np.broadcast_to(
            np.arange(num_steps + 1), (num_envs, num_steps + 1)
        )  # frames before each step
        if mask is not None:
            before = np.pad(mask.cumsum(1), ((0, 0), (1, 0)))
            done = done & mask
            reward = None if reward is None else np.where(mask, reward, 0)
        ended = np.argwhere(done.T)  # (k, 2): ends in the order of time, then of the environments
        t, env = ended[:, 0], ended[:, 1]
        # What each step's episode began with, filled forward: ids and frame numbers grow along every row.
        first_id = self._ids[:, None].repeat(num_steps + 1, axis=1)
        first_frame = -self._steps[:, None].repeat(num_steps + 1, axis=1)
        first_id[env, t + 1] = self._next_id + np.arange(len(ended))
        first_frame[env, t + 1] = before[env, t + 1]
        np.maximum.accumulate(first_id, axis=1, out=first_id)
        np.maximum.accumulate(first_frame, axis=1, out=first_frame)
        steps = before - first_frame
        ids[...] = self._global(first_id[:, :-1])
        if mask is not None:
            ids[~mask] = -1
        if counts is not None:
            counts[...] = steps[:, :-1]
        self.recent_lengths.extend((before[env, t + 1] - first_frame[env, t]).tolist())
        if reward is not None and num_steps:
            self.recent_returns.extend(self._sum(reward, done, t, env))
        self.num_ended += len(ended)
        self._next_id += len(ended)
        self._ids, self._steps = first_id[:, -1].copy(), steps[:, -1].copy()

    def _sum(self, reward: Array, done: Array, t: Array, env: Array) -> list[float]:
        """Return the returns of the episodes that end at steps `t` of `env`; go on with those of the others.

        Sums are float64; infinities of both signs give NaN, for their episode alone.
        """
        num_envs, num_steps = done.shape
        begins = np.zeros((num_envs, num_steps), dtype=np.bool_)
        begins[:, 0] = True
        begins[:, 1:] = done[:, :-1]
        begin = np.flatnonzero(begins)
        with np.errstate(invalid="ignore", over="ignore"):
            sums = np.add.reduceat(reward.ravel(), begin, dtype=np.float64)
            sums[np.searchsorted(begin, np.arange(num_envs) * num_steps)] += self._returns
        last = np.searchsorted(begin, np.arange(1, num_envs + 1) * num_steps) - 1  # each row's last episode
        self._returns = np.where(done[:, -1], 0.0, sums[last])
        found: list[float] = sums[np.searchsorted(begin, env * num_steps + t, side="right") - 1].tolist()
        return found

    def abandon(self, mask: Array | None = None) -> None:
        """Take note of a reset in mid-episode: environments whose episode has frames get new ids.

        Args:
            mask: ``(P,)`` bool, which environments were reset; None for all.
        """
        stale = self._steps > 0
        if mask is not None:
            stale &= mask
        count = int(stale.sum())
        self._ids[stale] = np.arange(self._next_id, self._next_id + count)
        self._next_id += count
        self._steps[stale] = 0
        self._returns[stale] = 0.0

    def _global(self, ids: Any) -> Any:
        return ids * self._num_workers + self._worker

    def state_dict(self) -> dict[str, Any]:
        """Return what keeps ids unique after a restart, and the counters."""
        return {
            "next_id": int(self._next_id),
            "num_ended": self.num_ended,
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the saved ids: every environment begins a new episode."""
        num_envs = len(self._ids)
        self._ids = np.arange(state["next_id"], state["next_id"] + num_envs, dtype=np.int64)
        self._next_id = int(state["next_id"]) + num_envs
        self._steps[:] = 0
        self._returns[:] = 0.0
        self.num_ended = int(state["num_ended"])
        self.recent_returns = deque(state["recent_returns"], maxlen=self.recent_returns.maxlen)
        self.recent_lengths = deque(state["recent_lengths"], maxlen=self.recent_lengths.maxlen)
