"""Collectors in mid-episode and buffers with state: functions that create, use and continue them, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict, tensorclass
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    Bounded,
    Composite,
    CompressedListStorage,
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Unbounded,
)
from gleanrl.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, PendulumEnv, SerialEnv, TicTacToeEnv
from gleanrl.envs.transforms import (
    CatFrames,
    Compose,
    DoubleToFloat,
    FrameSkipTransform,
    InitTracker,
    MultiStepTransform,
    NoopResetEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    TargetReturn,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from gleanrl.extending import OwnedTorchGenerator

FRAMES = 8
CAPACITY = 8


class Drift(EnvBase):
    """A user's environment: a point drifts by noise from a generator that the library owns."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(place=Unbounded((1,)), taken=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))
        self.noise = OwnedTorchGenerator(5)
        self.place, self.memory = torch.zeros(1), {"taken": [0]}

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        self.place, self.memory["taken"] = torch.zeros(1), [0]
        return self._observed()

    def _step(self, tensordict: Any) -> TensorDict:
        self.place = self.place + tensordict["action"] + torch.randn(1, generator=self.noise.get())
        self.memory["taken"][0] += 1
        out = self._observed()
        out["reward"] = -self.place.abs()
        out["terminated"] = torch.tensor([self.memory["taken"][0] >= 11])
        return out

    def _observed(self) -> TensorDict:
        return TensorDict({"place": self.place, "taken": torch.tensor(self.memory["taken"])})

    def _set_seed(self, seed: int) -> None:
        self.noise.seed(seed)


def cart() -> GymEnv:
    return GymEnv("CartPole-v1")


def transformed() -> TransformedEnv:
    return TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(
            *(StepCounter(20), InitTracker(), RewardScaling(1.0, 0.1), RewardSum(), TargetReturn(3.0)),
            CatFrames(3, -1, in_keys=["observation"]),
        ),
    )


def normalized() -> TransformedEnv:
    norms = (VecNorm(in_keys=["observation"]), VecNormV2(in_keys=["reward"]))
    return TransformedEnv(
        GymEnv("Pendulum-v1"), Compose(NoopResetEnv(3), FrameSkipTransform(2), DoubleToFloat(), *norms)
    )


def learned() -> TransformedEnv:
    return TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), StepCounter(11))


def module() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])


COLLECTORS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gym": lambda: (cart(), None),
    "transformed": lambda: (transformed(), None),
    "normalized": lambda: (normalized(), None),
    "serial": lambda: (SerialEnv(2, cart), None),
    "serial_transformed": lambda: (learned(), module()),
    "parallel": lambda: (ParallelEnv(2, cart), None),
    "gym_vector": lambda: (GymEnv("CartPole-v1", num_envs=2), None),
    "gym_vector_wrapped": lambda: (GymWrapper(gym.make_vec("Pendulum-v1", num_envs=2)), None),
    "pendulum": lambda: (TransformedEnv(PendulumEnv(), StepCounter(13)), None),
    "tictactoe": lambda: (TicTacToeEnv(), None),
    "derived": lambda: (Drift(), None),
}
"""Environments and policies of the collectors."""

RESTARTED = ("parallel",)
"""Collectors whose state lacks unfinished episodes, because their environments are in other processes."""


def collector(name: str) -> SyncDataCollector:
    torch.manual_seed(0)
    env, policy = COLLECTORS[name]()
    made = SyncDataCollector(
        env, policy, frames_per_batch=FRAMES * (env.batch_size.numel() or 1), total_frames=-1
    )
    made.set_seed(3)
    return made


def collected(name: str, made: SyncDataCollector) -> dict[str, Any]:
    """Return the next batch as plain values with the frames so far. For `RESTARTED`, return the frames alone."""
    batch = as_values(next(iter(made)))
    return {"frames": made.state_dict()["frames"], **({} if name in RESTARTED else batch)}


@tensorclass
class Record:
    """A record of a user's class."""

    observation: torch.Tensor
    reward: torch.Tensor


