"""TorchRL's sides: collectors, and buffers over LazyTensorStorage with all 11 columns.

The prioritized sampler needs TorchRL's C++ extension. Its wheel may lack the extension for the installed torch. TorchRL
then raises an error, which the report shows.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torchrl.collectors
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import (
    FlatStorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import NextStateReconstructor
from torchrl.envs.utils import RandomPolicy

from benchmarks.workload import (
    DEVICE,
    FRAMES_ENV,
    Updates,
    as_tensordict,
    chunks_of_episodes,
    episode_rows,
    first_priorities,
    loading,
    make_policy,
    rows,
    settle_device,
    stored,
)

VERSION = importlib.metadata.version("torchrl")
RING, EXTEND, STORED = 100_000, 200, 1_000_000
SLICES, LENGTH, SLICE = 16, 64, 16
Work = Callable[[], float]
# TorchRL renamed these classes. Both names are the same collector.
COLLECTOR = getattr(torchrl.collectors, "Collector", None) or torchrl.collectors.SyncDataCollector
MULTI = {
    True: getattr(torchrl.collectors, "MultiSyncCollector", None)
    or torchrl.collectors.MultiSyncDataCollector,
    False: getattr(torchrl.collectors, "MultiAsyncCollector", None)
    or torchrl.collectors.MultiaSyncDataCollector,
}


def collecting(
    name: str, with_policy: bool, frames: int, transforms: tuple[type, ...] = (), **options: Any
) -> Callable[[], Work]:
    """Return the set-up of batches of 200 frames from a collector with `options`, over a transformed environment."""

    def setup() -> Work:
        env = GymEnv(name, disable_env_checker=True)
        if transforms:
            env = TransformedEnv(env, Compose(*(transform() for transform in transforms)))
        policy = RandomPolicy(env.action_spec)
        if with_policy:
            policy = TensorDictModule(make_policy(name), in_keys=["observation"], out_keys=["action"])
        batches = iter(COLLECTOR(env, policy, frames_per_batch=200, total_frames=-1, **options))

        def work() -> int:
            for _ in islice(batches, frames // 200):
                pass
            return frames

        return work

    return setup


def collecting_in_workers(sync: bool, with_policy: bool, batches: int) -> Callable[[], Work]:
    """Return the set-up of batches from a collector with 2 workers, with 200 steps per worker and batch."""

    def setup() -> Work:
        makers = [partial(GymEnv, "CartPole-v1", disable_env_checker=True)] * 2
        policy = RandomPolicy(makers[0]().action_spec)
        if with_policy:
            policy = TensorDictModule(
                make_policy("CartPole-v1"), in_keys=["observation"], out_keys=["action"]
            )
        kwargs: dict[str, Any] = {"cat_results": "stack"} if sync else {}
        collector = MULTI[sync](
            makers, policy, frames_per_batch=400 if sync else 200, total_frames=-1, **kwargs
        )
        source = iter(collector)
        # Asynchronous workers continue during turns of other sides, until each has one batch ready. A turn first takes
        # these batches and does not count them.
        ready, parts = (0, 1) if sync else (2, 2)

        def work() -> int:
            for _ in islice(source, ready + batches * parts):
                pass
            return batches * 400

        weakref.finalize(work, collector.shutdown)
        return work

    return setup


def writing(one: bool, calls: int) -> Callable[[], Work]:
    """Return the set-up of `extend` with EXTEND rows, or of `add` with one, into a full ring."""

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
    """Return the set-up of `sample(batch)`."""

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


def prioritized() -> TensorDictPrioritizedReplayBuffer:
    """Return a full prioritized buffer of a million rows. Each row has a different priority."""
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(STORED))
    index = buffer.extend(as_tensordict(stored("cartpole")))
    buffer.update_priority(index, torch.from_numpy(first_priorities(STORED)))
    return buffer


def prioritized_sampling(calls: int) -> Callable[[], Work]:
    """Return the set-up of `sample(256)` with weights."""

    def setup() -> Work:
        buffer = prioritized()

        def work() -> int:
            for _ in range(calls):
                buffer.sample(256)
            return calls

        return work

    return setup


def updating(calls: int) -> Callable[[], Work]:
    """Return the set-up of `update_priority` with 256 rows."""

    def setup() -> Work:
        buffer, updates = prioritized(), Updates(STORED, 256, calls, torch.from_numpy)

        def work() -> int:
            for index, priority in updates.turn():
                buffer.update_priority(index, priority)
            return calls

        return work

    return setup


def cycling(calls: int) -> Callable[[], Work]:
    """Return the set-up of `extend` with 4 rows, `sample(256)` and new priorities of the sampled rows."""

    def setup() -> Work:
        buffer, updates = prioritized(), Updates(STORED, 256, calls, torch.from_numpy)
        data = as_tensordict(rows("cartpole", 4))

        def work() -> int:
            for _, priority in updates.turn():
                buffer.extend(data)
                buffer.update_priority(buffer.sample(256)["index"], priority)
            return calls

        return work

    return setup


def slicing(calls: int, extend: bool = False, **keys: Any) -> Callable[[], Work]:
    """Return the set-up of samples of 16 slices of 64 steps. With `extend`, 200 steps are written before each."""

    def setup() -> Work:
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(STORED), sampler=SliceSampler(num_slices=SLICES, **keys)
        )
        buffer.extend(as_tensordict(episode_rows(STORED)))
        chunks = [as_tensordict(columns) for columns in chunks_of_episodes(EXTEND)]

        def work() -> int:
            for k in range(calls):
                if extend:
                    buffer.extend(chunks[k % len(chunks)])
                buffer.sample(SLICES * LENGTH)
            return calls

        return work

    return setup


def on_the_device(kind: str, **options: Any) -> ReplayBuffer:
    """Return a buffer that holds `stored(kind)`, by default on the accelerator."""
    columns = stored(kind)
    storage = LazyTensorStorage(len(columns["observation",]), device=options.pop("device", DEVICE))
    buffer = ReplayBuffer(storage=storage, **options)
    buffer.extend(as_tensordict(columns))
    return buffer


def until_settled(calls: int, call: Callable[[], Any]) -> Work:
    """Return work that makes `calls` calls and waits until the device has finished them."""

    def work() -> int:
        for _ in range(calls):
            call()
        settle_device()
        return calls

    return work


def extending_there(kind: str, source: str, calls: int) -> Callable[[], Work]:
    """Return the set-up of `extend` with EXTEND rows that are on the device `source`."""

    def setup() -> Work:
        size = {"cartpole": RING, "image": 4_000}[kind]
        buffer = ReplayBuffer(storage=LazyTensorStorage(size, device=DEVICE))
        data = as_tensordict(rows(kind, EXTEND)).to(source)
        for _ in range(size // EXTEND):
            buffer.extend(data)
        return until_settled(calls, lambda: buffer.extend(data))

    return setup


def sampling_there(kind: str, batch: int, calls: int) -> Callable[[], Work]:
    """Return the set-up of `sample(batch)` on the device."""

    def setup() -> Work:
        buffer = on_the_device(kind)
        return until_settled(calls, lambda: buffer.sample(batch))

    return setup


def prioritized_there(calls: int) -> Work:
    """Return work that samples by priority on the device, with new priorities that are there after each sample."""
    storage = LazyTensorStorage(STORED, device=DEVICE)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=256)
    index = buffer.extend(as_tensordict(stored("cartpole")))
    buffer.update_priority(index, torch.from_numpy(first_priorities(STORED)))
    errors = torch.rand(256, device=DEVICE) + 0.01

    def call() -> None:
        batch = buffer.sample()
        batch["td_error"] = errors
        buffer.update_tensordict_priority(batch)

    return until_settled(calls, call)


def slicing_there(calls: int) -> Work:
    """Return work that samples 16 slices of 64 steps on the device. The sampler caches the boundaries of episodes."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STORED, device=DEVICE),
        sampler=SliceSampler(num_slices=SLICES, cache_values=True, **BY_ID),
    )
    buffer.extend(as_tensordict(episode_rows(STORED)))
    return until_settled(calls, lambda: buffer.sample(SLICES * LENGTH))


