"""A program that is killed while it dumps, repeatedly: `python -m tests.chaos.killing FOLDER KILLS SEED`.

A child continues from the last checkpoint: it extends, dumps, and reports, until it is killed at a random moment. Then
the program loads the checkpoint. It must be the last complete one, or the one being written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl._os import fault_points, files
from gleanrl._os.fault_points import At
from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)
from gleanrl.errors import CheckpointError, IncompleteCheckpointError

CAPACITY, ROWS = 300, 70
FORMS = (
    TensorStorageCheckpointer,
    FlatStorageCheckpointer,
    NestedStorageCheckpointer,
    lambda: H5StorageCheckpointer(h5_kwargs={"compression": "lzf"}),
)


def rows(numbers: torch.Tensor) -> TensorDict:
    """Return records that contain their number in every entry."""
    observation = numbers[:, None].expand(-1, 8).double()
    after = {"observation": observation + 1, "done": numbers[:, None] % 9 == 8, "reward": -observation}
    return TensorDict({"observation": observation, "number": numbers, "next": after}, [len(numbers)])


def buffer_of(number: int = 0) -> ReplayBuffer:
    """Return a buffer for the `number`-th dump."""
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=4, checkpointer=FORMS[number % len(FORMS)]()
    )


def loaded(folder: Path) -> tuple[int, ReplayBuffer]:
    """Return the number of dumps before the last checkpoint, and the loaded buffer with all records checked."""
    buffer = buffer_of()
    try:
        buffer.loads(folder)
    except IncompleteCheckpointError:
        return 0, buffer
    total = buffer.write_count
    slots = torch.arange(min(total, CAPACITY))
    expected = rows(slots + (total - 1 - slots) // CAPACITY * CAPACITY)
    assert total % ROWS == 0 and len(buffer) == len(slots) and (buffer[:] == expected).all(), "mixed"
    return total // ROWS, buffer


def dump_for_ever(folder: Path, said: int) -> None:
    """Extend and dump, alternately in the background; report each number once its dump is complete."""
    number, buffer = loaded(folder)

    def extend() -> None:
        nonlocal number
        buffer.extend(rows(torch.arange(number * ROWS, (number + 1) * ROWS)))
        number += 1

    while True:
        extend()
        buffer.storage.checkpointer = FORMS[number % len(FORMS)]()
        dump = buffer.dumps(folder, wait=False)
        extend()
        dump.wait()
        os.write(said, b"%d\n" % (number - 1))
        buffer.dumps(folder)
        os.write(said, b"%d\n" % number)


def killed(folder: Path, seconds: float) -> int:
    """Start a child and kill it after `seconds`; return the last number that it reported, 0 for none."""
    listen, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dump_for_ever(folder, said)
        finally:
            os._exit(1)
    os.close(said)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child failed by itself"
    with os.fdopen(listen) as heard:
        return int((heard.read().split() or ["0"])[-1])


def refused(folder: Path) -> str:
    """Dump while another process holds the folder, just before its own dump is complete; return the error."""
    (ready, reached), (wait, go_on) = os.pipe(), os.pipe()

    def pause() -> None:
        os.write(reached, b"x")
        os.read(wait, 1)

    number, buffer = loaded(folder)
    child = os.fork()
    if child == 0:
        try:
            buffer.extend(rows(torch.arange(number * ROWS, (number + 1) * ROWS)))
            with fault_points.inject({"fs.rename": At(pause)}):
                buffer.dumps(folder)
            os._exit(0)
        finally:
            os._exit(1)
    os.read(ready, 1)
    try:
        buffer.dumps(folder)
    except CheckpointError as error:
        message = str(error)
    assert f"process {child}, started" in message, message
    assert loaded(folder)[0] == number, "seen before it was complete"
    os.write(go_on, b"x")
    assert os.waitpid(child, 0)[1] == 0 and loaded(folder)[0] == number + 1
    buffer.dumps(folder)  # the folder is free again
    assert loaded(folder)[0] == number
    return message


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `kills` children; return the counts."""
    draw, last, under_way, longest = random.Random(seed), 0, 0, 0.02
    for _ in range(kills):
        before = last
        acknowledged = max(last, killed(folder, draw.uniform(0, longest)))
        last, _ = loaded(folder)
        assert acknowledged <= last <= acknowledged + 1, f"{last} is there, {acknowledged} was complete"
        under_way += last > acknowledged
        longest = (
            longest * 1.5 if last == before else max(0.02, longest * 0.9)
        )  # approaches the duration of a dump
        left = [name for name in files.names(folder) if name[:5] not in ("LOCK", "ckpt-")]
        assert len(left) <= 2, left
    return {"kills": kills, "dumps": last, "completed unheard": under_way, "refused": refused(folder)}


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
