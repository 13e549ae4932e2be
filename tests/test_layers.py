"""Entry points enter few functions in few files, with ceilings that may only fall.

Only named functions of the library count, in the caller's thread, after the first call. The ceilings hold for Python
3.11.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gleanrl.envs import GymEnv, ParallelEnv
from tests.layers import entered, size_of, warm_size_of

CEILINGS = {
    "collected step": (3, 2),
    "collected step of a module": (3, 2),
    "collected step by torch": (6, 4),
    "collected step of a ParallelEnv": (8, 5),
    "collected step of a ParallelEnv and a module": (8, 5),
    "rest of a batch of ten": (168, 25),
    "extend": (19, 10),
    "sample": (20, 10),
    "prioritized sample": (21, 12),
    "update_priority": (10, 6),
    "GymEnv.step by hand": (69, 10),
    "ParallelEnv.step by hand": (239, 15),
    "dumps": (367, 38),
    "loads": (420, 35),
    "ReplayBuffer()": (109, 24),
    "SyncDataCollector()": (633, 47),
}
"""Entry point -> calls of functions, and files that these functions are in."""

STEPS = 10
ROWS = 64


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation).argmax(-1)


def make() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")  # its episodes end after 200 steps, later than any call here


@contextmanager
def collecting(
    batched: bool = False, wrapped: bool = False, backend: Any = "auto"
) -> Iterator[Callable[[], Any]]:
    """Create a collector and yield the call for its next batch."""
    policy = TensorDictModule(Greedy(), ["observation"], ["action"]) if wrapped else Greedy()
    env = ParallelEnv(2, make) if batched else make()
    collector = SyncDataCollector(
        env, policy, frames_per_batch=STEPS * (1 + batched), total_frames=-1, policy_backend=backend
    )
    collector.set_seed(0)
    batches = iter(collector)
    try:
        yield lambda: next(batches)
    finally:
        collector.shutdown()


def sizes_of_steps(**how: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of the smallest step of a batch, and of the rest of the smallest batch."""
    with collecting(**how) as call:
        call()
        batches = [entered(call) for _ in range(4)]
    steps, rests = [], []
    for functions in batches:
        begins = [i for i, code in enumerate(functions) if code.co_qualname.endswith("Stepper.step")]
        assert len(begins) == STEPS
        found = [functions[a:b] for a, b in zip(begins, begins[1:], strict=False)]
        steps += map(size_of, found)
        rests.append((len(functions) - STEPS * min(map(len, found)), size_of(functions)[1]))
    return least(steps), least(rests)


def least(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    return min(functions for functions, _ in sizes), min(files for _, files in sizes)


def rows() -> TensorDict:
    step = {"observation": torch.zeros(ROWS, 4), "reward": torch.zeros(ROWS, 1)}
    return TensorDict({"observation": torch.zeros(ROWS, 4), "next": TensorDict(step, [ROWS])}, [ROWS])


def buffer(kind: Any = TensorDictReplayBuffer, **options: Any) -> Any:
    made = kind(storage=LazyTensorStorage(1000), batch_size=32, **options)
    made.extend(rows())
    return made


def prioritized() -> Any:
    return buffer(TensorDictPrioritizedReplayBuffer, alpha=0.6, beta=0.4)


def size_of_step(env: Any) -> tuple[int, int]:
    """Return the size of a step that the caller makes with `env.step`."""
    try:
        root = env.rand_action(env.reset())
        return warm_size_of(lambda: env.step(root))
    finally:
        env.close()


def size_of_dumps(folder: Path) -> tuple[int, int]:
    made = buffer()
    return warm_size_of(lambda: made.dumps(folder))


def size_of_loads(folder: Path) -> tuple[int, int]:
    made = buffer()
    made.dumps(folder)
    return warm_size_of(lambda: made.loads(folder))


def size_of_update() -> tuple[int, int]:
    made = prioritized()
    index, priority = torch.arange(32), torch.ones(32)
    return warm_size_of(lambda: made.update_priority(index, priority))


def size_of_collector() -> tuple[int, int]:
    policy, made = Greedy(), []
    env = make()
    try:
        return warm_size_of(
            lambda: made.append(SyncDataCollector(env, policy, frames_per_batch=STEPS, total_frames=-1))
        )
    finally:
        made[-1].shutdown()


ENTRY_POINTS: dict[str, Callable[[Path], tuple[int, int]]] = {
    "collected step": lambda _: sizes_of_steps()[0],
    "collected step of a module": lambda _: sizes_of_steps(wrapped=True)[0],
    "collected step by torch": lambda _: sizes_of_steps(backend="torch")[0],
    "collected step of a ParallelEnv": lambda _: sizes_of_steps(batched=True)[0],
    "collected step of a ParallelEnv and a module": lambda _: sizes_of_steps(batched=True, wrapped=True)[0],
    "rest of a batch of ten": lambda _: sizes_of_steps()[1],
    "extend": lambda _: warm_size_of(partial(buffer().extend, rows())),
    "sample": lambda _: warm_size_of(buffer().sample),
    "prioritized sample": lambda _: warm_size_of(prioritized().sample),
    "update_priority": lambda _: size_of_update(),
    "GymEnv.step by hand": lambda _: size_of_step(pendulum()),
    "ParallelEnv.step by hand": lambda _: size_of_step(ParallelEnv(2, pendulum)),
    "dumps": size_of_dumps,
    "loads": size_of_loads,
    "ReplayBuffer()": lambda _: warm_size_of(
        lambda: ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
    ),
    "SyncDataCollector()": lambda _: size_of_collector(),
}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the figures are those of Python 3.11")
@pytest.mark.filterwarnings("default:lower")
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_enters_no_more_functions_and_files_than_its_ceiling(name, tmp_path):
    functions, files = ENTRY_POINTS[name](tmp_path / "saved")
    most_functions, most_files = CEILINGS[name]
    assert 0 < functions <= most_functions and 0 < files <= most_files
    if (functions, files) != (most_functions, most_files):
        warnings.warn(f"lower the ceiling of {name!r} to {(functions, files)}", stacklevel=1)


def test_named_functions_of_the_library_count():
    made = buffer()
    names = [code.co_name for code in entered(lambda: [made.sample() for _ in range(2)])]
    assert names.count("sample") >= 2 and not [name for name in names if name.startswith("<")]
    assert entered(lambda: rows()) == []
