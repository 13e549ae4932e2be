"""Batches of environments: `SerialEnv` against the recording loop, `ParallelEnv` against the floor of processes.

A call is a vector step: one step of every environment of the batch.
"""

from __future__ import annotations

import multiprocessing
import time
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.collection import tensordict_module
from benchmarks.free_running import PRELOAD
from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.ping import KINDS, Ping
from benchmarks.recording_loop import recording_loop
from benchmarks.workload import NAP_S, Greedy, Instant
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv

STEPS = 200
ROW_BYTES = 4 * 4 + 4 + 3
"""Bytes of a row of `Instant`: observation, reward, flags."""


def instant() -> GymWrapper:
    """Makes an environment that returns at once."""
    return GymWrapper(Instant())


def sleepy() -> GymWrapper:
    """Makes an environment that takes a millisecond."""
    return GymWrapper(Instant(NAP_S))


class Never:
    """An interruptor that never stops a collector, but is asked after every step."""

    def collection_stopped(self) -> bool:
        """Returns False."""
        return False


def collected(
    make: Callable[[], Any],
    policy: Callable[[], Any] | None,
    batches: int,
    unit: int,
    stepwise: bool = False,
) -> Setup:
    """A collector's side.

    Args:
        make: builds the environment.
        policy: builds the policy; None draws random actions.
        batches: batches of 200 steps a turn.
        unit: what is done in each step.
        stepwise: whether somebody looks at every step, so that no worker can run ahead.
    """

    def setup() -> Work:
        env = make()
        frames = STEPS * env.numel()
        collector = SyncDataCollector(
            env,
            policy() if policy else None,
            frames_per_batch=frames,
            total_frames=-1,
            interruptor=Never() if stepwise else None,
        )
        source = iter(collector)

        def work() -> int:
            for _ in islice(source, batches):
                pass
            return batches * STEPS * unit

        weakref.finalize(work, env.close)
        return work

    return setup


def by_hand(num_envs: int, batches: int) -> Setup:
    """The recording loop's side, with one policy call for all environments."""

    def setup() -> Work:
        source = recording_loop("CartPole-v1", Greedy(), num_envs=num_envs, steps=STEPS)

        def work() -> int:
            for _ in islice(source, batches):
                pass
            return batches * STEPS * num_envs

        return work

    return setup


def ping(num_workers: int, kind: str, steps: int, nap_s: float = 0.0) -> Setup:
    """The floor's side."""

    def setup() -> Work:
        before = (lambda: time.sleep(nap_s)) if nap_s else None
        pinged = Ping(num_workers, ROW_BYTES, kind, before)

        def work() -> int:
            for _ in range(steps):
                pinged.step()
            return steps

        return work

    return setup


def gymnasiums(num_envs: int, steps: int) -> Setup:
    """gymnasium's AsyncVectorEnv with shared memory: its steps alone, nothing is recorded."""

    def setup() -> Work:
        envs = gym.vector.AsyncVectorEnv([Instant] * num_envs, shared_memory=True)
        envs.reset()
        actions = np.zeros((num_envs, 1), np.float32)

        def work() -> int:
            for _ in range(steps):
                envs.step(actions)
            return steps

        weakref.finalize(work, envs.close)
        return work

    return setup


def _import_environments() -> None:
    """What a bare process does: imports the module of the environment, which was preloaded."""
    __import__("gleanrl.envs")


def bare_start(count: int) -> Setup:
    """Starts processes by Python's forkserver that import the environments' module, and waits for their ends."""

    def setup() -> Work:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)

        def work() -> int:
            processes = [context.Process(target=_import_environments) for _ in range(count)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            return 1

        work()  # the server itself starts
        return work

    return setup


def our_start(count: int) -> Setup:
    """Starts a ParallelEnv, environments made, and ends it."""

    def setup() -> Work:
        def work() -> int:
            env = ParallelEnv(count, lambda: GymEnv("CartPole-v1"))
            env.start()
            env.close()
            return 1

        work()
        return work

    return setup


def _instant(num_workers: int, stepwise: bool) -> Case:
    return Case(
        f"envs/parallel-{'stepwise' if stepwise else 'instant'}-{num_workers}",
        f"a vector step of {num_workers} workers whose environments return at once, recorded by a collector: "
        + ("all of them waited for at every step" if stepwise else "random actions"),
        "call",
        {
            **{f"ping {kind}": ping(num_workers, kind, STEPS) for kind in KINDS},
            "AsyncVectorEnv": gymnasiums(num_workers, STEPS),
            "gleanrl": collected(lambda: ParallelEnv(num_workers, instant), None, 1, 1, stepwise),
        },
        "ping pipe",
        (*(Target(2.0, "time", f"ping {kind}") for kind in KINDS), Target(3.0, "speed", "AsyncVectorEnv")),
    )


CASES = (
    Case(
        "envs/serial-cartpole-mlp",
        "SerialEnv(8) of CartPole-v1, 2x64 tanh network, against 8 environments and one batched policy call",
        "frame",
        {
            "recording loop": by_hand(8, 1),
            "gleanrl": collected(
                lambda: SerialEnv(8, lambda: GymEnv("CartPole-v1")), tensordict_module("CartPole-v1"), 1, 8
            ),
        },
        "recording loop",
        (Target(0.8),),
    ),
    _instant(2, stepwise=False),
    _instant(4, stepwise=False),
    _instant(2, stepwise=True),
    _instant(4, stepwise=True),
    Case(
        "envs/parallel-sleepy-8",
        "a vector step of 8 workers whose environments sleep for 1 ms, recorded by a collector",
        "call",
        {
            "pipe loop": ping(8, "pipe", STEPS, NAP_S),
            "gleanrl": collected(lambda: ParallelEnv(8, sleepy), None, 1, 1),
        },
        "pipe loop",
        (Target(0.9),),
    ),
    Case(
        "envs/parallel-start-16",
        "start and end of ParallelEnv(16) of CartPole-v1, against 16 bare forkserver processes",
        "call",
        {"bare processes": bare_start(16), "gleanrl": our_start(16)},
        "bare processes",
        (Target(1.5, "time"),),
    ),
)
