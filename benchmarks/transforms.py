"""Collectors with transforms: against collectors without, and for images against a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.harness import Case, Setup, Target, Work
from gleanrl.collectors import SyncDataCollector
from gleanrl.envs import GymEnv, GymWrapper, SerialEnv
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    DoubleToFloat,
    GrayScale,
    ObservationNorm,
    Resize,
    RewardSum,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
)

NAME = "Pendulum-v1"
STEPS, FRAMES, EPISODE = 400, 200, 250
SHAPE = (210, 160, 3)
LUMA = (0.2989, 0.587, 0.114)


class FrameBank(gym.Env[Any, Any]):
    """An environment that returns one of eight random images at no cost. An episode has `EPISODE` steps."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self._bank = [draws.integers(0, 256, SHAPE, np.uint8) for _ in range(8)]
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._bank[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._bank[self._step % 8], 1.0, self._step >= EPISODE, False, {}


def small(frame: Any) -> Tensor:
    """Return a frame (210, 160, 3) uint8 as a grey image (1, 84, 84) float32."""
    image = (
        torch.from_numpy(frame)
        .movedim(-1, 0)
        .to(torch.float32, memory_format=torch.contiguous_format)
        .div_(255)
    )
    grey = (image[0] * LUMA[0]).add_(image[1], alpha=LUMA[1]).add_(image[2], alpha=LUMA[2])
    return interpolate(grey[None, None], (84, 84), mode="bilinear", align_corners=False)[0]


def by_hand(env: Any, steps: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches without end: stacks of four images before and after each step, actions, rewards and flags."""
    draws = np.random.default_rng(0)
    stack = small(env.reset()[0]).repeat(4, 1, 1)
    while True:
        before, after = (torch.from_numpy(np.empty((steps, 4, 84, 84), np.float32)) for _ in range(2))
        action, reward = torch.zeros(steps, 4, dtype=torch.int64), torch.empty(steps, 1)
        flags = torch.zeros(2, steps, 1, dtype=torch.bool)
        choices = draws.integers(0, 4, steps)
        with torch.no_grad():
            for t in range(steps):
                before[t] = stack
                action[t, choices[t]] = 1
                frame, reward[t], terminated, truncated, _ = env.step(choices[t])
                stack = torch.cat([stack[1:], small(frame)])
                after[t] = stack
                if terminated or truncated:
                    flags[0, t], flags[1, t] = terminated, truncated
                    stack = small(env.reset()[0]).repeat(4, 1, 1)
        yield before, after, action, reward, flags


def frames_by_hand() -> Work:
    batches = by_hand(FrameBank(), FRAMES)

    def work() -> float:
        next(batches)
        return FRAMES

    return work


def collected(make: Callable[[], Any], steps: int) -> Setup:
    def setup() -> Work:
        env = make()
        frames = steps * max(1, env.batch_size.numel())
        batches = iter(SyncDataCollector(env, frames_per_batch=frames, total_frames=-1))

        def work() -> float:
            return float(next(batches).numel())

        return work

    return setup


def pendulum() -> GymEnv:
    return GymEnv(NAME)


def eight() -> SerialEnv:
    return SerialEnv(8, pendulum)


def transformed(make: Callable[[], Any]) -> Callable[[], TransformedEnv]:
    return lambda: TransformedEnv(
        make(),
        Compose(
            StepCounter(), RewardSum(), ObservationNorm(0.1, 2.0, in_keys=["observation"]), DoubleToFloat()
        ),
    )


def frames() -> TransformedEnv:
    keys = {"in_keys": ["pixels"]}
    chain = [ToTensorImage(**keys), GrayScale(**keys), Resize(84, 84, **keys), CatFrames(4, -3, **keys)]
    return TransformedEnv(GymWrapper(FrameBank()), Compose(*chain))


CASES = (
    Case(
        "transforms/one",
        f"{NAME}, random actions: StepCounter, RewardSum, ObservationNorm, DoubleToFloat, against no transforms",
        "frame",
        {"untransformed": collected(pendulum, STEPS), "gleanrl": collected(transformed(pendulum), STEPS)},
        "untransformed",
        targets=(Target(0.35),),
    ),
    Case(
        "transforms/eight",
        f"SerialEnv of 8 {NAME}, random actions: the transforms of transforms/one, against no transforms",
        "frame",
        {"untransformed": collected(eight, STEPS // 4), "gleanrl": collected(transformed(eight), STEPS // 4)},
        "untransformed",
        targets=(Target(0.75),),
    ),
    Case(
        "transforms/frames",
        "images (210, 160, 3): ToTensorImage, GrayScale, Resize(84), CatFrames(4), against torch by hand",
        "frame",
        {"by hand": frames_by_hand, "gleanrl": collected(frames, FRAMES)},
        "by hand",
        targets=(Target(0.8),),
    ),
)
