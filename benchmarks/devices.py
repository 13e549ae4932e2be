"""Collectors with ``device=`` against a hand-written loop whose policy and batches are on the accelerator.

Without an accelerator everything runs on the CPU. The figures then show the cost of naming a device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor

from benchmarks.harness import Case, Setup, Target, Work
from benchmarks.recording_loop import recording_loop
from benchmarks.workload import DEVICE, make_policy
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv

NAME, STEPS = "CartPole-v1", 200


def by_hand(num_envs: int) -> Setup:
    """Return the set-up of the loop's side. It steps and records on the CPU, and moves each complete batch."""

    def setup() -> Work:
        net = make_policy(NAME).to(DEVICE)

        def policy(observation: Tensor) -> Tensor:
            action: Tensor = net(observation.to(DEVICE))
            return action.cpu()

        batches = recording_loop(NAME, policy, num_envs=num_envs, steps=STEPS)

        def work() -> int:
            for batch in islice(batches, 2):
                for column in batch.values():
                    torch.from_numpy(column).to(DEVICE)
            return 2 * num_envs * STEPS

        return work

    return setup


def ours(make: Callable[[], Any], num_envs: int) -> Setup:
    """Return the set-up of the collector's side."""

    def setup() -> Work:
        policy = TensorDictModule(make_policy(NAME), in_keys=["observation"], out_keys=["action"])
        collector = SyncDataCollector(
            make(), policy, frames_per_batch=num_envs * STEPS, total_frames=-1, device=DEVICE
        )
        batches = iter(collector)

        def work() -> int:
            for _ in islice(batches, 2):
                pass
            return 2 * num_envs * STEPS

        return work

    return setup


def _case(name: str, title: str, make: Callable[[], Any], num_envs: int, bound: float) -> Case:
    return Case(
        f"devices/{name}",
        f"{title}, device={DEVICE}",
        "frame",
        {"loop": by_hand(num_envs), "gleanrl": ours(make, num_envs)},
        "loop",
        targets=(Target(bound),),
        peers=("torchrl",) if num_envs == 1 else (),  # TorchRL's batches of environments fail with `device=`
    )


def _transformed() -> TransformedEnv:
    return TransformedEnv(GymEnv(NAME), Compose(StepCounter(), RewardSum()))


CASES = (
    _case("cartpole", "one CartPole", lambda: GymEnv(NAME), 1, 0.8),
    _case("transformed", "one CartPole with StepCounter and RewardSum", _transformed, 1, 0.5),
    _case("serial", "SerialEnv of 8 CartPoles", lambda: SerialEnv(8, lambda: GymEnv(NAME)), 8, 0.8),
)
