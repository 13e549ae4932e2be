"""Small buffers of every kind that can be saved. Arithmetic fills them, so their values are equal in every release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

CAPACITY = 8
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
)


def steps(begin: int, end: int) -> TensorDict:
    """Return steps of trajectories of length four, ``[end - begin]``."""
    number = torch.arange(begin, end)
    observation = torch.stack([number, -number], 1).float()
    after = {
        "observation": observation + torch.tensor([1.0, -1.0]),
        "reward": number[:, None] / 4,
        "done": number[:, None] % 4 == 3,
    }
    after["terminated"] = after["done"].clone()
    now = {"observation": observation, "action": (number % 3).to(torch.int8), "episode": number // 4}
    return TensorDict({**now, "next": after}, [len(number)])


def buffer(**options: Any) -> ReplayBuffer:
    made: ReplayBuffer = TensorDictReplayBuffer(
        **{"storage": LazyTensorStorage(CAPACITY), "batch_size": 4, **options}
    )
    return made


SPECIMENS: dict[str, Callable[[], Any]] = {
    "whole": buffer,
    "mapped": lambda: buffer(storage=LazyMemmapStorage(CAPACITY)),
    "two dimensions": lambda: buffer(storage=LazyTensorStorage(CAPACITY, ndim=2)),
    "flat": lambda: buffer(checkpointer=FlatStorageCheckpointer()),
    "nested": lambda: buffer(checkpointer=NestedStorageCheckpointer()),
    "h5": lambda: buffer(checkpointer=H5StorageCheckpointer()),
    "h5 compressed": lambda: buffer(
        checkpointer=H5StorageCheckpointer(h5_kwargs={"compression": "gzip", "shuffle": True})
    ),
    "list": lambda: ReplayBuffer(storage=ListStorage(CAPACITY), batch_size=4, collate_fn=list),
    "texts": lambda: ReplayBuffer(storage=ListStorage(CAPACITY), batch_size=4, collate_fn=list),
    "types": lambda: ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4),
    "priorities": lambda: TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=4
    ),
    "epoch": lambda: buffer(sampler=SamplerWithoutReplacement()),
    "slices": lambda: buffer(sampler=SliceSampler(slice_len=2, traj_key="episode")),
    "slices once": lambda: buffer(sampler=SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode")),
    "slices by priority": lambda: buffer(
        sampler=PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=2, traj_key="episode")
    ),
    "drawn ahead": lambda: buffer(prefetch=2),
    "best": lambda: buffer(writer=TensorDictMaxValueWriter(rank_key=("next", "reward"))),
    "hindsight": lambda: HERReplayBuffer(
        lambda rows: (rows["achieved_goal"] == rows["desired_goal"]).float(),
        storage=LazyTensorStorage(CAPACITY),
        batch_size=4,
    ),
    "buffers": lambda: ReplayBufferEnsemble(buffer(), SPECIMENS["priorities"](), batch_size=4),
    "storages": lambda: StorageEnsemble(LazyTensorStorage(CAPACITY), ListStorage(CAPACITY)),
}


def records(name: str, begin: int, end: int) -> Any:
    """Return the records that the specimen of this name stores."""
    if name == "list":
        return [{"text": f"é{n}", "values": (torch.arange(n), n / 3, None)} for n in range(begin, end)]
    if name == "texts":
        texts = [NonTensorStack(f"é{n}", "two", f"{-n}") for n in range(begin, end)]
        return [TensorDict({"text": f"{n}", "texts": texts[n - begin]}, [3]) for n in range(begin, end)]
    if name == "types":
        number = torch.arange(begin, end)
        return TensorDict({str(dtype): (number % 2).to(dtype) for dtype in DTYPES}, [end - begin])
    if name == "hindsight":
        achieved = torch.arange(begin, end)[:, None].float()
        return steps(begin, end).update({"achieved_goal": achieved, "desired_goal": achieved + 9})
    if name == "two dimensions":
        return steps(begin, end)[:, None].expand(end - begin, 2).clone()
    return steps(begin, end)


def filled(name: str) -> Any:
    """Return a specimen that was written past its capacity and sampled from."""
    torch.manual_seed(0)  # seeds the components of the specimen
    made = SPECIMENS[name]()
    if name == "storages":
        made[0].set(range(5), steps(0, 5))
        made[1].set(range(3), [f"{n}" for n in range(3)])
        return made
    for part in (made[0], made[1]) if name == "buffers" else (made,):
        part.extend(records(name, 0, 5))
        part.extend(records(name, 5, 10))
        if name in ("priorities", "slices by priority"):
            part.update_priority(torch.arange(CAPACITY), torch.arange(1.0, CAPACITY + 1))
    made.sample()
    return made


def records_in(name: str, made: Any) -> list[Any]:
    """Return the records and counts of a specimen as values that compare equal and can be written as JSON."""
    if name == "storages":
        return [as_values(part.get(range(len(part)))) for part in (made[0], made[1])]
    parts = (made[0], made[1]) if name == "buffers" else (made,)
    return [[len(part), part.write_count, as_values(part[:])] for part in parts]


def as_values(state: Any) -> Any:
    """Return a state with its tensors as lists and strings; results are equal if the states are equal bit for bit."""
    if isinstance(state, torch.Tensor):
        return [str(state.dtype), list(state.shape), repr(state.tolist())]
    if isinstance(state, (NonTensorData, NonTensorStack)):
        return [type(state).__name__, list(state.batch_size), as_values(state.tolist())]
    if isinstance(state, (dict, TensorDict)):
        return {str(key): as_values(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [as_values(value) for value in state]
    return repr(state)
