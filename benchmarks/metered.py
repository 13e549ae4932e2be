"""Runs a program and says how long it took, and how long it was in collectors and replay buffers.

`python -m benchmarks.metered WAY PROGRAM ARGUMENTS`, where WAY is "torchrl" or "takeover", in an interpreter with
torchrl. The last line on stdout is JSON: `whole`, `data` and, within `data`, `networks`, in seconds of
`benchmarks.clock`, imports left out. The calls that a program makes are wrapped, the same on either side; what one of
them calls of the others isn't counted twice.

`data` is the time in the constructor and the iteration of the collector, and in the constructor, extend, add, sample,
priority updates and iteration of buffers: all of it, policies and environments included. What programs reach past these
calls isn't in it (`rb[:]`, `len`, updates of weights that loss modules make).

`networks` is the part of it that the policy's own modules take, which is the program's on either side: networks, on
tensors, and the modules that work on TensorDicts (distributions, choices of values, exploration). What carries values
between these, tensordict's TensorDictModule and sequences with their subclasses, isn't counted as the program's:
whoever calls a policy decides how its modules are driven. Nor are environments, those that a program defines included:
their steps are in `data` less `networks` on both sides. A count costs about a microsecond, which is in there, too.
"""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule

from benchmarks.clock import now

BUFFERS = ("ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
CALLS = ("__init__", "extend", "add", "sample", "update_priority", "update_tensordict_priority", "empty")


class Meter:
    """Seconds within wrapped calls, and within a policy's own modules that these call."""

    def __init__(self) -> None:
        self.seconds, self.networks = 0.0, 0.0
        self._inside = self._in_network = False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the call with its time counted, unless it's made by another one."""

        @functools.wraps(call)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, start = True, now()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside, self.seconds = False, self.seconds + now() - start

        return metered

    def network(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the call of all modules, with the time of a policy's own counted; transforms are none."""

        @functools.wraps(call)
        def metered(module: Any, *args: Any, **kwargs: Any) -> Any:
            counted = self._inside and not self._in_network
            if not counted or isinstance(module, TensorDictModule) or ".envs." in type(module).__module__:
                return call(module, *args, **kwargs)
            self._in_network, start = True, now()
            try:
                return call(module, *args, **kwargs)
            finally:
                self._in_network, self.networks = False, self.networks + now() - start

        return metered

    def items(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Returns what makes an iterator, with the time of its items counted."""

        @functools.wraps(iterate)
        def metered(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items, end = iter(iterate(*args, **kwargs)), object()
            advance = self.around(lambda: next(items, end))
            while (item := advance()) is not end:
                yield item

        return metered


def main() -> None:
    """Does what the command line says."""
    way, program, *arguments = sys.argv[1:]
    if way == "takeover":
        importlib.import_module("gleanrl.takeover")
    # With this module importing them, these are gleanrl's under takeover, as they are for the program.
    collectors, data = (importlib.import_module(f"torchrl.{name}") for name in ("collectors", "data"))
    for name in ("envs", "modules", "objectives"):
        importlib.import_module(f"torchrl.{name}")
    meter = Meter()
    for cls in (collectors.Collector, *(getattr(data, name) for name in BUFFERS)):
        for name in CALLS:
            if name in vars(cls):
                setattr(cls, name, meter.around(vars(cls)[name]))
    for cls in (collectors.Collector, data.ReplayBuffer):
        cls.__iter__ = meter.items(cls.__iter__)
    torch.nn.Module.__call__ = meter.network(torch.nn.Module.__call__)  # type: ignore[method-assign]
    sys.argv[:] = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    start = now()
    runpy.run_path(program, run_name="__main__")
    print(json.dumps({"whole": now() - start, "data": meter.seconds, "networks": meter.networks}))


if __name__ == "__main__":
    main()