def steps(begin: int, end: int) -> TensorDict:
    """Return steps of trajectories of length four, ``[end - begin]``."""
    number = torch.arange(begin, end)
    after = {
        "observation": number[:, None] + 1.0,
        "reward": number[:, None] / 4,
        "done": number[:, None] % 4 == 3,
    }
    after["terminated"] = after["done"].clone()
    now = {
        "observation": number[:, None].float(),
        "action": (number % 3).to(torch.int8),
        "episode": number // 4,
    }
    return TensorDict({**now, "next": after}, [len(number)])


def buffer(**options: Any) -> ReplayBuffer:
    chosen = {"storage": LazyTensorStorage(CAPACITY), "batch_size": 4, **options}
    made: ReplayBuffer = TensorDictReplayBuffer(**chosen)
    return made


BUFFERS: dict[str, Callable[[], ReplayBuffer]] = {
    "given": lambda: buffer(storage=TensorStorage(steps(0, CAPACITY))),
    "mapped": lambda: buffer(storage=LazyMemmapStorage(CAPACITY)),
    "list": lambda: ReplayBuffer(storage=ListStorage(CAPACITY), batch_size=4),
    "lazy_stack": lambda: ReplayBuffer(storage=LazyStackStorage(CAPACITY), batch_size=4),
    "compressed": lambda: ReplayBuffer(storage=CompressedListStorage(CAPACITY), batch_size=4),
    "tensorclass": lambda: ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4),
    "shared": lambda: ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4, shared=True),
    "consuming": lambda: buffer(sampler=ConsumingSampler(max_sample_count=4)),
    "stale": lambda: buffer(sampler=StalenessAwareSampler()),
    "epoch": lambda: buffer(sampler=SamplerWithoutReplacement()),
    "slices": lambda: buffer(sampler=SliceSampler(slice_len=2, traj_key="episode")),
    "priorities": lambda: PrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=4
    ),
    "td_priorities": lambda: TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=4
    ),
    "immutable": lambda: buffer(storage=TensorStorage(steps(0, CAPACITY)), writer=ImmutableDatasetWriter()),
    "drawn_ahead": lambda: buffer(prefetch=2, writer=TensorDictRoundRobinWriter()),
    "n_steps": lambda: buffer(transform=MultiStepTransform(2, 0.9)),
}


def records(name: str, begin: int, end: int) -> Any:
    """Return the records that a buffer of this name stores."""
    found = steps(begin, end)
    if name == "stale":
        return found.set("policy_version", torch.arange(begin, end))
    if name == "tensorclass":
        return Record(found["observation"], found["next", "reward"], batch_size=[end - begin])
    return list(found.unbind(0)) if name in ("list", "lazy_stack", "compressed") else found


def filled(name: str) -> ReplayBuffer:
    """Return a buffer that has wrapped and has been sampled."""
    torch.manual_seed(0)  # seeds the samplers
    made = BUFFERS[name]()
    if name != "immutable":
        made.extend(records(name, 0, 5))
        made.extend(records(name, 5, 11))
    if "priorities" in name:
        made.update_priority(torch.arange(4), torch.tensor([0.5, 3.0, 1.0, 2.0]))
    made.sample()
    return made


def continued(name: str, made: ReplayBuffer) -> dict[str, Any]:
    """Return the samples before and after a write and the content, as plain values."""
    first = as_values(made.sample())
    if name != "immutable":
        made.extend(records(name, 11, 13))
    return {
        "first": first,
        "second": as_values(made.sample()),
        "stored": as_values(made[:]),
        "size": len(made),
    }


def as_values(value: Any) -> Any:
    """Return tensors and their containers as lists and dictionaries for JSON; non-finite numbers become text."""
    if isinstance(value, torch.Tensor):
        numbers = value.double() if value.is_floating_point() else value
        return as_values(numbers.tolist())
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [as_values(item) for item in value]
    if isinstance(value, Record):
        return as_values(value.to_tensordict())
    if hasattr(value, "keys"):
        return {str(key): as_values(value[key]) for key in sorted(value.keys(), key=str)}
    return value
