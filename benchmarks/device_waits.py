"""Count how often a buffer on CUDA makes its caller wait for the device: `python -m benchmarks.device_waits FILE`.

For each call the profiler counts the copies and the calls of CUDA's runtime. torch's debug mode for synchronisation
names the lines of this library that wait. Both are written to FILE as JSON. Without CUDA the calls run on the CPU,
where nothing waits.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import ROOT, machine
from benchmarks.workload import DEVICE, as_tensordict, episode_rows, settle_device
from gleanrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)

STORED, BATCH, EXTEND, CALLS = 20_000, 256, 200, 50
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(STORED, alpha=0.6, beta=0.4),
    "slices": lambda: SliceSampler(num_slices=16),
}
SOURCE = ROOT / "src"


def buffer(
    sampler: str, prefetch: int | None, device: str = DEVICE, **options: Any
) -> TensorDictReplayBuffer:
    """Return a buffer filled with episodes."""
    made = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STORED, device=device),
        sampler=SAMPLERS[sampler](),
        batch_size=BATCH,
        prefetch=prefetch,
        **options,
    )
    made.extend(as_tensordict(episode_rows(STORED)))
    return made


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls to count, each with its name in the table."""
    for sampler in SAMPLERS:
        for prefetch in (None, 2):
            made = buffer(sampler, prefetch)
            yield f"sample, {sampler}, prefetch={prefetch}", made.sample
    made = buffer("prioritized", None)
    index = torch.arange(BATCH)
    there = index.to(DEVICE)
    priority = torch.ones(BATCH, device=DEVICE)
    yield "update_priority, index on the CPU", lambda: made.update_priority(index, priority)
    yield "update_priority, index on the device", lambda: made.update_priority(there, priority)
    rows = as_tensordict(episode_rows(EXTEND))
    moved = rows.to(DEVICE)
    plain = buffer("uniform", None)
    yield "extend, from the CPU", lambda: plain.extend(rows)
    yield "extend, from the device", lambda: plain.extend(moved)
    yield "read by index on the CPU", lambda: plain[index]
    yield "read by index on the device", lambda: plain[there]
    yield "write by index on the device", lambda: plain.__setitem__(there[:EXTEND], moved)
    for prefetch in (None, 2):
        pinned = buffer("uniform", prefetch, "cpu", pin_memory=torch.cuda.is_available())
        yield (
            f"sample in pinned memory, to the device, prefetch={prefetch}",
            lambda pinned=pinned: sent(pinned),
        )


def sent(made: TensorDictReplayBuffer) -> TensorDict:
    """Return a batch on the device. Its copy may still be in progress."""
    return made.sample().to(DEVICE, non_blocking=True)


def runtime(call: Callable[[], Any]) -> dict[str, float]:
    """Return how often a call uses each function of CUDA and each kind of copy: name -> number per call."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    settle_device()
    with profile(activities=kinds) as profiler:
        for _ in range(CALLS):
            call()
    counts = Counter(
        event.name
        for event in profiler.events()
        if event.name.startswith(("cuda", "cuLaunch", "Memcpy", "Memset"))
    )
    settle_device()
    return {name: count / CALLS for name, count in sorted(counts.items())}


@contextmanager
def named(lines: Counter[str]) -> Iterator[None]:
    """Count in `lines` each wait for the device within the block, by the line that waits.

    The line is the innermost one of this library on the stack. If none is on the stack, it is the innermost line of
    this repository.
    """

    def note(message: Warning | str, *_: Any) -> None:
        # torch also warns that this debug mode is a prototype. That warning is not a wait.
        if "synchroniz" not in str(message) or "prototype" in str(message):
            return
        stack = [
            frame for frame in traceback.extract_stack()[:-1] if Path(frame.filename).is_relative_to(ROOT)
        ]
        ours = [frame for frame in stack if Path(frame.filename).is_relative_to(SOURCE)] or stack[-1:]
        lines.update(f"{Path(at.filename).relative_to(ROOT)}:{at.lineno} {at.name}" for at in ours[-1:])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def waits(call: Callable[[], Any]) -> dict[str, float]:
    """Return the lines that wait for the device during a call: "file:line function" -> number per call."""
    lines = Counter[str]()
    with named(lines):
        for _ in range(CALLS):
            call()
    settle_device()
    return {line: count / CALLS for line, count in lines.most_common()}


def main(file: Path) -> None:
    """Count all calls, write `file`, and print a Markdown table. It leaves out functions that only start kernels."""
    cases = []
    print(f"| a call ({DEVICE}) | lines that wait | CUDA |\n| --- | --- | --- |")
    for name, call in calls():
        for _ in range(5):
            call()
        found = {"call": name, "waits": waits(call), "runtime": runtime(call)}
        cases.append(found)
        asked = {what: count for what, count in found["runtime"].items() if not _starts_kernels(what)}
        print(f"| {name} | {_cell(found['waits'])} | {_cell(asked)} |")
    run = {"run": machine(), "device": DEVICE, "calls": CALLS, "cases": cases}
    file.write_text(json.dumps(run, indent=1) + "\n")


def _starts_kernels(name: str) -> bool:
    return "Launch" in name or name.startswith(
        ("cudaFunc", "cudaOccupancy", "cudaGet", "cudaPeek", "cudaStreamIs")
    )


def _cell(counts: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in counts.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