def serving(kind: str, calls: int) -> Callable[[], Work]:
    """Return the set-up of batches that are prefetched in the CPU's memory, pinned for CUDA, and moved there."""

    def setup() -> Work:
        options = {"pin_memory": DEVICE == "cuda", "prefetch": 3, "batch_size": 256}
        buffer = on_the_device(kind, device="cpu", **options)
        return until_settled(calls, lambda: buffer.sample().to(DEVICE, non_blocking=True))

    return setup


class Compact:
    """A buffer of the rows of a collector with `compact_obs`, with their transform; see `compact_peers.py`.

    The transform finds next observations in the same batch, so the sampler draws slices. Two slices of one episode may
    follow each other in a batch. By default the transform joins them, but not if `counted` gives it the steps' numbers.
    """

    def __init__(self, kind: str, size: int, envs: int, counted: bool) -> None:
        self._ndim, self._counted = 1 if envs == 1 else 2, counted
        self._buffer = ReplayBuffer(
            storage=LazyTensorStorage(size, ndim=self._ndim),
            sampler=SliceSampler(slice_len=SLICE, strict_length=False, cache_values=True, truncated_key=None),
            transform=NextStateReconstructor(
                fill_value=0 if kind == "stacks" else float("nan"),
                step_count_key="step_count" if counted else None,
            ),
            batch_size=256,
        )

    def writes(self, steps: Any, count: int) -> list[Any]:
        """Return the arguments of `write` for `count` steps each."""
        names = (
            ("observation",),
            ("action",),
            ("next", "reward"),
            ("next", "terminated"),
            ("next", "truncated"),
            ("collector", "traj_ids"),
        )
        columns: list[Any] = [steps.observation, steps.action, *steps[2:3], *steps[4:]]
        columns[2:5] = [column[..., None] for column in columns[2:5]]
        data = TensorDict(
            {name: torch.from_numpy(column) for name, column in zip(names, columns, strict=True)},
            steps.reward.shape,
        )
        if self._counted:
            data["step_count"] = torch.from_numpy(steps.reward.astype("int64"))
        data["next", "done"] = data["next", "terminated"] | data["next", "truncated"]
        data = data[:, 0].contiguous() if self._ndim == 1 else data.transpose(0, 1).contiguous()
        if self._ndim == 1 and count == 1:
            return list(data.unbind(0))
        return list(data.split(count, -1))

    def write(self, row: Any) -> int:
        """Write a step or several."""
        if row.ndim:
            self._buffer.extend(row)
            return row.shape[-1]
        self._buffer.add(row)
        return 1

    def sample(self) -> Any:
        """Return a batch."""
        return self._buffer.sample()

    def rows(self, batch: Any) -> dict[str, Any]:
        """Return a batch as arrays."""
        return {
            "observation": batch["observation"].numpy(),
            "action": batch["action"].numpy(),
            "reward": batch["next", "reward"].numpy(),
            "following": batch["next", "observation"].numpy(),
            "terminated": batch["next", "terminated"].numpy(),
            "truncated": batch["next", "truncated"].numpy(),
        }


