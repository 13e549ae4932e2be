"""Collectors with workers against as many independent processes that each run the recording loop.

`multiprocess_gauges` reads the figures that need no comparison: the learner's own time, copies, weights and memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Literal

from tensordict.nn import TensorDictModule

from benchmarks.free_running import FreeRunning
from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.workload import SLEEPY_ENV, Greedy
from gleanrl.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from gleanrl.envs import GymEnv

STEPS = 200
"""Steps that one worker contributes to a batch."""
BLOCKS = 2
"""Largest number of batches that a worker has ready while the caller takes none."""
Kind = Literal["sync", "async"]
KINDS: tuple[Kind, ...] = ("sync", "async")


def cartpole_module() -> TensorDictModule:
    """Return the network policy of CartPole."""
    return TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])


def gym_env(name: str) -> GymEnv:
    """Return an environment. To find this function, workers import this module, which registers all environments."""
    return GymEnv(name)


def collector_of(
    kind: Kind, workers: int, name: str, policy: Any = None, steps: int = STEPS, **options: Any
) -> MultiSyncDataCollector | MultiaSyncDataCollector:
    """Return an endless collector whose workers each contribute `steps` steps to a batch.

    Args:
        kind: "sync": each batch has a part of every worker. "async": each batch comes from one worker.
        workers: number of workers.
        name: the environment's id.
        policy: the policy; None draws random actions.
        steps: steps of one worker in a batch.
        options: further arguments of the collector.
    """
    makers = [partial(gym_env, name)] * workers
    if kind == "async":
        return MultiaSyncDataCollector(makers, policy, frames_per_batch=steps, total_frames=-1, **options)
    frames = workers * steps
    return MultiSyncDataCollector(
        makers, policy, frames_per_batch=frames, total_frames=-1, cat_results="stack", **options
    )


def ours(
    kind: Kind,
    workers: int,
    name: str,
    policy: Callable[[], Any] | None,
    batches: int,
    steps: int = STEPS,
    **options: Any,
) -> Setup:
    """Return the set-up of a collector's side. In a turn each worker makes `batches` times `steps` steps.

    During the turns of other sides, workers of an asynchronous collector continue until their blocks are full. A turn
    first takes these batches and does not count them. One block is not full: it holds the batch that the previous turn
    took last, and is released when the next batch is taken.
    """

    def setup() -> Work:
        collector = collector_of(kind, workers, name, policy() if policy else None, steps, **options)
        source = iter(collector)
        ready, parts = (0, 1) if kind == "sync" else (BLOCKS * workers - 1, workers)

        def work() -> int:
            for _ in islice(source, ready + batches * parts):
                pass
            return workers * batches * steps

        weakref.finalize(work, collector.shutdown)
        return work

    return setup


def free(workers: int, name: str, policy: Callable[[], Any] | None, batches: int) -> Setup:
    """Return the set-up of the side of independent processes."""

    def setup() -> Work:
        processes = FreeRunning(workers, name, policy, STEPS)

        def work() -> int:
            processes.run(batches)
            return workers * batches * STEPS

        weakref.finalize(work, processes.close)
        return work

    return setup


def _cartpole(
    kind: Kind,
    name: str,
    by_hand: Callable[[], Any] | None,
    policy: Callable[[], Any] | None,
    batches: int,
) -> Case:
    return Case(
        f"multiprocess/cartpole-{name}-{kind}",
        f"2 workers ({kind}), CartPole-v1, {'2x64 tanh network' if policy else 'random actions'}, {STEPS} steps per "
        "worker and batch, against 2 independent processes",
        "frame",
        {
            "free processes": free(2, "CartPole-v1", by_hand, batches),
            "gleanrl": ours(kind, 2, "CartPole-v1", policy, batches),
        },
        "free processes",
        (Target(0.8), Target(10.0, against="torchrl")),
        peers=("torchrl",),
    )


def _sleepy(kind: Kind, workers: int) -> Case:
    batches = 2
    return Case(
        f"multiprocess/sleepy-{workers}-{kind}",
        f"{workers} workers ({kind}), an environment that sleeps for 1 ms, {STEPS} steps per worker and batch, against "
        f"{workers} independent processes",
        "frame",
        {
            "free processes": free(workers, SLEEPY_ENV, None, batches),
            "gleanrl": ours(kind, workers, SLEEPY_ENV, None, batches),
        },
        "free processes",
        (Target(0.9),),
    )


def _small_batches(kind: Kind, name: str, policy: Callable[[], Any] | None, large_batches: int) -> Case:
    share = 2 if kind == "sync" else 1
    large, small = 2000 // share, 80 // share

    def side(steps: int) -> Setup:
        return ours(kind, 2, "CartPole-v1", policy, large_batches * large // steps, steps)

    return Case(
        f"multiprocess/batches-of-80-{name}-{kind}",
        f"2 workers ({kind}), CartPole-v1, {'2x64 tanh network' if policy else 'random actions'}, batches of 80 frames "
        "against batches of 2,000",
        "frame",
        {"batches of 2,000": side(large), "gleanrl": side(small)},
        "batches of 2,000",
        (Target(0.6),),
    )


CASES = (
    *(_cartpole(kind, "random", None, None, 60) for kind in KINDS),
    *(_cartpole(kind, "mlp", Greedy, cartpole_module, 15) for kind in KINDS),
    *(_sleepy(kind, workers) for workers in (4, 8, 16) for kind in KINDS),
    *(_small_batches(kind, "random", None, 12) for kind in KINDS),
    *(_small_batches(kind, "mlp", cartpole_module, 3) for kind in KINDS),
)
