"""TorchRL: its collector, and its buffer over LazyTensorStorage. All 11 columns."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from itertools import islice

import torchrl.collectors
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.envs.utils import RandomPolicy

from benchmarks.workload import FRAMES_ENV, as_tensordict, make_policy, rows, stored

VERSION = importlib.metadata.version("torchrl")
RING, EXTEND = 100_000, 200
Work = Callable[[], float]
# The class changed its name; either is the same single-process collector.
COLLECTOR = getattr(torchrl.collectors, "Collector", None) or torchrl.collectors.SyncDataCollector


def collecting(name: str, with_policy: bool, frames: int) -> Callable[[], Work]:
    """Batches of 200 frames from its collector."""

    def setup() -> Work:
        env = GymEnv(name, disable_env_checker=True)
        policy = RandomPolicy(env.action_spec)
        if with_policy:
            policy = TensorDictModule(make_policy(name), in_keys=["observation"], out_keys=["action"])
        batches = iter(COLLECTOR(env, policy, frames_per_batch=200, total_frames=-1))

        def work() -> int:
            for _ in islice(batches, frames // 200):
                pass
            return frames

        return work

    return setup


def writing(one: bool, calls: int) -> Callable[[], Work]:
    """`extend` of EXTEND rows, or `add` of one, into a full ring."""

    def setup() -> Work:
        buffer, data = ReplayBuffer(storage=LazyTensorStorage(RING)), as_tensordict(rows("cartpole", EXTEND))
        for _ in range(RING // EXTEND):
            buffer.extend(data)
        singles = [data[i] for i in range(EXTEND)]

        def work() -> int:
            for k in range(calls):
                if one:
                    buffer.add(singles[k % EXTEND])
                else:
                    buffer.extend(data)
            return calls

        return work

    return setup


def sampling(kind: str, calls: int, batch: int = 256) -> Callable[[], Work]:
    """`sample(batch)`."""

    def setup() -> Work:
        columns = stored(kind)
        buffer = ReplayBuffer(storage=LazyTensorStorage(len(columns["observation",])))
        buffer.extend(as_tensordict(columns))
        del columns

        def work() -> int:
            for _ in range(calls):
                buffer.sample(batch)
            return calls

        return work

    return setup


SETUPS = {
    "collection/cartpole-random": collecting("CartPole-v1", False, 400),
    "collection/cartpole-mlp": collecting("CartPole-v1", True, 400),
    "collection/pendulum-random": collecting("Pendulum-v1", False, 400),
    "collection/pendulum-mlp": collecting("Pendulum-v1", True, 400),
    "collection/frames-random": collecting(FRAMES_ENV, False, 400),
    "replay/extend": writing(False, 100),
    "replay/add": writing(True, 200),
    "replay/sample": sampling("cartpole", 200),
    "replay/sample-1024": sampling("cartpole", 60, 1024),
    "replay/sample-humanoid": sampling("humanoid", 50),
    "replay/sample-image": sampling("image", 10),
}
