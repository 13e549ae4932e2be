"""Waits for the device are counted and attributed to lines of the library."""

from __future__ import annotations

import warnings
from collections import Counter

from benchmarks import device_waits
from gleanrl.data import LazyTensorStorage, ReplayBuffer


def test_the_librarys_innermost_line_is_named() -> None:
    class Waits(LazyTensorStorage):
        def fetch(self, *given: object, **options: object) -> object:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            return super().fetch(*given, **options)

    buffer = ReplayBuffer(storage=Waits(4), batch_size=2)
    buffer.extend([1.0, 2.0])
    lines = Counter[str]()
    with device_waits.named(lines):
        buffer.sample()
        buffer.sample()
    ((line, count),) = lines.items()
    assert (
        count == 2
        and line.startswith("src/gleanrl/data/replay_buffers/prefetch.py:")
        and line.endswith(" fetch")
    )


def test_other_warnings_are_not_counted() -> None:
    lines = Counter[str]()
    with device_waits.named(lines):
        warnings.warn("something else", stacklevel=1)
    assert not lines


def test_every_listed_call_runs() -> None:
    names = []
    for name, call in device_waits.calls():
        assert device_waits.waits(call) == {} or device_waits.DEVICE == "cuda"
        names.append(name)
    assert len(set(names)) == len(names)
