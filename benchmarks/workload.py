"""Environments, networks and rows that all sides of a comparison share. It imports neither gleanrl nor a peer."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FRAME = (84, 84, 4)
FRAMES_ENV = "GleanrlBenchFrames-v0"
SLOW_FRAMES_ENV = "GleanrlBenchSlowFrames-v0"
SLEEPY_ENV = "GleanrlBenchSleepy-v0"
SLOW_FRAME_S, NAP_S = 500e-6, 1e-3
IMAGE_CHUNK = 200
STORED = {"cartpole": 1_000_000, "humanoid": 200_000, "image": 20_000}
"""Rows of the buffers in the cases of `sample`."""
Columns = dict[tuple[str, ...], NDArray[Any]]


class FramesEnv(gym.Env[NDArray[np.uint8], Any]):
    """An environment that returns 84x84x4 uint8 frames from a prepared ring. A step does nothing else, or sleeps."""

    def __init__(self, ring: int = 64, nap_s: float = 0.0) -> None:
        self._nap_s = nap_s
        self.observation_space = gym.spaces.Box(0, 255, FRAME, np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        frames = np.random.default_rng(0).integers(0, 256, (ring, *FRAME), dtype=np.uint8)
        self._frames: list[NDArray[np.uint8]] = list(frames)
        self._at = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode at the ring's next frame, and return it with an empty info."""
        super().reset(seed=seed)
        return self._next_frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the ring's next frame for any action. Episodes end only by the registered time limit."""
        if self._nap_s:
            time.sleep(self._nap_s)
        return self._next_frame(), 1.0, False, False, {}

    def _next_frame(self) -> NDArray[np.uint8]:
        self._at = (self._at + 1) % len(self._frames)
        return self._frames[self._at]


