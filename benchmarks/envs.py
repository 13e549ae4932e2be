"""Batches of environments: `SerialEnv` against the recording loop, `ParallelEnv` against bare processes.

A call is one vector step, which steps every environment of the batch once.
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
"""Bytes of one row of `Instant`: observation, reward and flags."""


def instant() -> GymWrapper:
    """Return an environment whose steps do nothing."""
    return GymWrapper(Instant())


def sleepy() -> GymWrapper:
    """Return an environment whose steps sleep for a millisecond."""
    return GymWrapper(Instant(NAP_S))


class Never:
    """An interruptor that never stops a collector. The collector calls it after every step."""

    def collection_stopped(self) -> bool:
        """Return False."""
        return False


def collected(
    make: Callable[[], Any],
    policy: Callable[[], Any] | None,
    batches: int,
    unit: int,
    stepwise: bool = False,
    **options: Any,
) -> Setup:
    """Return the set-up of a collector's side.

    Args:
        make: builds the environment.
        policy: builds the policy; None draws random actions.
        batches: batches of 200 steps per turn.
        unit: units of work per step.
        stepwise: whether the collector calls an interruptor after every step, so that no worker can run ahead.
        options: further arguments of the collector.
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
            **options,
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
    """Return the set-up of the recording loop's side, with one policy call for all environments."""

    def setup() -> Work:
        source = recording_loop("CartPole-v1", Greedy(), num_envs=num_envs, steps=STEPS)

        def work() -> int:
            for _ in islice(source, batches):
                pass
            return batches * STEPS * num_envs

        return work

    return setup


def ping(num_workers: int, kind: str, steps: int, nap_s: float = 0.0) -> Setup:
    """Return the set-up of the side of bare processes; see `Ping`."""

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
    """Return the set-up of gymnasium's AsyncVectorEnv with shared memory, which steps and records nothing."""

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
    """Import the environments' module, which Python's forkserver has preloaded: the only work of a bare process."""
    __import__("gleanrl.envs")


def bare_start(count: int) -> Setup:
    """Return the set-up that starts `count` bare processes by Python's forkserver and waits until they end."""

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

        work()  # starts the server, so that no turn includes its start
        return work

    return setup


def our_start(count: int) -> Setup:
    """Return the set-up that starts a ParallelEnv with its environments, and closes it."""

    def setup() -> Work:
        def work() -> int:
            env = ParallelEnv(count, lambda: GymEnv("CartPole-v1"))
            env.start()
            env.close()
            return 1

        work()  # starts the fork server, so that no turn includes its start
        return work

    return setup


def _instant(num_workers: int, stepwise: bool) -> Case:
    return Case(
        f"envs/parallel-{'stepwise' if stepwise else 'instant'}-{num_workers}",
        f"a vector step of {num_workers} workers whose environments do nothing, recorded by a collector: "
        + ("the collector waits for all workers at every step" if stepwise else "random actions"),
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
        "SerialEnv(8) of CartPole-v1, 2x64 tanh network, against a loop over 8 environments with one policy call",
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
