"""Each row that is sampled during writes is whole, was written, and is no older than allowed.

A row holds its writer's number, the count of this writer's earlier rows, and columns that follow from both. Writers
publish their progress after each write. A sample contains no row that was overwritten before the sample began.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, PrioritizedReplayBuffer, ReplayBuffer
from tests.chaos.drills import scaled
from tests.data.replay_buffers.sharing import ended, forked

pytestmark = pytest.mark.timeout(1800)

WRITERS, SAMPLERS, CAPACITY, BATCH = 4, 4, 20_000, 4096
MOST = 600
"""Most rows of a write. Together the writes cross the end of the ring at every slot."""
WIDTH = 6
FACTORS = torch.arange(1, WIDTH + 1) * 0x9E3779B97F4A7C1


def rows(writer: int, first: int, count: int) -> TensorDict:
    """Return consecutive rows of a writer."""
    number = torch.arange(first, first + count)
    key = writer + number * WRITERS
    return TensorDict({"key": key, "mix": key[:, None] * FACTORS, "next": {"key": ~key}}, [count])


def check(batch: TensorDict, written: np.ndarray) -> None:
    """Raise unless every row is whole and was stored when the sample began, or later.

    Args:
        batch: rows.
        written: least number of rows that each writer had written when the sample began.
    """
    key = batch["key"]
    assert torch.equal(batch["mix"], key[:, None] * FACTORS), "a torn row, or one that nobody wrote"
    assert torch.equal(batch["next", "key"], ~key), "a torn row, or one that nobody wrote"
    behind = torch.from_numpy(written)[key % WRITERS] - key // WRITERS
    assert int(behind.max()) <= CAPACITY, "a row that was overwritten before it was sampled"


class Board:
    """The progress of all threads or processes and a stop flag, in memory that forked processes share."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.written = np.frombuffer(memory, np.int64, WRITERS)
        self.sampled = np.frombuffer(memory, np.int64, SAMPLERS, 512)
        self.stop = np.frombuffer(memory, np.int64, 1, 1024)

    def write(self, buffer: ReplayBuffer, writer: int) -> None:
        """Write until the stop flag is set."""
        count = 1 + 131 * writer
        while not self.stop[0]:
            count = 1 + (count * 7 + 13) % MOST
            buffer.extend(rows(writer, int(self.written[writer]), count))
            self.written[writer] += count

    def sample(self, buffer: ReplayBuffer, sampler: int, wanted: int, updates: bool = False) -> None:
        """Sample `wanted` rows and check them."""
        while self.sampled[sampler] < wanted:
            written = self.written.copy()
            batch, info = buffer.sample(return_info=True)
            check(batch, written)
            if updates:
                priorities = (batch["key"] % 7 + 1).float()
                buffer.update_priority(info["index"], priorities, generation=info["generation"])
            self.sampled[sampler] += len(batch)


def test_processes_that_share_a_buffer_sample_whole_rows():
    """Processes that share a buffer sample whole rows."""
    board, wanted = Board(), scaled(9 * 10**7)
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, shared=True)
    buffer.extend(rows(0, 0, CAPACITY))
    board.written[0] = CAPACITY
    writers = [forked(lambda w=w: board.write(buffer, w)) for w in range(WRITERS)]
    samplers = [forked(lambda s=s: board.sample(buffer, s, wanted // SAMPLERS)) for s in range(SAMPLERS)]
    ends = [ended(child) for child in samplers]
    board.stop[0] = 1
    ends += [ended(child) for child in writers]
    print(f"\n{board.sampled.sum():,} rows of {board.written.sum():,} that {WRITERS} processes wrote")
    assert not any(ends) and board.sampled.sum() >= wanted
    assert buffer.stats().rows_written == board.written.sum() > CAPACITY
    assert (board.written > 0).all()
    check(buffer[:], board.written)
    buffer.storage.check_valid()


def test_threads_that_update_priorities_sample_whole_rows():
    """Threads of one process sample whole rows while some of them update priorities."""
    board, wanted = Board(), scaled(10**7)
    buffer = PrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=LazyTensorStorage(CAPACITY), batch_size=BATCH
    )
    buffer.extend(rows(0, 0, CAPACITY))
    board.written[0] = CAPACITY
    errors: list[BaseException] = []

    def noting(act: Callable[..., object], *arguments: object) -> None:
        try:
            act(buffer, *arguments)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=noting, args=(board.write, w)) for w in range(WRITERS)]
    samplers = [
        threading.Thread(target=noting, args=(board.sample, s, wanted // SAMPLERS, s % 2 == 0))
        for s in range(SAMPLERS)
    ]
    for thread in (*writers, *samplers):
        thread.start()
    for thread in samplers:
        thread.join()
    board.stop[0] = 1
    for thread in writers:
        thread.join()
    print(f"\n{board.sampled.sum():,} rows of {board.written.sum():,} that {WRITERS} threads wrote")
    assert not errors, errors[0]
    assert board.sampled.sum() >= wanted and buffer.stats().rows_written == board.written.sum()
    check(buffer[:], board.written)
    assert not buffer.verify().problems


@pytest.mark.parametrize("column", ["mix", "key"])
def test_check_detects_torn_and_overwritten_rows(column):
    batch = rows(1, 7, 5)
    check(batch, np.full(WRITERS, 12))
    batch[column][2] = rows(2, 9, 1)[column][0]
    with pytest.raises(AssertionError, match="torn"):
        check(batch, np.full(WRITERS, 12))
    with pytest.raises(AssertionError, match="overwritten"):
        check(rows(1, 7, 5), np.full(WRITERS, CAPACITY + 8))
