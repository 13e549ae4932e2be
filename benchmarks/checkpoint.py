"""Checkpoints: times of dumps and loads, sizes, memory, and pauses of threads that use the buffer meanwhile.

Times are compared with one sequential NumPy file of the same bytes. All files are written below the current folder, so
its disk is measured. The calls to compare alternate, and a ratio is one of two medians.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import bare
from benchmarks.clock import now
from benchmarks.harness import Case, Gauge, Target
from benchmarks.memory import in_fresh_process, resident
from benchmarks.workload import following_rows, loading, out_folder
from gleanrl.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)

KINDS = {"cartpole": 1_000_000, "image": 20_000}
CHANGED = {"cartpole": 1_000_000, "humanoid": 200_000}
BESIDE = {"cartpole": 1_000_000, "image": 4_000}
FORMS = {"flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer}
ROUNDS, CHUNK = 5, 10_000
PAUSE_ROUNDS = 9
PEER_H5_SAVES, PEER_H5_LOADS = 7.04, 2.65
"""MB/s that TorchRL's H5StorageCheckpointer reached on CartPole-like rows."""
Call = Callable[[], object]


def filled(kind: str, count: int, capacity: int | None = None) -> ReplayBuffer:
    """Return a buffer that holds `count` rows; its capacity is `count` unless given."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity or count), batch_size=256)
    chunk = CHUNK if kind == "cartpole" else 1_000
    data = following_rows(kind, chunk)
    for _ in range(count // chunk):
        buffer.extend(data)
    return buffer


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder within `out`, and delete it afterwards."""
    with out_folder() as name:
        yield Path(name)


def seconds(**calls: Call) -> dict[str, float]:
    """Return the median time of each call in seconds; the calls alternate, in an order reversed each round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name in calls if turn % 2 else reversed(calls):
            start = now()
            calls[name]()
            if turn:  # the first round warms up
                taken[name].append(now() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    print("  " + ", ".join(f"{name} {1e3 * time:.1f} ms" for name, time in medians.items()), flush=True)
    return medians


def bytes_in(path: Path) -> int:
    """Return the size of the newest checkpoint in a folder, in bytes."""
    return sum(file.stat().st_size for file in max(path.glob("ckpt-*")).iterdir())


def bytes_of(storage: LazyTensorStorage) -> int:
    """Return the bytes of a storage's columns."""
    return sum(storage.column(path).nbytes for path in storage.format.schema.paths)


def sequential(buffer: ReplayBuffer, place: Path) -> tuple[Call, Call]:
    """Return two calls: one writes a checkpoint's bytes into one file and syncs it, one reads them into new memory.

    The bytes are the columns and the generations. The second call reads them into one array. If it read one column at
    a time and dropped it, the next column would reuse that memory without page faults. A program that keeps its columns
    has no such advantage.
    """
    storage = buffer.storage
    columns = [storage.column(path).numpy() for path in storage.format.schema.paths]
    columns.append(storage.generation(torch.arange(len(storage))).numpy())

    def write() -> None:
        place.unlink(missing_ok=True)
        with place.open("wb") as file:
            for column in columns:
                column.tofile(file)
            file.flush()
            os.fsync(file.fileno())

    return write, lambda: np.fromfile(place, np.uint8)


@functools.cache
def whole(kind: str) -> dict[str, float]:
    """Return the times of complete dumps and loads, as multiples of the sequential file's times."""
    buffer = filled(kind, KINDS[kind])
    with folder() as place:
        write, read = sequential(buffer, place / "one.bin")
        buffer.dumps(place / "kept")
        write()
        times = seconds(file=write, dump=lambda: _dump_anew(buffer, place / "new"))
        loads = seconds(file=read, load=lambda: _loaded(kind, place / "kept"))
    return {"dump": times["dump"] / times["file"], "load": loads["load"] / loads["file"]}


def _dump_anew(buffer: ReplayBuffer, place: Path) -> None:
    """Delete the earlier dump at `place`, then dump completely; the sequential file is replaced in the same way.

    The deleted files leave blocks and pages that the system has already touched. Untouched ones can take it several
    times as long to write.
    """
    shutil.rmtree(place, ignore_errors=True)
    buffer.dumps(place)


