"""Run a program and print its time in collectors and replay buffers, or the time of the parts that these call.

The command is `python -m benchmarks.metered WAY WHAT PROGRAM ARGUMENTS`, in an interpreter with torchrl. WAY is
"torchrl", "takeover" or, for the programs in `by_hand`, "by-hand". The last line on stdout is JSON, in seconds of
`benchmarks.clock`. Imports are not counted. On every side the same wrappers time the program's calls.

The argument WHAT selects "data" or "parts". Each needs a separate run, since timing the calls of networks costs time
itself. A step makes ten such calls, and timing them would add a tenth to the time of collectors and buffers. It costs
more after an update, which has emptied the caches. No loop could measure that cost, so it cannot be subtracted.

With "data" the JSON holds:

- `whole`: the time of the program.
- `data`: the time in collectors (constructor, iteration) and in buffers (constructor, extend, add, sample, priority
  updates, empty, iteration). It includes policies and environments. A call within another one is counted once. Other
  uses are not counted: `rb[:]`, `len`, updates of weights that loss modules make. With processor time, `data` includes
  all work of other threads. These threads prefetch for buffers. Their work delays the program even between two calls,
  since the interpreter runs one thread at a time. Elapsed time cannot separate it from the program's own work.
- `threads`: the processor time of other threads, which is part of `data`.

With "parts" the JSON holds the program's own share of that time, without the time of reading the clock:

- `networks`: the policy's modules. These are networks and distributions, which work on tensors, and modules that work
  on TensorDicts (choice of actions, exploration). Modules that only carry values between these are not counted:
  tensordict's TensorDictModule, ProbabilisticTensorDictModule and sequences, with their subclasses. The library that
  calls a policy may replace their work.
- `environments`: steps and resets of simulators made for gymnasium, without gymnasium's wrappers, and `_step` and
  `_reset` of environments that the program defines.
"""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
from torch.distributions import Distribution

from benchmarks import by_hand
from benchmarks.clock import CLOCK, in_thread, now

BUFFERS = ("ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
DRIVERS = (TensorDictModule, ProbabilisticTensorDictModule)
DRAWS = ("__init__", "sample", "rsample", "log_prob", "sample_and_log_prob", "rsample_and_log_prob")
READINGS = 1_000
CALLS = ("__init__", "extend", "add", "sample", "update_priority", "update_tensordict_priority", "empty")


class Meter:
    """Seconds within wrapped calls, and within the program's own parts that these calls use."""

    def __init__(self) -> None:
        self.seconds, self.own = 0.0, {"networks": 0.0, "environments": 0.0}
        self._inside = self._in_own = False
        self._reading = min(-in_thread() + in_thread() for _ in range(READINGS))

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with its time counted, unless another counted call makes it."""

        @functools.wraps(call)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, start = True, in_thread()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside, self.seconds = False, self.seconds + in_thread() - start

        return metered

    def program(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method with its time counted as the program's own, except on drivers and transforms."""

        @functools.wraps(call)
        def metered(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                not self._inside
                or self._in_own
                or isinstance(owner, DRIVERS)
                or ".envs.transforms." in type(owner).__module__
            ):
                return call(owner, *args, **kwargs)
            self._in_own, start = True, in_thread()
            try:
                return call(owner, *args, **kwargs)
            finally:
                self._in_own = False
                self.own[part] += in_thread() - start - self._reading

        return metered

    def methods(self, part: str, classes: Iterable[type], names: Iterable[str]) -> None:
        """Count the methods with these names that the classes define as the program's own."""
        for cls in classes:
            for name in set(names) & set(vars(cls)):
                setattr(cls, name, self.program(part, vars(cls)[name]))

    def items(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return a function that makes the same iterator, with the time of each item counted."""

        @functools.wraps(iterate)
        def metered(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items, end = iter(iterate(*args, **kwargs)), object()
            advance = self.around(lambda: next(items, end))
            while (item := advance()) is not end:
                yield item

        return metered


def derived(cls: type) -> Iterator[type]:
    """Yield all classes that derive from a class."""
    for below in cls.__subclasses__():
        yield below
        yield from derived(below)


def take_apart(meter: Meter, collector: Any, env: type) -> None:
    """Count the program's own parts.

    The classes of its environments are looked up when it makes a collector, since they exist only then.
    """
    meter.methods("networks", [torch.nn.Module], ["__call__"])
    meter.methods("networks", {*derived(Distribution)}, DRAWS)
    make = collector.__init__

    def make_after_environments(*args: Any, **kwargs: Any) -> None:
        simulators = {cls for cls in derived(gym.Env) if not issubclass(cls, gym.Wrapper)}
        meter.methods("environments", simulators, ["step", "reset"])
        own = {cls for cls in derived(env) if cls.__module__ == "__main__"}
        meter.methods("environments", own, ["_step", "_reset"])
        make(*args, **kwargs)

    collector.__init__ = make_after_environments


def main() -> None:
    """Run the program that the command line names, and print its times."""
    way, what, program, *arguments = sys.argv[1:]
    if way == "takeover":
        importlib.import_module("gleanrl.takeover")
    # Under takeover these imports give gleanrl's modules, as the same imports do in the program.
    collectors, data, envs = (
        importlib.import_module(f"torchrl.{name}") for name in ("collectors", "data", "envs")
    )
    for name in ("modules", "objectives"):  # imported before the clock starts
        importlib.import_module(f"torchrl.{name}")
    if way == "by-hand":
        collectors.Collector, buffers = by_hand.LOOPS[Path(program).stem]
        vars(data).update(buffers)
    meter = Meter()
    for cls in (collectors.Collector, *(getattr(data, name) for name in BUFFERS)):
        for name in CALLS:
            if name in vars(cls):
                setattr(cls, name, meter.around(vars(cls)[name]))
    for cls in (collectors.Collector, data.ReplayBuffer):
        if hasattr(cls, "__iter__"):
            cls.__iter__ = meter.items(cls.__iter__)
    if what == "parts":
        take_apart(meter, collectors.Collector, envs.EnvBase)
    sys.argv[:] = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    start, start_here = now(), in_thread()
    runpy.run_path(program, run_name="__main__")
    whole, here = now() - start, in_thread() - start_here
    others = whole - here if CLOCK == "cpu" else 0.0
    found = {"whole": whole, "data": meter.seconds + others, "threads": others}
    print(json.dumps(meter.own if what == "parts" else found))


if __name__ == "__main__":
    main()
