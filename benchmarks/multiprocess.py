"""Collectors with workers against processes that run free: as many of them, each with the recording loop.

What one can read off without a race (the learner's own time, copies, weights, memory) is in `multiprocess_gauges`.
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
"""Steps of a worker's part of a batch."""
BLOCKS = 2
"""Batches that a worker has ready at most while nobody takes them."""
Kind = Literal["sync", "async"]
KINDS: tuple[Kind, ...] = ("sync", "async")


def cartpole_module() -> TensorDictModule:
    """Builds the network policy of CartPole."""
    return TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])


def gym_env(name: str) -> GymEnv:
    """Makes an environment. Workers find it in this module, and with it the environments of these benchmarks."""
    return GymEnv(name)


def collector_of(
    kind: Kind, workers: int, name: str, policy: Any = None, steps: int = STEPS, **options: Any
) -> MultiSyncDataCollector | MultiaSyncDataCollector:
    """Makes a collector without end, each of whose workers makes `steps` steps for a batch.

    Args:
        kind: "sync": a batch has a part of every worker; "async": a batch is one worker's.
        workers: how many.
        name: the environment's id.
        policy: None draws random actions.
        steps: see above.
        options: further arguments.
    """
    makers = [partial(gym_env, name)] * workers
    if kind == "async":
        return MultiaSyncDataCollector(makers, policy, frames_per_batch=steps, total_frames=-1, **options)
    frames = workers * steps
    return MultiSyncDataCollector(
        makers, policy, frames_per_batch=frames, total_frames=-1, cat_results="stack", **options
    )


def ours(
    kind: Kind, workers: int, name: str, policy: Callable[[], Any] | None, batches: int, steps: int = STEPS
) -> Setup:
    """A collector's side: in a turn each worker makes `batches` times `steps` steps.

    Workers of an asynchronous collector go on while others have their turns, until their blocks are full. Those
    batches are taken first, and not counted; all but one are full: the one taken last is given back by the next.
    """

    def setup() -> Work:
        collector = collector_of(kind, workers, name, policy() if policy else None, steps)
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
    """The side of the processes that run free."""

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
        f"2 workers ({kind}), CartPole-v1, {'2x64 tanh network' if policy else 'random actions'}, {STEPS} steps a "
        "worker and batch, against 2 processes that run free",
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
        f"{workers} workers ({kind}), an environment that sleeps for 1 ms, {STEPS} steps a worker and batch",
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
