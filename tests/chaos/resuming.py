"""Trainings that are killed and resume: `python -m tests.chaos.resuming cells|chain FOLDER COUNT`.

`cells`: after each batch a program saves and is killed. A new process loads the checkpoint and runs to the end. The
hash of all later data (batches, samples, priorities, random numbers) must equal the hash of an unbroken run.

`chain`: a training is killed COUNT times at random moments. Its final weights must equal the weights of an unbroken
run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot

from gleanrl import Checkpoint
from gleanrl._arrays.tensordicts import flatten
from gleanrl.collectors import SyncDataCollector
from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gleanrl.envs import GymEnv, PendulumEnv, SerialEnv, TransformedEnv
from gleanrl.envs.transforms import Compose, RewardSum, StepCounter
from gleanrl.errors import IncompleteCheckpointError

BATCHES, CAPACITY = 6, 60
STEPS, EVERY = 60, 4
IDS = ("collector", "traj_ids")


def cart() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=9), RewardSum()))


ENVS: dict[str, Callable[[], Any]] = {
    "single": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    "serial of transformed": lambda: SerialEnv(2, cart),
    "written in torch": lambda: TransformedEnv(PendulumEnv(), StepCounter(max_steps=7)),
}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, traj_key=IDS, strict_length=False),
    "prioritized slices": lambda: PrioritizedSliceSampler(
        CAPACITY, 0.7, 0.5, slice_len=2, traj_key=IDS, strict_length=False
    ),
}
STORAGES: dict[str, Callable[[], Any]] = {
    "memory": lambda: (LazyTensorStorage(CAPACITY), 0),
    "mapped": lambda: (LazyMemmapStorage(CAPACITY), 0),
    "list": lambda: (ListStorage(CAPACITY), 0),
    "drawn ahead": lambda: (LazyTensorStorage(CAPACITY), 2),
}


def cells() -> list[tuple[str, str, str]]:
    """Return half of all combinations, with every pair of two kinds. Slices of lists are unsupported and left out."""
    numbered = product(enumerate(ENVS), enumerate(SAMPLERS), enumerate(STORAGES))
    half = [
        (env, sampler, storage) for (i, env), (j, sampler), (k, storage) in numbered if (i + j + k) % 2 == 0
    ]
    return [names for names in half if not (names[1].endswith("slices") and names[2] == "list")]


class Cell:
    """The program of a cell; each process creates it anew."""

    def __init__(self, env: str, sampler: str, storage: str) -> None:
        # other generators in each process, so that only the checkpoint restores them
        torch.manual_seed(os.getpid())
        np.random.seed(os.getpid())
        self.collector = SyncDataCollector(ENVS[env](), None, frames_per_batch=12, total_frames=12 * BATCHES)
        self.prioritized = sampler.startswith("prioritized")
        content, prefetch = STORAGES[storage]()
        self.buffer = TensorDictReplayBuffer(
            storage=content, sampler=SAMPLERS[sampler](), batch_size=8, prefetch=prefetch or None
        )
        self.progress: dict[str, int] = {"batches": 0}
        self.checkpoint = Checkpoint(collector=self.collector, buffer=self.buffer, progress=self.progress)

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.collector.set_seed(seed)

    def step(self) -> bytes:
        """Collect and use one batch; return the hash of all results."""
        found = hashlib.sha256()
        batch = self.collector.next()
        assert batch is not None
        note(found, batch)
        self.buffer.extend(batch.reshape(-1))
        for _ in range(2):
            sample = self.buffer.sample()
            note(found, sample)
            if self.prioritized:
                self.buffer.update_priority(sample["index"], torch.rand(len(sample["index"])))
        found.update(repr((float(torch.rand(())), float(np.random.normal()), random.random())).encode())
        self.progress["batches"] += 1
        return found.digest()

    def rest(self) -> str:
        found = hashlib.sha256()
        while self.progress["batches"] < BATCHES:
            found.update(self.step())
        return found.hexdigest()


def note(found: Any, batch: Any) -> None:
    for path, leaf in sorted(flatten(batch).items()):
        data: Any = leaf
        found.update(repr((path, tuple(data.shape))).encode())
        found.update(data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def forked(work: Callable[[], str | None], killed: bool = False, within: float = 0.0) -> str | None:
    """Return the result of `work` in a child process, or None if it was killed."""
    listen, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if within:
                signal.setitimer(
                    signal.ITIMER_REAL, within
                )  # the default action of SIGALRM ends the process at once
            result = work()
            os.write(said, json.dumps(result).encode())
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(said)
    with os.fdopen(listen) as heard:
        text = heard.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and not killed:
        return None
    assert killed or status == 0, "the child failed"
    found: str | None = json.loads(text)
    return found


def check_cell(names: tuple[str, str, str], folder: Path) -> int:
    """Save after each batch, get killed, resume in another process; return the number of compared streams."""

    def unbroken() -> str:
        cell, digests = Cell(*names), []
        cell.begin(3)
        while cell.progress["batches"] < BATCHES:
            digests.append(cell.step().hex())
        return " ".join(digests)

    def one_more() -> None:
        cell = Cell(*names)
        if any(folder.glob("ckpt-*")):
            cell.checkpoint.load(folder)
        else:
            cell.begin(3)
        cell.step()
        cell.checkpoint.save(folder)

    def rest() -> str:
        cell = Cell(*names)
        cell.checkpoint.load(folder)
        return cell.rest()

    digests = [bytes.fromhex(digest) for digest in (forked(unbroken) or "").split()]
    for batch in range(1, BATCHES):
        forked(one_more, killed=True)
        expected = hashlib.sha256(b"".join(digests[batch:])).hexdigest()
        assert forked(rest) == expected, f"{names}: after batch {batch}"
    return BATCHES - 1


class Greedy(nn.Module):
    """Returns the action of the higher value, or sometimes a random one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        action = self.net(observation).argmax(-1)
        return one_hot(torch.where(torch.rand(action.shape) < 0.3, torch.randint(2, action.shape), action), 2)


