"""Environments, collectors and checks for tests of collectors with workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from tests.collectors.helpers import SCRIPT
from tests.fakes import Script
from tests.fakes_base import CountingEnv

KINDS = {"sync": MultiSyncDataCollector, "async": MultiaSyncDataCollector}


class Stream:
    """Makes an environment whose observations begin with a worker's number."""

    def __init__(self, first: int, script: Script = SCRIPT, batch_size: tuple[int, ...] = ()) -> None:
        self.first, self.script, self.batch_size = first, script, batch_size

    def __call__(self) -> CountingEnv:
        """Make the environment."""
        env = CountingEnv(self.script, self.batch_size)
        env._streams += self.first
        return env


@contextmanager
def collecting(
    kind: str, makers: Any = 2, policy: Any = None, frames: int = 12, **kwargs: Any
) -> Iterator[Any]:
    """Yield a collector of this kind and shut it down afterwards; ignore warnings about rounding."""
    makers = [Stream(100 * worker) for worker in range(makers)] if isinstance(makers, int) else makers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = KINDS[kind](makers, policy, frames_per_batch=frames, **kwargs)
    try:
        yield collector
    finally:
        collector.shutdown()


def rows(batches: list[TensorDictBase]) -> list[tuple[tuple[int, ...], int]]:
    """Return observation and id of every frame."""
    found = []
    for batch in batches:
        observations = batch["observation"].long().reshape(-1, 3).tolist()
        names = batch["collector", "traj_ids"].reshape(-1).tolist()
        found += [(tuple(o), name) for o, name in zip(observations, names, strict=True) if name >= 0]
    return found


def check_streams(batches: list[TensorDictBase]) -> None:
    """Check that no frame comes twice, that next follows its root, and that ids and episodes match one to one."""
    found = rows(batches)
    assert len({place for place, _ in found}) == len(found)
    episodes: dict[tuple[int, ...], set[int]] = {}
    for (stream, episode, _), name in found:
        episodes.setdefault((stream, episode), set()).add(name)
    assert all(len(names) == 1 for names in episodes.values()), episodes
    assert len(set.union(*episodes.values())) == len(episodes), episodes
    for batch in batches:
        real = batch["collector", "traj_ids"] >= 0
        step = torch.tensor([0.0, 0.0, 1.0])
        assert torch.equal(batch["next", "observation"][real], batch["observation"][real] + step)


def values(batch: TensorDictBase) -> list[float]:
    """Return the distinct actions of a batch. With a `Net`, this is its weight."""
    found: list[float] = batch["action"].unique().tolist()
    return found