BY_END: dict[str, Any] = {"end_key": ("next", "done")}
BY_ID: dict[str, Any] = {"traj_key": ("collector", "traj_ids")}
SETUPS = {
    **{
        f"checkpoint/{name}-{kind}-load-beside": loading(ReplayBuffer, LazyTensorStorage, form, kind, count)
        for name, form in (("flat", FlatStorageCheckpointer), ("nested", NestedStorageCheckpointer))
        for kind, count in (("cartpole", 1_000_000), ("image", 4_000))
    },
    "collection/cartpole-random": collecting("CartPole-v1", False, 400),
    "collection/cartpole-mlp": collecting("CartPole-v1", True, 400),
    "collection/pendulum-random": collecting("Pendulum-v1", False, 400),
    "collection/pendulum-mlp": collecting("Pendulum-v1", True, 400),
    "collection/frames-random": collecting(FRAMES_ENV, False, 400),
    "native/greedy-forward": collecting("CartPole-v1", True, 400),
    "devices/cartpole": collecting("CartPole-v1", True, 400, device=DEVICE),
    "devices/transformed": collecting("CartPole-v1", True, 400, (StepCounter, RewardSum), device=DEVICE),
    "device-replay/extend-cartpole-from-cpu": extending_there("cartpole", "cpu", 100),
    "device-replay/extend-cartpole-from-device": extending_there("cartpole", DEVICE, 100),
    "device-replay/extend-image-from-cpu": extending_there("image", "cpu", 20),
    "device-replay/extend-image-from-device": extending_there("image", DEVICE, 20),
    "device-replay/sample-32": sampling_there("cartpole", 32, 200),
    "device-replay/sample": sampling_there("cartpole", 256, 200),
    "device-replay/sample-image": sampling_there("image", 256, 50),
    "device-replay/prioritized": partial(prioritized_there, 50),
    "device-replay/slices": partial(slicing_there, 20),
    "device-replay/serve": serving("cartpole", 100),
    "device-replay/serve-image": serving("image", 30),
    "multiprocess/cartpole-random-sync": collecting_in_workers(True, False, 4),
    "multiprocess/cartpole-random-async": collecting_in_workers(False, False, 4),
    "multiprocess/cartpole-mlp-sync": collecting_in_workers(True, True, 2),
    "multiprocess/cartpole-mlp-async": collecting_in_workers(False, True, 2),
    "replay/extend": writing(False, 100),
    "replay/add": writing(True, 200),
    "replay/sample": sampling("cartpole", 200),
    "replay/foreign-sampler": sampling("cartpole", 200),
    "replay/sample-1024": sampling("cartpole", 60, 1024),
    "replay/sample-humanoid": sampling("humanoid", 50),
    "replay/sample-image": sampling("image", 10),
    "prioritized/sample": prioritized_sampling(100),
    "prioritized/update": updating(200),
    "prioritized/cycle": cycling(50),
    "slices/sample end_key": slicing(20, **BY_END),
    "slices/sample end_key,cached": slicing(50, **BY_END, cache_values=True),
    "slices/sample traj_key": slicing(20, **BY_ID),
    "slices/sample traj_key,cached": slicing(50, **BY_ID, cache_values=True),
    "slices/extend-sample end_key": slicing(20, extend=True, **BY_END),
    "slices/extend-sample end_key,cached": slicing(20, extend=True, **BY_END, cache_values=True),
    "slices/extend-sample traj_key": slicing(20, extend=True, **BY_ID),
    "slices/extend-sample traj_key,cached": slicing(20, extend=True, **BY_ID, cache_values=True),
}