def train(folder: Path | None) -> str:
    """Train, from the folder's last checkpoint if there is one; return the hash of the final weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    env.set_seed(0)
    collector = SyncDataCollector(env, Greedy(net), frames_per_batch=8, total_frames=8 * STEPS)
    buffer: ReplayBuffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), sampler=PrioritizedSampler(200, 0.7, 0.5), batch_size=8
    )
    checkpoint = Checkpoint(collector=collector, buffer=buffer, optimizer=optimizer, scheduler=scheduler)
    if folder is not None:
        with suppress(IncompleteCheckpointError):
            checkpoint.load(folder)
    for number, batch in enumerate(collector, collector.stats().batches + 1):
        buffer.extend(batch.reshape(-1))
        sample = buffer.sample()
        value = (net(sample["observation"]) * sample["action"]).sum(-1, keepdim=True)
        errors = (
            value
            - sample["next", "reward"]
            - 0.9 * net(sample["next", "observation"]).amax(-1, True).detach()
        )
        loss = mse_loss(errors, torch.zeros_like(errors))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        buffer.update_priority(sample["index"], errors.detach().abs().flatten())
        if folder is not None and number % EVERY == 0:
            checkpoint.save(folder)
    found = hashlib.sha256()
    for weight in net.state_dict().values():
        found.update(weight.numpy().tobytes())
    return found.hexdigest()


def check_chain(folder: Path, kills: int) -> dict[str, Any]:
    """Kill a training `kills` times, and restart it whenever it reaches its end before; return the counts."""
    draw, done, ends, within = random.Random(7), 0, 0, 0.15
    expected = forked(lambda: train(None))
    place = folder / "0"
    while done < kills or not ends:
        found = forked(partial(train, place), within=draw.uniform(0.01, within))
        if found is None:
            done += 1
            within *= 1.02  # so that it reaches its end at last, also on a slow machine
            continue
        assert found == expected, f"other weights after {done} kills"
        ends, within = ends + 1, 0.15
        place = folder / str(ends)
    return {"kills": done, "ends": ends}


def main(what: str, folder: Path, count: int) -> dict[str, Any]:
    if what == "chain":
        return check_chain(folder, count)
    chosen = cells()[:: max(1, len(cells()) // count)][:count]
    streams = 0
    for names in chosen:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            streams += check_cell(names, Path(own))
    return {"cells": len(chosen), "streams": streams}


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
