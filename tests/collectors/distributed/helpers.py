"""Environments whose rows name their origin, a policy that acts its weight, and checks of rows from nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn

from gleanrl.collectors.distributed import DistributedDataCollector
from gleanrl.collectors.distributed.actor import NodeMaker
from gleanrl.envs import GymEnv, GymWrapper
from tests.fakes import FakeFailure, OracleEnv, Script

WIDTH = 2048
"""Size of an observation: (stream, episode, step), and zeros that make batches large."""
FATAL = 99.0
"""The action that makes environments raise."""


class Wide(OracleEnv):
    """Returns observations so large that batches must use the object store."""

    def __init__(self, stream: int) -> None:
        super().__init__(stream, Script(seed=3, high=9))
        self.observation_space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)

    def step(self, action: Any) -> Any:
        if action[0] == FATAL:
            raise FakeFailure("the fake broke on purpose")
        return super().step(action)

    def _emit(self) -> Any:
        found = np.zeros(WIDTH, np.float32)
        found[:3] = super()._emit()
        return found


def make_wide(stream: int) -> Any:
    return GymWrapper(Wide(stream))


def environments(count: int) -> list[Any]:
    return [partial(make_wide, stream) for stream in range(count)]


def make_cartpole() -> Any:
    return GymEnv("CartPole-v1")


class HalfLent(DistributedDataCollector):
    """The first node lends its batches. The other nodes use the object store, as if they ran on another machine."""

    def _makers(self, *args: Any) -> list[NodeMaker]:
        first, *others = super()._makers(*args)
        return [first, *(replace(maker, num_shared_blocks=0) for maker in others)]


class Says(nn.Module):
    """Returns its weight as the action."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.value.expand(*observation.shape[:-1], 2)

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.value.fill_(value)


def rows(batches: Sequence[TensorDictBase]) -> dict[int, list[tuple[int, int, int]]]:
    """Return the (episode, step, id) of each frame by stream, in order."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for batch in batches:
        flat = batch.reshape(-1)
        names = flat["collector", "traj_ids"].tolist()
        for (stream, episode, step), name in zip(
            flat["observation"][:, :3].long().tolist(), names, strict=True
        ):
            found.setdefault(stream, []).append((episode, step, name))
    return found


def check_rows(batches: Sequence[TensorDictBase], holes: int = 0) -> None:
    """Check that trajectories have no gaps except for abandoned episodes, and that each id names one trajectory.

    Args:
        batches: in their order.
        holes: how often a stream may abandon an episode, or restart its count of episodes.
    """
    owners: dict[int, tuple[int, int]] = {}
    left = 0
    for stream, frames in rows(batches).items():
        script = Script(seed=3, high=9)
        for before, after in zip([None, *frames], frames, strict=False):
            episode, step, name = after
            assert owners.setdefault(name, (stream, episode)) == (stream, episode)
            if before is None:
                continue
            if before[0] == episode and before[2] == name:
                assert step == before[1] + 1, (stream, before, after)
                continue
            assert step == 0 and name != before[2], (stream, before, after)
            whole = before[1] + 1 == script.length(stream, before[0])
            left += not whole or episode != before[0] + 1
    assert left <= holes
