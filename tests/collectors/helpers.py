"""Sources over fakes, and environments and policies that fail, for tests of collectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl._rollout.plan import plan_rollout
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.batch_columns import IDS
from gleanrl.collectors.single_source import RolloutSource
from gleanrl.collectors.source import CollectionOptions, Grant
from tests.fakes import Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(seed=5, high=4)
NEVER = Script(ending="never")
T = 5


def collection(env: Any, policy: Any = None, **options: Any) -> RolloutSource:
    """Return a source that steps `env`."""
    rules = EpisodeRules(max_steps=options.get("max_steps"))
    return RolloutSource(env, plan_rollout(env, policy, rules=rules), CollectionOptions(**options))


def collect(made: RolloutSource, num_steps: int = T, random: bool = False) -> TensorDict:
    """Return the next batch and count it as delivered."""
    collected = made.collect(Grant(num_steps, random))
    made.deliver(collected, collected.batch)
    return collected.batch


def steps_of(env: CountingEnv) -> int:
    """Return the frames for which `env` was stepped, with or without success."""
    return len(env.actions) * max(1, env.batch_size.numel())


def names(batches: list[TensorDict]) -> dict[tuple[int, ...], set[int]]:
    """Return the ids of each (stream, episode)."""
    found: dict[tuple[int, ...], set[int]] = {}
    for batch in batches:
        rows = zip(
            batch["observation"].long().reshape(-1, 3).tolist(), batch[IDS].reshape(-1).tolist(), strict=True
        )
        for (stream, episode, _), name in rows:
            found.setdefault((stream, episode), set()).add(name)
    return found


def check_names(batches: list[TensorDict]) -> None:
    """Check that ids and episodes correspond one to one."""
    found = names(batches)
    assert all(len(ids) == 1 for ids in found.values()), found
    assert len(set.union(*found.values())) == len(found), found


class ResetFails(CountingEnv):
    """Raises in its `at`-th reset (from 1)."""

    def __init__(self, at: int, **kwargs: Any) -> None:
        self.__dict__["at"] = at
        super().__init__(**kwargs)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        if len(self.masks) == self.at:
            raise KeyError("the fake's reset broke on purpose")
        return out


class Calls:
    """A policy on TensorDicts that returns zero actions; its `at`-th call (from 1) returns `other` of them."""

    def __init__(self, at: int, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.at, self.other, self.calls = at, other, -1  # the first call is the plan's trial

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.batch_size, 2)
        self.calls += 1
        return tensordict.set("action", self.other(action) if self.calls == self.at else action)


def raising(error: BaseException) -> Callable[[Any], Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


class Net(nn.Module):
    """Acts with its one parameter."""

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((2,), value))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the action, ``[*batch, 2]`` float32."""
        self.calls += 1
        return self.value.expand(*observation.shape[:-1], 2)


class Staying(nn.Module):
    """Has a tensor on the meta device, so that it must be copied to any device. Its module computes where it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("elsewhere", torch.zeros((), device="meta"))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Staying:
        return self

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(*inputs)
        return out


def make(env: Any = None, policy: Any = None, frames: int = 6, **kwargs: Any) -> SyncDataCollector:
    """Return a collector of six-frame batches, and ignore warnings about rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SyncDataCollector(
            CountingEnv(SCRIPT) if env is None else env, policy, frames_per_batch=frames, **kwargs
        )


def take(collector: SyncDataCollector, count: int) -> list[TensorDictBase]:
    """Return copies of the next batches."""
    found = []
    for _ in range(count):
        batch = collector.next()
        assert batch is not None
        found.append(batch.clone())
    return found
