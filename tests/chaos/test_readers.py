"""A load finds a complete checkpoint while another process dumps into the same folder."""

from __future__ import annotations

import itertools
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gleanrl import Checkpoint
from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)
from tests.chaos.drills import scaled

LOADS, ROWS = 1_000, 200
KINDS = ("plain", "flat", "nested", "h5", "background", "storage", "file", "checkpoint")
FORMS: dict[str, type[Any]] = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "file": H5StorageCheckpointer,
}


def made(kind: str) -> ReplayBuffer:
    form = FORMS.get(kind, TensorStorageCheckpointer)()
    return ReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=4, checkpointer=form)


def saving_and_loading(
    kind: str, path: str, buffer: ReplayBuffer
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the functions that save and load one kind of checkpoint."""
    if kind in ("storage", "file"):
        form, place = buffer.storage.checkpointer, f"{path}/records.h5" if kind == "file" else path
        return lambda: form.dumps(buffer.storage, place), lambda: form.loads(buffer.storage, place)
    if kind == "checkpoint":
        whole = Checkpoint(buffer=buffer, model=torch.nn.Linear(3, 3))
        return lambda: whole.save(path), lambda: whole.load(path)
    return lambda: buffer.dumps(path, wait=kind != "background"), lambda: buffer.loads(path)


def main(path: str) -> None:
    """Dump numbers in order, for each kind of checkpoint until a line arrives on stdin."""
    for kind in KINDS:
        save, _ = saving_and_loading(kind, f"{path}/{kind}", buffer := made(kind))
        for number in itertools.count(1):
            if number == 1 or number % 8 == 0:  # other dumps link to the files of the dump before
                buffer.extend(torch.full((ROWS,), number))
            else:
                buffer.extend(torch.tensor([number]))
            save()
            if number == 2:  # then the first one is complete, even in the background
                print(kind, flush=True)
            if number > 2 and select.select([sys.stdin], [], [], 0)[0]:
                sys.stdin.readline()
                break


@pytest.mark.timeout(1800)
def test_loads_during_dumps_of_another_process_find_a_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.test_readers", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        try:
            for kind in KINDS:
                assert writer.stdout.readline().split() == [kind.encode()]
                begin, numbers = time.monotonic(), loaded(kind, f"{tmp_path}/{kind}")
                writer.stdin.write(b"\n")
                print(f"{kind}: {len(numbers)} of {max(numbers)} dumps in {time.monotonic() - begin:.0f} s")
            assert writer.wait() == 0
        finally:
            writer.kill()


def loaded(kind: str, path: str) -> set[int]:
    """Load many times; return the numbers of the dumps found. Each must be whole and no older than the one before."""
    _, load = saving_and_loading(kind, path, buffer := made(kind))
    newest, numbers = 0, set[int]()
    for _ in range(scaled(LOADS)):
        load()  # a warning would be an error
        found = buffer[:]
        assert len(found) == ROWS and newest <= int(found.max())
        newest = int(found.max())
        last = newest - newest % 8 if newest >= 8 else 1
        assert found.unique().tolist() == list(range(last, newest + 1)), "rows of several dumps"
        numbers.add(newest)
    return numbers


if __name__ == "__main__":
    main(*sys.argv[1:])
