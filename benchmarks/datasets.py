"""Data sets: times and memory of conversions, samples of records in mapped files, and looks at stored records.

A conversion is compared with reading the same arrays by h5py or pyarrow, and one copy of each into new memory. The
conversion also writes every observation a second time, as a next observation. Files are read from the system's cache.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.checkpoint import folder, seconds
from benchmarks.clock import now
from benchmarks.harness import Gauge
from benchmarks.memory import in_fresh_process, resident
from gleanrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    from_arrays,
    from_hdf5,
    from_minari,
    from_parquet,
)
from gleanrl.data.datasets.show import show

ROWS, LENGTH = 500_000, 1_000
HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
FORMATS = ("d4rl", "gzip", "minari", *(("parquet",) if HAS_ARROW else ()))
DRAWS, SAMPLES = 15, 200
LOOKED = 10_000_000


def arrays(rows: int = ROWS) -> dict[str, np.ndarray]:
    """Return arrays in D4RL's layout, with the sizes of HalfCheetah."""
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(rows, 17)).astype(np.float32),
        "actions": rng.normal(size=(rows, 6)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": np.zeros(rows, bool),
        "timeouts": np.arange(rows) % LENGTH == LENGTH - 1,
    }


def write_d4rl(path: Path, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays().items():
            file.create_dataset(name, data=array, **options)


def write_minari(path: Path) -> None:
    (path / "data").mkdir(parents=True)
    found = arrays()
    with h5py.File(path / "data/main_data.hdf5", "w") as file:
        for number in range(ROWS // LENGTH):
            group, rows = (
                file.create_group(f"episode_{number}"),
                slice(number * LENGTH, (number + 1) * LENGTH),
            )
            group.attrs["total_steps"] = LENGTH
            group["observations"] = np.concatenate([found["observations"][rows], found["observations"][:1]])
            group["actions"], group["rewards"] = found["actions"][rows], found["rewards"][rows]
            group["terminations"], group["truncations"] = found["terminals"][rows], found["timeouts"][rows]
    (path / "data/metadata.json").write_text(json.dumps({"total_episodes": ROWS // LENGTH}))


def write_parquet(path: Path) -> None:
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    found = arrays()
    lists = {
        name: arrow.FixedSizeListArray.from_arrays(arrow.array(found[name].reshape(-1)), found[name].shape[1])
        for name in ("observations", "actions")
    }
    columns = {
        "observation": lists["observations"],
        "action": lists["actions"],
        "next.reward": found["rewards"],
        "next.truncated": found["timeouts"],
        "episode": np.arange(ROWS) // LENGTH,
    }
    parquet.write_table(arrow.table(columns), path, row_group_size=ROWS // 5)


def read_hdf5(path: Path) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    with h5py.File(path) as file:
        file.visititems(
            lambda _, entry: found.append(entry[()].copy()) if isinstance(entry, h5py.Dataset) else None
        )
    return found


def read_parquet(path: Path) -> list[np.ndarray]:
    table = importlib.import_module("pyarrow.parquet").read_table(path)
    flat = [column.combine_chunks() for column in table.columns]
    return [
        (column.flatten() if hasattr(column, "flatten") and column.type.num_fields else column)
        .to_numpy(zero_copy_only=False)
        .copy()
        for column in flat
    ]


def prepared(kind: str, place: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Write a file, and return two calls: one reads its arrays and copies each once, one converts it."""
    path = (place / kind).resolve()
    if kind == "minari":
        write_minari(path)
        return lambda: read_hdf5(path / "data/main_data.hdf5"), lambda: from_minari(path)
    if kind == "parquet":
        write_parquet(path)
        return lambda: read_parquet(path), lambda: from_parquet(path, episode="episode")
    write_d4rl(path, **({"compression": "gzip"} if kind == "gzip" else {}))
    return lambda: read_hdf5(path), lambda: from_hdf5(path)


def converted(kind: str) -> float:
    """Return the time of a conversion, as a multiple of reading the same file and copying its arrays once."""
    with folder() as place:
        read, convert = prepared(kind, place)
        times = seconds(read=read, convert=convert)
    return times["convert"] / times["read"]


def mapped() -> float:
    """Return the time of samples of 256 rows in mapped files that are cached, as a multiple of samples in memory."""
    buffers = [from_arrays(renamed(arrays()), memmap_above=above, batch_size=256) for above in (0, None)]
    ratios = []
    for turn in range(DRAWS + 1):
        taken = []
        for buffer in buffers if turn % 2 else reversed(buffers):
            start = now()
            for _ in range(SAMPLES):
                buffer.sample()
            taken.append(now() - start)
        if turn:
            ratios.append(taken[0] / taken[1] if turn % 2 else taken[1] / taken[0])
    return statistics.median(ratios)


def renamed(found: dict[str, np.ndarray]) -> dict[Any, np.ndarray]:
    return {
        "observation": found["observations"],
        "action": found["actions"],
        "reward": found["rewards"],
        "truncated": found["timeouts"],
    }


def looked(html: bool) -> tuple[float, float]:
    """Return the time of a look at a checkpoint of ten million rows, in seconds, and the size of its page in MB."""
    t = torch.arange(LOOKED)
    ended = (t % 500 == 499)[:, None]
    observed = torch.randn(LOOKED + 1, 4)
    following = {"observation": observed[1:].clone(), "reward": torch.rand(LOOKED, 1)}
    flags = {"terminated": ended, "truncated": torch.zeros_like(ended), "done": ended}
    data = {"observation": observed[:-1], "action": t % 2, "next": {**following, **flags}}
    with folder() as place:
        buffer = ReplayBuffer(storage=LazyTensorStorage(LOOKED))
        buffer.extend(TensorDict(data, [LOOKED]))
        buffer.dumps(place / "saved")
        del buffer, data, following, observed
        page = place / "page.html" if html else None
        start = now()
        show(place / "saved", html=page)
        return now() - start, page.stat().st_size / 1e6 if page else 0.0


def beyond_target(kind: str) -> float:
    """Convert a file in this process, and return its peak memory beyond the records, in MB."""
    most, done = 0, threading.Event()
    with folder() as place:
        _, convert = prepared(kind, place)
        before = resident()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.001):
                most = max(most, resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        buffer = convert()
        done.set()
        watcher.join()
        size = sum(column.nbytes for column in buffer[:].values(True, True))
    return max(0.0, most - before - size) / 1e6


GAUGES = (
    *(
        Gauge(
            f"datasets/{kind}",
            f"time to convert a {kind} file of {ROWS} rows, over reading its arrays and one copy",
            "x",
            functools.partial(converted, kind),
            1.5,
        )
        for kind in FORMATS
    ),
    Gauge("datasets/mapped", "time of a sample from mapped files, over one from memory", "x", mapped, 1.2),
    Gauge("datasets/summary", "summary of ten million rows", "s", lambda: looked(False)[0], 2.0),
    Gauge("datasets/page", "summary and page of ten million rows", "s", lambda: looked(True)[0], 10.0),
    Gauge("datasets/page-size", "page of ten million rows", "MB", lambda: looked(True)[1], 30.0),
    *(
        Gauge(
            f"datasets/{kind}-memory",
            f"peak memory of a conversion of a {kind} file beyond the records",
            "MB",
            functools.partial(in_fresh_process, kind, "benchmarks.datasets"),
            200.0,
        )
        for kind in FORMATS
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(beyond_target(sys.argv[1])))
