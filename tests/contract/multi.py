"""Helpers of the contract tests of collectors with workers: makers, the oracle's check by worker, a gate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase

from gleanrl.envs import GymWrapper, ParallelEnv, SerialEnv
from tests.collectors.workers.crews import Stream
from tests.contract.helpers import IDS, check_ledger, check_stream, rows_of, valid_rows
from tests.fakes import OracleEnv, Script
from tests.fakes_base import CountingEnv

SCRIPT = Script(seed=61)
NEVER = Script(ending="never")
WHOLE: Any = "whole"  # each batch comes from one worker


def vector(first: int, script: Script) -> GymWrapper:
    """Return a gymnasium vector environment of two."""
    members = [lambda p=p: OracleEnv(first + p, script) for p in range(2)]
    mode = gym.vector.AutoresetMode.DISABLED
    return GymWrapper(gym.vector.SyncVectorEnv(members, autoreset_mode=mode))


ENVS = {
    "single": (1, Stream),
    "batched": (2, lambda first, script: Stream(first, script, (2,))),
    "serial": (
        2,
        lambda first, script: lambda: SerialEnv(2, [Stream(first, script), Stream(first + 1, script)]),
    ),
    "parallel": (
        2,
        lambda first, script: lambda: ParallelEnv(2, [Stream(first, script), Stream(first + 1, script)]),
    ),
    "vector": (2, lambda first, script: lambda: vector(first, script)),
}


def makers(workers: int, script: Script = SCRIPT, kind: str = "single") -> list[Any]:
    """Return a maker for each worker; the streams of worker w begin at ``100 * w``."""
    return [ENVS[kind][1](100 * worker, script) for worker in range(workers)]


def shares(batch: TensorDictBase, workers: int, cat: Any) -> dict[int, TensorDictBase]:
    """Return each worker's part of a batch, after checking that the parts are in worker order."""
    if cat == "stack":
        assert batch.shape[0] == workers
        return dict(enumerate(batch.unbind(0)))
    owners = (batch["observation"][..., 0].long() // 100).reshape(batch.shape)
    if cat == WHOLE:
        (owner,) = owners.unique().tolist()
        return {owner: batch}
    dim = 0 if cat == 0 else -1
    lines = owners.movedim(dim, -1).reshape(-1, batch.shape[dim])
    assert (lines == lines[0]).all()
    present, counts = lines[0].unique_consecutive(return_counts=True)
    assert present.tolist() == sorted(present.tolist()), "in worker order"
    return dict(zip(present.tolist(), batch.split(counts.tolist(), dim), strict=True))


def check_workers(
    batches: Sequence[TensorDictBase], workers: int, cat: Any, script: Script = SCRIPT, **kwargs: Any
) -> None:
    """Check every worker's rows against the oracle, and that each id names one episode only.

    Ids are ``local id * workers + worker``.
    """
    names: dict[int, tuple[int, int]] = {}
    found: dict[int, list[TensorDictBase]] = {}
    for batch in batches:
        for owner, share in shares(batch, workers, cat).items():
            found.setdefault(owner, []).append(share)
    for owner, pieces in found.items():
        check_stream(pieces, script, **kwargs)
        for row in (row for piece in pieces for row in rows_of(piece)):
            ids = row[IDS]
            assert (ids % workers == owner).all(), (owner, ids)
            assert (row["observation"][..., 0] // 100 == owner).all()
            for name, place in zip(ids.tolist(), row["observation"].long().tolist(), strict=True):
                assert names.setdefault(name, tuple(place[:2])) == tuple(place[:2]), name


def frames(batches: Sequence[TensorDictBase]) -> int:
    """Return the number of real frames in the batches."""
    return sum(map(valid_rows, batches))


def take(collector: Any, count: int) -> list[TensorDictBase]:
    """Return the next batches."""
    found = [collector.next() for _ in range(count)]
    assert all(batch is not None for batch in found)
    return found


def settled(collector: Any, kind: str) -> None:
    """Take the batches that were collected ahead: at most two of each of the two workers, in any order."""
    taken = [0, 0]
    while kind == "async" and min(taken) < 2:
        taken[int(collector.next()["collector", "traj_ids"].reshape(-1)[0]) % 2] += 1


def done_with(collector: Any) -> None:
    """Shut a collector down and check its ledger."""
    collector.shutdown()
    check_ledger(collector)


class Gate:
    """A named pipe at which steps of workers wait until the test opens it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # A descriptor for both directions never blocks at open and always has a peer.
        self._end = os.open(path, os.O_RDWR)

    def open(self, passes: int = 1) -> None:
        """Let `passes` waiting steps pass."""
        os.write(self._end, b"." * passes)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._end)


@contextmanager
def gate(folder: Path, name: str = "gate") -> Iterator[Gate]:
    """Yield a gate and close it afterwards."""
    made = Gate(folder / name)
    try:
        yield made
    finally:
        made.close()


class WaitingEnv(CountingEnv):
    """Waits at a gate before each step, beginning with step number `at` (from 1)."""

    def __init__(self, path: str, at: int, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(path=path, at=at, end=None)
        super().__init__(*args, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if len(self.actions) + 1 >= self.at:
            if self.end is None:
                self.end = os.open(self.path, os.O_RDONLY)
            os.read(self.end, 1)
        return super()._step(tensordict)


class Waiting:
    """A picklable maker of environments that wait."""

    def __init__(self, gate: Gate, at: int, first: int, script: Script = NEVER) -> None:
        self.path, self.at, self.first, self.script = gate.path, at, first, script

    def __call__(self) -> CountingEnv:
        """Make the environment."""
        env = WaitingEnv(self.path, self.at, self.script)
        env._streams += self.first
        return env


def storages(data: TensorDictBase) -> list[torch.UntypedStorage]:
    """Return the memory of every leaf."""
    return [data[key].untyped_storage() for key in data.keys(True, True)]
