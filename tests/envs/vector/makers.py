"""Environments and comparisons for tests of every kind of batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import flatten
from gleanrl.envs import GymWrapper
from tests.fakes import DictEnv, NestedDictEnv, OracleEnv, Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(seed=4)


def oracle(stream: int = 0, **kwargs: Any) -> GymWrapper:
    """Return one oracle stream."""
    return GymWrapper(OracleEnv(stream=stream, script=SCRIPT, **kwargs))


def counting(first: int = 0) -> CountingEnv:
    """Return two oracle streams in one environment, numbered from `first`."""
    env = CountingEnv(SCRIPT, (2,))
    env._streams += first
    return env


def nested(stream: int = 0) -> GymWrapper:
    """Return one oracle stream under ("robot", "pose")."""
    return GymWrapper(NestedDictEnv(stream=stream, script=SCRIPT))


def with_goal(stream: int = 0) -> GymWrapper:
    """Return an oracle stream with a second observation."""
    return GymWrapper(DictEnv("observation", stream=stream, script=SCRIPT))


def streams(count: int) -> list[dict[str, int]]:
    """Return keyword arguments that give each environment its stream."""
    return [{"stream": stream} for stream in range(count)]


def equal(left: TensorDictBase, right: TensorDictBase) -> bool:
    """Return whether two batches have the same keys and equal bits."""
    a, b = flatten(left), flatten(right)
    return a.keys() == b.keys() and all(a[k].dtype is b[k].dtype and torch.equal(a[k], b[k]) for k in a)


Maker = Callable[..., Any]
