"""Lower bounds for checkpoints: calls that only write and sync, or only read, the bytes of a checkpoint."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.clock import now
from gleanrl._os.files import sync_dir
from gleanrl._os.hugepages import zeroed

_STEP = 1 << 20  # bytes that one assignment touches


def commit(place: Path, size: int) -> None:
    """Write a folder with `size` bytes and a manifest into `place`, and delete the earlier contents of `place`.

    The order of writes is that of a dump. The files and the draft are synced before the rename, and `place` after it.
    The earlier contents are deleted last. So a crash leaves the earlier folder or the new one, never a part of one.
    """
    before, draft = [*place.iterdir()], place / "draft"
    draft.mkdir()
    for name, content in (("rows", bytes(size)), ("manifest", bytes(8192))):
        with (draft / name).open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
    sync_dir(draft)
    draft.rename(place / f"{now()}")
    sync_dir(place)
    for old in before:
        shutil.rmtree(old)


def reading(files: Sequence[Path], memory: int) -> Callable[[], int]:
    """Return a call that reads files into new memory and touches the remaining bytes, in two threads.

    The call neither decodes nor compares the bytes.

    Args:
        files: the files to read.
        memory: bytes to allocate, at least the size of all files.
    """
    ends = np.cumsum([file.stat().st_size for file in files]).tolist()
    parts = [*zip(files, [0, *ends[:-1]], ends, strict=True)]
    middle = (ends[-1] + memory) // 2

    def fill(data: memoryview, mine: Sequence[tuple[Path, int, int]], start: int, stop: int) -> None:
        for file, begin, end in mine:
            with file.open("rb", buffering=0) as opened:
                while begin < end:
                    begin += opened.readinto(data[begin:end])
        rest = np.frombuffer(data, np.uint8)
        for begin in range(start, stop, _STEP):
            rest[begin : min(begin + _STEP, stop)] = 1

    def read() -> int:
        data = memoryview(zeroed(memory))
        other = threading.Thread(target=fill, args=(data, parts[1::2], middle, memory))
        other.start()
        fill(data, parts[::2], ends[-1], middle)
        other.join()
        return 1

    return read
