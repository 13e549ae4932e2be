"""Step a transformed environment by rows of a block and by TensorDicts, which must agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.tensordicts import flatten
from gleanrl._rollout.tensordict_stepper import TensorDictStepper
from gleanrl.collectors import SyncDataCollector
from gleanrl.collectors.source import Grant
from gleanrl.envs import GymWrapper
from gleanrl.envs.transforms import Compose, Transform, TransformedEnv
from gleanrl.envs.transforms.stepper import TransformedStepper
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv, TeamEnv

SCRIPT = Script(lengths=(3, 1, 5, 2))
needs_row_maps = pytest.mark.skipif(
    EXCHANGE is None, reason="this release of torch lacks the interface by which the core maps rows"
)


class OnTensorDicts(Transform):
    """Changes no value, but requires TensorDicts and so forces the whole chain to use them."""

    def _call(self, tensordict: Any) -> Any:
        assert isinstance(tensordict, TensorDict)
        return tensordict


def single() -> Any:
    return GymWrapper(OracleEnv(script=SCRIPT))


def batched() -> Any:
    return CountingEnv(SCRIPT, (3,))


def team() -> Any:
    return TeamEnv(SCRIPT, (2,), nested_flags=True)


ENVS = (single, batched, team)


def batches(
    env: Any, sizes: tuple[int, ...] = (7, 1, 12), policy: Any = None, **kwargs: Any
) -> tuple[Any, list[TensorDict]]:
    """Collect batches of so many steps each; return the collector's stepper and the batches."""
    torch.manual_seed(0)
    numel = max(1, env.batch_size.numel())
    collector = SyncDataCollector(
        env, policy, frames_per_batch=sizes[0] * numel, total_frames=-1, nonfinite="pass", **kwargs
    )
    source, out = collector.source, []
    for size in sizes:
        collected = source.collect(Grant(size, random=policy is None))
        out.append(source.deliver(collected, collected.batch))
    return collector.plan.stepper, out


def collect_both_ways(
    make_env: Callable[[], Any], make_transforms: Callable[[], list[Any]], **kwargs: Any
) -> list[TensorDict]:
    """Return batches of the fast path, after a check that the general path returns the same."""
    fast_env = TransformedEnv(make_env(), Compose(*make_transforms()))
    slow_env = TransformedEnv(make_env(), Compose(*make_transforms(), OnTensorDicts()))
    stepper, fast = batches(fast_env, **kwargs)
    assert isinstance(stepper, TransformedStepper)
    stepper, slow = batches(slow_env, **kwargs)
    assert isinstance(stepper, TensorDictStepper)
    for a, b in zip(fast, slow, strict=True):
        left, right = flatten(a), flatten(b)
        assert left.keys() == right.keys()
        for path in left:
            assert torch.equal(left[path], right[path]), path
    return fast


def joined(parts: list[TensorDict]) -> TensorDict:
    """Concatenate the batches along time."""
    return torch.cat(parts, parts[0].ndim - 1)
