"""Pools of environments. Some wait at gates, so that tests need no delays."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from tests.envs.vector.awkward import awkward, pass_through
from tests.envs.vector.makers import Maker, oracle

BACKENDS = ("threading", "multiprocessing")


def pool_threads() -> list[threading.Thread]:
    """Return the threads of all pools."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("gleanrl-environment")]


def three() -> list[Maker]:
    """Return the factories of three oracle streams."""
    return [partial(oracle, stream) for stream in range(3)]


def gated(gate: str, at: int = 1, stream: int = 1) -> list[Maker]:
    """Return the factories of three streams, one of which waits at a gate in one of its steps."""
    makers = three()
    makers[stream] = partial(awkward, partial(pass_through, gate), at, stream=stream)
    return makers


def ids(batch: Any) -> list[int]:
    """Return the environment of each row."""
    return list(batch["env_index"])


def with_actions(pool: Any) -> Any:
    """Return the first rows of new episodes, with actions."""
    return pool.rand_action(pool.reset())
