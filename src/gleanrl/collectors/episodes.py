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

        Args:
            done: ``(P, t)`` bool, the steps since the last `record`.
            env: its index.
        """
        ends = np.argwhere(done.T)  # (k, 2): step, environment
        mine = [k for k, (_, p) in enumerate(ends) if p == env]
        if not mine:
            return self._global(self._ids[env]), int(self._steps[env]) + done.shape[1]
        return self._global(self._next_id + mine[-1]), done.shape[1] - 1 - int(ends[mine[-1]][0])

    def record(self, done: Array, reward: Array | None, ids: Array, counts: Array | None = None) -> None:
        """Take note of a batch and fill in its columns.

        Args:
            done: ``(P, T)`` bool, whether the episode ended with this step.
            reward: ``(P, T)``, or None if returns aren't followed.
            ids: ``(P, T)`` int64, written.
            counts: ``(P, T)`` int64, written: steps of the episode before this one; None if not wanted.
        """
        num_steps = done.shape[1]
        begins = np.zeros(len(self._ids), dtype=np.int64)  # row at which the current episode began
        first_ids, first_steps = self._ids.copy(), self._steps.copy()
        ids[...] = self._global(first_ids)[:, None]
        if counts is not None:
            counts[...] = first_steps[:, None] + np.arange(num_steps)
        for t, env in np.argwhere(done.T).tolist():
            begin = int(begins[env])
            self._end(env, t + 1 - begin, None if reward is None else reward[env, begin : t + 1])
            begins[env] = t + 1
            ids[env, t + 1 :] = self._global(self._ids[env])
            if counts is not None:
                counts[env, t + 1 :] = np.arange(num_steps - t - 1)
        self._steps += num_steps - begins
        if reward is not None:
            for env, begin in enumerate(begins.tolist()):
                self._returns[env] += _sum(reward[env, begin:])

    def _end(self, env: int, num_steps: int, rewards: Array | None) -> None:
        """End the episode of `env`, whose last `num_steps` steps are in this batch, with those `rewards`."""
        if rewards is not None:
            self.recent_returns.append(float(self._returns[env]) + _sum(rewards))
        self.recent_lengths.append(int(self._steps[env]) + num_steps)
        self.num_ended += 1
        self._steps[env] = 0
        self._returns[env] = 0.0
        self._ids[env] = self._next_id
        self._next_id += 1

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


def _sum(rewards: Array) -> float:
    """Return the sum in float64; infinities of both signs give NaN, for this episode alone."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.add.reduce(rewards, dtype=np.float64))
