"""Environments whose observations identify their origin, and the rules that any set of their batches obeys.

An observation is `(seed, stream, episode, step, life, action, mix)`, int64. `seed` is the seed of the last reset that
had one (-1 before). `stream` is the number of the environment. `life` is the time of its construction, so that the
successor of a killed worker's environment has another one. `action` holds the bits of the last action, and `mix` mixes
all other columns. So rows alone show lost, repeated, torn or swapped data.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tensordict import TensorDictBase

from gleanrl.envs import GymWrapper
from tests.chaos.faults import Fault
from tests.contract.helpers import IDS, rows_of
from tests.fakes import Script

SEED, STREAM, EPISODE, STEP, LIFE, ACTION, MIX = range(7)
WIDTH = 7
STEPS, LIFE_STEPS, PROCESS, FIRST_STEP_NS = range(4)
"""Columns of a `Tally`: all steps so far; steps, process and time of the first step of the latest life."""
COUNTS = 4
ODD = np.random.default_rng(7).integers(1 << 62, size=MIX) * 2 + 1
SCRIPT = Script(seed=11, low=1, high=40)


class Tally:
    """Counts in a file that environments write and tests read, even after the workers are gone.

    Args:
        path: the file.
        streams: number of environments; None opens an existing file.
    """

    def __init__(self, path: Path, streams: int | None = None) -> None:
        if streams is not None:
            path.write_bytes(bytes(streams * COUNTS * 8))
        self.path = path
        self.counts: np.ndarray = np.memmap(path, np.int64, "r+").reshape(-1, COUNTS)

    @property
    def steps(self) -> int:
        """Return the steps of all environments."""
        return int(self.counts[:, STEPS].sum())


def mixed(values: np.ndarray) -> np.ndarray:
    """Mix the first columns of observations, as a sum of products that wrap."""
    with np.errstate(over="ignore"):
        mix: np.ndarray = (values[..., :MIX] * ODD).sum(-1)
    return mix


class SelfCheckingEnv(gym.Env[Any, Any]):
    """An environment with the observations of this module.

    Args:
        stream: its number.
        tally: file of its counts.
        fault: a fault that happens to it.
        nap_s: duration of a step.
        script: lengths and endings of its episodes.
    """

    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(
        self,
        stream: int = 0,
        tally: Path | None = None,
        fault: Fault | None = None,
        nap_s: float = 0.0,
        script: Script = SCRIPT,
    ) -> None:
        limit = np.iinfo(np.int64)
        self.observation_space = spaces.Box(limit.min, limit.max, (WIDTH,), np.int64)
        self._stream, self._script, self._nap_s, self._fault = stream, script, nap_s, fault
        self._seed, self._episode, self._step, self._action = -1, -1, 0, 0
        self._life, self._calls = time.monotonic_ns(), {"reset": 0, "step": 0}
        self._count = None if tally is None else Tally(tally).counts[stream]
        if fault:
            fault.constructed(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode."""
        self._calls["reset"] += 1
        self._seed = self._seed if seed is None else seed
        self._episode, self._step, self._action = self._episode + 1, 0, 0
        return self._emit("reset"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one step. The observation holds the action's bits."""
        self._action = int(np.ascontiguousarray(action, np.float32).view(np.int64)[0])
        self._step += 1
        self._calls["step"] += 1
        if self._nap_s:
            time.sleep(self._nap_s)
        observation = self._emit("step")
        if self._count is not None:
            self._count[STEPS] += 1
            self._count[LIFE_STEPS] = self._calls["step"]
            if self._calls["step"] == 1:
                self._count[PROCESS], self._count[FIRST_STEP_NS] = os.getpid(), time.monotonic_ns()
        terminated, truncated = self._script.flags(self._stream, self._episode, self._step)
        return observation, self._step / 1024, terminated, truncated, {}

    def _emit(self, where: str) -> Any:
        row = np.array(
            (self._seed, self._stream, self._episode, self._step, self._life, self._action, 0), np.int64
        )
        row[MIX] = mixed(row)
        return self._fault.passed(where, self._calls[where], row) if self._fault else row


def oracle(stream: int = 0, **kwargs: Any) -> GymWrapper:
    """Make an environment."""
    return GymWrapper(SelfCheckingEnv(stream, **kwargs))


def makers(count: int, **kwargs: Any) -> list[Any]:
    """Return functions that make `count` environments."""
    return [partial(oracle, stream, **kwargs) for stream in range(count)]


@dataclass
class Record:
    """All rows that a collector delivered, in order; `check` verifies them."""

    script: Script = SCRIPT
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)

    def add(self, batch: TensorDictBase) -> int:
        """Add a batch; return the number of its real frames."""
        frames = 0
        for row in rows_of(batch):
            part = {
                "root": row["observation"],
                "next": row["next", "observation"],
                "action": row["action"],
                "id": row[IDS],
                "terminated": row["next", "terminated"].squeeze(-1),
                "truncated": row["next", "truncated"].squeeze(-1),
                "done": row["next", "done"].squeeze(-1),
            }
            self.parts.append({name: leaf.numpy().copy() for name, leaf in part.items()})
            frames += len(row)
        return frames

    def column(self, name: str) -> np.ndarray:
        """Return one column of all rows, in the order of delivery."""
        return np.concatenate([part[name] for part in self.parts])

    @property
    def frames(self) -> int:
        """Return the number of delivered frames."""
        return sum(len(part["id"]) for part in self.parts)

    @property
    def lives(self) -> int:
        """Return the number of environments with rows here, including successors of killed ones."""
        return len(np.unique(self.column("root")[:, [STREAM, LIFE]], axis=0))

    def check(self) -> None:
        """Fail unless each row is whole, right and unique, and no row in between is missing."""
        root, after = self.column("root"), self.column("next")
        for name, rows in (("root", root), ("next", after)):
            torn = np.flatnonzero(mixed(rows) != rows[:, MIX])
            assert not len(torn), f"{len(torn)} {name} rows are torn, first {rows[torn[:1]].tolist()}"
        same = [SEED, STREAM, EPISODE, LIFE]
        wrong = (root[:, same] != after[:, same]).any(-1) | (after[:, STEP] != root[:, STEP] + 1)
        wrong |= after[:, ACTION] != np.ascontiguousarray(self.column("action")).view(np.int64)[:, 0]
        assert not wrong.any(), f"root and next don't belong together: {_first(wrong, root, after)}"
        self._check_flags(after)
        _, places = np.unique(root[:, [STREAM, LIFE, EPISODE, STEP]], axis=0, return_index=True)
        assert len(places) == len(root), f"{len(root) - len(places)} rows were delivered twice"
        self._check_order(root)
        ids = np.column_stack([self.column("id"), root[:, [STREAM, LIFE, EPISODE]]])
        pairs = np.unique(ids, axis=0)
        assert len(np.unique(pairs[:, 0])) == len(pairs), "one id names two trajectories"
        assert len(np.unique(pairs[:, 1:], axis=0)) == len(pairs), "one trajectory has two ids"

    def _check_flags(self, after: np.ndarray) -> None:
        flags = np.column_stack([self.column("terminated"), self.column("truncated")])
        expected = np.array([self.script.flags(*map(int, row[[STREAM, EPISODE, STEP]])) for row in after])
        wrong = (flags != expected).any(-1) | (self.column("done") != expected.any(-1))
        assert not wrong.any(), f"flags: {_first(wrong, after, flags, expected)}"

    def _check_order(self, root: np.ndarray) -> None:
        """Check that each row of a life follows the row before, or begins a later episode after a done row."""
        order = np.lexsort((np.arange(len(root)), root[:, LIFE], root[:, STREAM]))
        rows, done = root[order], self.column("done")[order]
        before, now = rows[:-1], rows[1:]
        first = (before[:, [STREAM, LIFE]] != now[:, [STREAM, LIFE]]).any(-1)
        begins = (now[:, STEP] == 0) & (first | (done[:-1] & (now[:, EPISODE] > before[:, EPISODE])))
        goes_on = ~done[:-1] & (now[:, EPISODE] == before[:, EPISODE]) & (now[:, STEP] == before[:, STEP] + 1)
        wrong = ~(begins | (goes_on & ~first))
        assert not wrong.any(), f"rows are missing or out of order: {_first(wrong, before, now)}"
        assert rows[0, STEP] == 0


def _first(wrong: np.ndarray, *columns: np.ndarray) -> str:
    place = int(np.flatnonzero(wrong)[0])
    return f"{int(wrong.sum())} times, first at row {place}: {[column[place].tolist() for column in columns]}"
