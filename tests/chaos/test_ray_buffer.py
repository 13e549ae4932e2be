"""If writers of a buffer in an actor are killed, no record is torn or repeated, and no confirmed record is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import LazyTensorStorage, RayReplayBuffer
from tests.chaos.drills import scaled

pytestmark = pytest.mark.timeout(1800)

KILLS, SAMPLES, AT_ONCE = 20, 100, 4
WIDTH = 500


def write(buffer: Any, writer: int, path: Path) -> None:
    """Store records until the process is killed, and log the number of confirmed records."""
    confirmed = 0
    while True:
        count = 1 + (confirmed * 31 + writer) % 60
        sequence = torch.arange(confirmed, confirmed + count)
        image = (sequence * 7 + writer)[:, None].expand(-1, WIDTH).to(torch.uint8)
        names = torch.full((count,), writer)
        buffer.extend(TensorDict({"writer": names, "sequence": sequence, "image": image}, [count]))
        confirmed += count
        with path.open("a") as file:
            file.write(f"{confirmed}\n")


def check_rows(rows: TensorDict) -> None:
    expected = (rows["sequence"] * 7 + rows["writer"])[:, None].to(torch.uint8)
    assert (rows["image"] == expected).all(), "a row is of two records"


def test_writers_are_killed(ray_session, tmp_path):
    kills, generator = scaled(KILLS), torch.Generator().manual_seed(0)
    task = ray_session.remote(num_cpus=0, max_retries=0)(write)
    buffer = RayReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=64, prefetch=2)
    started: list[Any] = []

    def start() -> Any:
        writer = len(started)
        started.append(tmp_path / str(writer))
        return task.remote(buffer, writer, started[-1])

    running = [start() for _ in range(min(kills, AT_ONCE))]
    for _ in range(kills):
        place = int(torch.randint(len(running), (), generator=generator))
        while not len(buffer):
            pass  # the first writer is starting
        for _ in range(int(torch.randint(SAMPLES, (), generator=generator))):
            check_rows(buffer.sample())
        ray_session.cancel(running[place], force=True)
        running[place] = start() if len(started) < kills else running[place]
    for ref in running:
        ray_session.cancel(ref, force=True)
    with pytest.raises(ray_session.exceptions.RayError):
        ray_session.get(running)
    check_rows(rows := buffer[:])
    written = 0
    for writer, path in enumerate(started):
        own = rows["sequence"][rows["writer"] == writer]
        confirmed = int(path.read_text().split()[-1]) if path.exists() else 0
        assert torch.equal(own, torch.arange(len(own))) and len(own) >= confirmed
        written += len(own)
    assert written == len(buffer) == buffer.stats().rows_written
    assert buffer.verify().ok
    print(f"{kills} kills, {written} records")
    buffer.shutdown()