def _loaded(kind: str, place: Path) -> None:
    ReplayBuffer(storage=LazyTensorStorage(KINDS[kind]), batch_size=256).loads(place)


@functools.cache
def forms(kind: str) -> dict[str, dict[str, float]]:
    """Return each form's size and its times per stored byte, as multiples of the plain form's."""
    count = KINDS[kind] if kind == "cartpole" else KINDS[kind] // 4
    buffer, measured = filled(kind, count), {}
    makers = {"plain": TensorStorageCheckpointer, **FORMS}
    with folder() as place:
        for name, form in makers.items():
            buffer.storage.checkpointer = form()
            buffer.dumps(place / name)

        def dump(name: str) -> None:
            buffer.storage.checkpointer = makers[name]()
            _dump_anew(buffer, place / f"new-{name}")

        dumps = seconds(**{name: functools.partial(dump, name) for name in makers})
        loads = seconds(
            **{
                name: lambda name=name: ReplayBuffer(storage=LazyTensorStorage(count)).loads(place / name)
                for name in makers
            }
        )
        sizes = {name: bytes_in(place / name) for name in makers}
        for name in FORMS:
            size = sizes[name] / sizes["plain"]
            measured[name] = {
                "size": size,
                "dump": dumps[name] / dumps["plain"] / size,
                "load": loads[name] / loads["plain"] / size,
            }
    return measured


@functools.cache
def hdf5() -> dict[str, float]:
    """Return HDF5's ms per MB of CartPole-like rows, and the size of compressed images over the plain size."""
    count = 200_000
    buffer = filled("cartpole", count)
    size = count * sum(np.prod(f.shape) * f.dtype.itemsize for f in buffer.storage.format.schema.fields) / 1e6
    images = filled("image", 2_000)
    with folder() as place:
        form = H5StorageCheckpointer()
        form.dumps(buffer.storage, place / "kept.h5")
        other = LazyTensorStorage(count)
        times = seconds(
            dump=lambda: form.dumps(buffer.storage, place / "new.h5"),
            load=lambda: form.loads(other, place / "kept.h5"),
        )
        images.dumps(place / "plain")
        packed = H5StorageCheckpointer(h5_kwargs={"compression": "gzip", "compression_opts": 1})
        packed.dumps(images.storage, place / "images.h5")
        ratio = (place / "images.h5").stat().st_size / bytes_in(place / "plain")
    return {"dump": 1e3 * times["dump"] / size, "load": 1e3 * times["load"] / size, "size": ratio}