class Instant(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """An environment whose steps do nothing, or sleep."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, nap_s: float = 0.0) -> None:
        self._observation, self._nap_s = np.zeros(4, np.float32), nap_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep for `nap_s`, if set, and return the same observation each time."""
        if self._nap_s:
            time.sleep(self._nap_s)
        return self._observation, 0.0, False, False, {}


def _register(name: str, entry_point: str, **rest: Any) -> None:
    if name not in gym.registry:
        gym.register(name, f"benchmarks.workload:{entry_point}", **rest)


_register(FRAMES_ENV, "FramesEnv", max_episode_steps=1000)
_register(SLOW_FRAMES_ENV, "FramesEnv", max_episode_steps=1000, kwargs={"nap_s": SLOW_FRAME_S})
_register(SLEEPY_ENV, "Instant", kwargs={"nap_s": NAP_S})


def resident() -> int:
    """Return the resident memory of this process in bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled_resident() -> int:
    """Return `resident` after the memory of freed batches was returned to the system (glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def settle_device() -> None:
    """Wait until the accelerator has finished its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def make_env(name: str) -> gym.Env[Any, Any]:
    """Return an environment as every side uses it, without gymnasium's environment checker."""
    return gym.make(name, disable_env_checker=True)


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Return the tanh network of all cases, with two hidden layers and the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
        )


class Greedy(nn.Module):
    """A greedy policy: observation (*B, inputs) float32 -> one-hot action (*B, actions) int64."""

    def __init__(self, inputs: int = 4, actions: int = 2) -> None:
        super().__init__()
        self.net = mlp(inputs, actions)
        self.actions = actions

    def forward(self, observation: Tensor) -> Tensor:
        """Return the one-hot of the largest output."""
        best: Tensor = self.net(observation).argmax(-1)
        return nn.functional.one_hot(best, self.actions)


class Torque(nn.Module):
    """A policy with a bounded action: observation (*B, inputs) float32 -> (*B, 1) float32 in [-2, 2]."""

    def __init__(self, inputs: int = 3) -> None:
        super().__init__()
        self.net = mlp(inputs, 1)

    def forward(self, observation: Tensor) -> Tensor:
        """Return the output, squashed by tanh and scaled."""
        squashed: Tensor = self.net(observation).tanh()
        return squashed * 2


def make_policy(env_name: str) -> nn.Module:
    """Return the network policy for an environment of these benchmarks."""
    return Greedy() if env_name == "CartPole-v1" else Torque()


OBSERVATION_SPACES: Mapping[str, tuple[tuple[int, ...], type[np.generic]]] = {
    "cartpole": ((4,), np.float32),
    "humanoid": ((376,), np.float32),
    "image": (FRAME, np.uint8),
}


def rows(kind: str, n: int) -> Columns:
    """Return `n` transitions as the 11 columns of a batch, from a fixed seed.

    Args:
        kind: the observations: "cartpole" (4 float32), "humanoid" (376 float32) or "image" (84x84x4 uint8).
        n: number of rows.

    Returns:
        Key path -> array of shape (n, *leaf). Actions are one-hot of 2, but 17 float32 for "humanoid".
    """
    rng = np.random.default_rng(0)
    shape, dtype = OBSERVATION_SPACES[kind]

    def observation() -> NDArray[Any]:
        if dtype is np.uint8:
            return rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        return rng.standard_normal((n, *shape), dtype=np.float32)

    def flag(p: float) -> NDArray[np.bool_]:
        return rng.random((n, 1)) < p

    if kind == "humanoid":
        action: NDArray[Any] = rng.standard_normal((n, 17), dtype=np.float32)
    else:
        action = np.eye(2, dtype=np.int64)[rng.integers(0, 2, n)]
    terminated, truncated = flag(0.05), flag(0.01)
    return {
        ("observation",): observation(),
        ("action",): action,
        ("done",): np.zeros((n, 1), bool),
        ("terminated",): np.zeros((n, 1), bool),
        ("truncated",): np.zeros((n, 1), bool),
        ("next", "observation"): observation(),
        ("next", "reward"): rng.standard_normal((n, 1), dtype=np.float32),
        ("next", "done"): terminated | truncated,
        ("next", "terminated"): terminated,
        ("next", "truncated"): truncated,
        ("collector", "traj_ids"): np.cumsum((terminated | truncated)[:, 0]).astype(np.int64),
    }


def stored(kind: str) -> Columns:
    """Return the columns of a full buffer. Images repeat one chunk of random rows."""
    n = STORED[kind]
    if kind != "image":
        return rows(kind, n)
    chunk = rows(kind, IMAGE_CHUNK)
    return {path: np.resize(column, (n, *column.shape[1:])) for path, column in chunk.items()}


def episode_rows(n: int) -> Columns:
    """Return `n` CartPole-like transitions of episodes with 1 to 399 steps, 200 on average.

    Half of the episodes terminate, the other half are truncated. The last episode may end without a flag.
    """
    rng = np.random.default_rng(3)
    columns = rows("cartpole", n)
    lengths = rng.integers(1, 400, n // 100 + 10)
    ends = np.cumsum(lengths) - 1
    ends = ends[ends < n]
    terminates = rng.random(len(ends)) < 0.5
    for name, at in (("terminated", ends[terminates]), ("truncated", ends[~terminates]), ("done", ends)):
        flag = np.zeros((n, 1), bool)
        flag[at] = True
        columns["next", name] = flag
    before = np.zeros(n, np.int64)
    before[ends[ends < n - 1] + 1] = 1
    columns["collector", "traj_ids"] = np.cumsum(before)
    return columns


def following_rows(kind: str, n: int) -> TensorDict:
    """Return rows whose next observation is the next row's observation, except at the ends of episodes.

    About every 16th row ends an episode.
    """
    columns = rows(kind, n)
    observation, following = columns["observation",], columns["next", "observation"]
    ends = columns["next", "done"][:, 0]
    following[:-1][~ends[:-1]] = observation[1:][~ends[:-1]]
    return as_tensordict(columns)


def out_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder within `out`, which git ignores. It is deleted with the returned object."""
    Path("out").mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="checkpoints-", dir="out")


def loading(
    buffer: Any, storage: Any, checkpointer: Any, kind: str, n: int
) -> Callable[[], Callable[[], int]]:
    """Return a set-up that loads a checkpoint of `n` rows into a new buffer in each turn.

    Args:
        buffer: a library's `ReplayBuffer`.
        storage: its `LazyTensorStorage`.
        checkpointer: its class for the form of the checkpoint.
        kind: see `rows`.
        n: number of rows.
    """

    def setup() -> Callable[[], int]:
        folder = out_folder()

        def made() -> Any:
            return buffer(storage=storage(n), checkpointer=checkpointer(), batch_size=256)

        saved = made()
        saved.extend(following_rows(kind, n))
        saved.dumps(folder.name)
        del saved

        def work() -> int:
            made().loads(folder.name)
            return 1

        weakref.finalize(work, folder.cleanup)
        return work

    return setup


def chunks_of_episodes(steps: int, chunks: int = 50) -> list[Columns]:
    """Return batches of `steps` transitions. Each is a complete episode with a different id."""
    out = []
    for number in range(chunks):
        columns = rows("cartpole", steps)
        for name in ("terminated", "truncated", "done"):
            columns["next", name] = np.zeros((steps, 1), bool)
        columns["next", "terminated"][-1] = columns["next", "done"][-1] = True
        columns["collector", "traj_ids"] = np.full(steps, 1_000_000_000 + number)
        out.append(columns)
    return out


def first_priorities(n: int) -> NDArray[np.float32]:
    """Return the first priorities of every prioritized buffer, (n,) float32, all above 0."""
    return np.random.default_rng(4).random(n, dtype=np.float32) + np.float32(0.01)


class Updates:
    """Rows to update and their new priorities, made before the clock starts.

    No pair of rows and priorities occurs twice within `calls` turns. A buffer could skip work if it got the same rows
    each time, or a row's old priority again.

    Args:
        n: rows of the buffer.
        batch: rows of an update.
        calls: updates per turn.
        convert: converts an array to the type that the buffer expects.
    """

    def __init__(
        self, n: int, batch: int, calls: int, convert: Callable[[NDArray[Any]], Any] = lambda array: array
    ) -> None:
        rng = np.random.default_rng(5)
        self._index = [convert(index) for index in rng.integers(0, n, (calls, batch))]
        priorities = rng.random((calls, batch), dtype=np.float32) + np.float32(0.01)
        self._priorities = [convert(priority) for priority in priorities]

    def turn(self) -> Iterator[tuple[Any, Any]]:
        """Return the pairs of a turn. Each turn shifts the priorities by one update against the rows."""
        self._priorities.append(self._priorities.pop(0))
        return zip(self._index, self._priorities, strict=True)


def as_tensordict(columns: Columns) -> TensorDict:
    """Wrap columns into one nested TensorDict of batch size (n,) that shares their memory."""
    n = len(next(iter(columns.values())))
    nested: dict[str, Any] = {}
    for path, column in columns.items():
        at = nested
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = torch.from_numpy(column)
    return TensorDict(nested, [n])