@functools.cache
def changed(kind: str) -> dict[str, float]:
    """Change 1% of the rows between dumps; return the bytes and the time of a dump as percentages of a complete dump.

    The function also prints the time that the disk alone needs to write and sync the same bytes. No partial dump can
    be faster.
    """
    count = CHANGED[kind]
    buffer, one = filled(kind, count), following_rows(kind, count // 100)
    buffer.extend(one[: count // 200])  # from here on, no write begins at a multiple of 1%
    with folder() as place:
        path, alone = place / "kept", place / "alone"
        alone.mkdir()
        buffer.dumps(path)
        written = [0]
        times: dict[str, list[float]] = {}
        calls = {
            "part": lambda: buffer.dumps(path, keep=2),
            "disk alone": lambda: bare.commit(alone, written[-1]),
            "all": lambda: buffer.dumps(place / "new"),
        }
        for _ in range(2 * ROUNDS):
            buffer.extend(one)
            for name, call in calls.items():
                start = now()
                call()
                times.setdefault(name, []).append(now() - start)
                if name == "part":
                    files = [file.stat() for file in max(path.glob("ckpt-*")).iterdir()]
                    written.append(sum(file.st_size for file in files if file.st_nlink == 1))
            shutil.rmtree(place / "new")
            os.sync()  # finishes the writes of the deletion, so that they don't slow the next round
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        percents = {name: 100 * medians[name] / medians["all"] for name in medians}
        print({name: [round(1e3 * t, 1) for t in taken] for name, taken in times.items()}, flush=True)
        print({name: f"{percent:.1f}% of a complete dump" for name, percent in percents.items()}, flush=True)
        return {"bytes": 100 * max(written) / bytes_in(path), "time": percents["part"]}


def filled_part() -> float:
    """Return the size of a dump of 10,000 rows in a buffer of a million, as a multiple of the rows' bytes."""
    buffer = filled("cartpole", 10_000, KINDS["cartpole"])
    width = 8 + sum(np.prod(f.shape) * f.dtype.itemsize for f in buffer.storage.format.schema.fields)
    with folder() as place:
        buffer.dumps(place)
        return float(bytes_in(place) / (10_000 * width))


def peak(what: str) -> float:
    """Return by how many MB memory grows while a buffer of 0.5 GB is dumped, or loaded into a new one.

    The columns of the new buffer are not counted.

    Args:
        what: "load", or "dump", both in the plain form; else the name of the form to dump.
    """
    buffer, most, done = filled("image", KINDS["image"] // 2), 0, threading.Event()
    with folder() as place:
        forms = {**FORMS, "h5": H5StorageCheckpointer}
        buffer.storage.checkpointer = forms.get(what, TensorStorageCheckpointer)()
        call: Call = functools.partial(buffer.dumps, place)
        needed = 0
        if what == "load":
            buffer.dumps(place)
            needed = bytes_of(buffer.storage)
            call = functools.partial(ReplayBuffer(storage=LazyTensorStorage(len(buffer))).loads, place)
        beyond = resident() + needed

        def watch() -> None:
            nonlocal most
            while not done.wait(0.002):
                most = max(most, resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        call()
        done.set()
        watcher.join()
    return max(0.0, (most - beyond) / 1e6)


@functools.cache
def background() -> dict[str, float]:
    """Extend and sample a buffer of 1 GB in two threads, with and without a background dump, and compare both.

    No caller waits for the dump, so the dump does not hurry. The main thread wakes as often without a dump as with one.
    Even without a dump the longest pause varies by tens of ms from run to run where three threads share two processors.
    The printed lines show this. The share counts the rows of both threads, since one may gain the time that the other
    loses.

    Returns:
        "pause": the longest pause with a dump minus the longest without, in ms. "share": rows moved without a dump over
        rows moved with one.
    """
    rows = {"extend": 50, "sample": 256}
    buffer, data = filled("image", KINDS["image"]), following_rows("image", rows["extend"])

    def run(during: Callable[[], object]) -> dict[str, Any]:
        """Extend and sample in two threads during the call; return each thread's longest pause and calls per second."""
        stop, pauses = threading.Event(), {}

        def forever(name: str, call: Call) -> None:
            taken = pauses[name] = []
            while not stop.is_set():
                start = now()
                call()
                taken.append(now() - start)

        threads = [
            threading.Thread(target=forever, args=pair)
            for pair in (("extend", lambda: buffer.extend(data)), ("sample", lambda: buffer.sample()))
        ]
        start = now()
        for thread in threads:
            thread.start()
        during()
        stop.set()
        for thread in threads:
            thread.join()
        span = now() - start
        return {name: (max(taken), len(taken) / span) for name, taken in pauses.items()}

    tick = threading.Event()

    def until(done: Callable[[], bool]) -> None:
        while not done():
            tick.wait(0.1)

    def dump(path: Path) -> None:
        running = buffer.dumps(path, wait=False)
        assert running is not None
        until(running.done)

    found: dict[str, list[float]] = {"pause": [], "share": []}
    with folder() as place:
        for turn in range(PAUSE_ROUNDS):
            start = now()
            busy = run(functools.partial(dump, place / str(turn)))
            span = now() - start
            end = now() + span
            idle = run(functools.partial(until, lambda end=end: now() >= end))
            print(f"  (longest pause, calls/s) without a dump: {idle}, with a dump: {busy}", flush=True)
            found["pause"].append(1e3 * max(busy[name][0] - idle[name][0] for name in busy))
            moved = [
                sum(count * found_in[name][1] for name, count in rows.items()) for found_in in (idle, busy)
            ]
            found["share"].append(moved[0] / moved[1])
    return {name: statistics.median(series) for name, series in found.items()}


def _reading(form: str, kind: str, count: int) -> Call:
    """Return a call that reads the files of a form's checkpoint into as much memory as the loaded rows take."""
    buffer, place = filled(kind, count), out_folder()
    buffer.storage.checkpointer = FORMS[form]()
    buffer.dumps(place.name)
    work = bare.reading([*Path(place.name).glob("ckpt-*/*.bin")], 8 * count + bytes_of(buffer.storage))
    weakref.finalize(work, place.cleanup)
    return work


def _pick(measure: Callable[..., Any], *path: str) -> float:
    return float(functools.reduce(lambda found, name: found[name], path[1:], measure(path[0])))


CASES = tuple(
    Case(
        f"checkpoint/{form}-{kind}-load-{beside}",
        f"{form}: load of {count:,} {kind} rows into a new buffer",
        "call",
        {
            "gleanrl": loading(ReplayBuffer, LazyTensorStorage, FORMS[form], kind, count),
            **({"bytes alone": functools.partial(_reading, form, kind, count)} if beside == "bytes" else {}),
        },
        "gleanrl",
        targets=(Target(3.0, against="torchrl"),) if beside == "beside" else (),
        peers=("torchrl",) if beside == "beside" else (),
    )
    # Two cases, since in one case a side could reuse memory that another side has just freed, without page faults.
    for beside in ("beside", "bytes")
    for form in FORMS
    for kind, count in BESIDE.items()
)
GAUGES = (
    *(
        Gauge(
            f"checkpoint/{kind}-{what}",
            f"{what} of {count:,} {kind} rows, against one sequential file of the same bytes",
            "x the file's time",
            functools.partial(_pick, whole, kind, what),
            1 / 0.8,
        )
        for kind, count in KINDS.items()
        for what in ("dump", "load")
    ),
    *(
        Gauge(
            f"checkpoint/{form}-{kind}-{what}",
            f"{form}: {what} of {kind} rows, against the plain form",
            "x the plain bytes" if what == "size" else "x the plain time per stored byte",
            functools.partial(_pick, forms, kind, form, what),
            0.55 if what == "size" else 2.0,
        )
        for form in FORMS
        for kind in KINDS
        for what in (("size", "dump", "load") if kind == "image" else ("dump", "load"))
    ),
    Gauge(
        "checkpoint/h5-dump",
        "HDF5: dump of CartPole-like rows; the bound is a tenth of TorchRL's time",
        "ms/MB",
        functools.partial(_pick, lambda name: hdf5()[name], "dump"),
        1e2 / PEER_H5_SAVES,
    ),
    Gauge(
        "checkpoint/h5-load",
        "HDF5: load of CartPole-like rows; the bound is a tenth of TorchRL's time",
        "ms/MB",
        functools.partial(_pick, lambda name: hdf5()[name], "load"),
        1e2 / PEER_H5_LOADS,
    ),
    Gauge(
        "checkpoint/h5-size",
        "HDF5 with compression: size of image rows, against the plain form",
        "x the plain bytes",
        functools.partial(_pick, lambda name: hdf5()[name], "size"),
        0.55,
    ),
    Gauge(
        "checkpoint/filled",
        "size of a dump of 10,000 rows in a buffer of 1,000,000",
        "x the rows' bytes",
        filled_part,
        1.1,
    ),
    *(
        Gauge(
            f"checkpoint/changed-{what}" if kind == "cartpole" else f"checkpoint/changed-{kind}-{what}",
            f"{what} of a dump after 1% of {count:,} {kind} rows have changed",
            unit,
            functools.partial(_pick, changed, kind, what),
            bound,
        )
        for kind, count in CHANGED.items()
        for what, unit, bound in (
            ("bytes", "% of all bytes", 10.0),
            ("time", "% of the time of a complete dump", 35.0),
        )
    ),
    *(
        Gauge(
            f"checkpoint/{what}-memory",
            f"memory of a {what if what in ('dump', 'load') else f'{what} dump'} of 0.5 GB of images beyond the buffer",
            "MB",
            functools.partial(in_fresh_process, what, "benchmarks.checkpoint"),
            64.0,
        )
        for what in ("dump", "load", *FORMS, "h5")
    ),
    Gauge(
        "checkpoint/pause",
        "longest pause of extend and sample during a dump of 1 GB, minus the longest pause without a dump",
        "ms",
        functools.partial(_pick, lambda name: background()[name], "pause"),
        10.0,
    ),
    Gauge(
        "checkpoint/share",
        "rows extended and sampled without a dump, over the rows during a dump of 1 GB",
        "x",
        functools.partial(_pick, lambda name: background()[name], "share"),
        1 / 0.7,
    ),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(peak(sys.argv[1])))
