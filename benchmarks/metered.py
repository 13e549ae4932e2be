"""Runs a program and says how long it was in collectors and replay buffers, or how long its own parts took in there.

`python -m benchmarks.metered WAY WHAT PROGRAM ARGUMENTS`, where WAY is "torchrl", "takeover" or, for the programs in
`by_hand`, "by-hand", in an interpreter with torchrl. The last line on stdout is JSON, in seconds of `benchmarks.clock`,
imports left out; the calls that a program makes are wrapped, the same on every side. WHAT is one of two, each in a run
of its own: to time the calls of networks, of which a step makes ten, would take a tenth of what collectors and buffers
do, and more after an update, which has emptied the caches, than in any loop that could measure it.

With "data" it holds `whole`, the program, and `data`, the time in the constructor and the iteration of the collector,
and in the constructor, extend, add, sample, priority updates and iteration of buffers: all of it, policies and
environments included. What one of these calls of the others isn't counted twice. What programs reach past these calls
isn't in it (`rb[:]`, `len`, updates of weights that loss modules make). With processor time, that of all other threads
belongs to it, whenever they work: they are those of buffers that fetch ahead, whose work isn't less for being done
between two calls, since the interpreter runs one thread at a time. The wall's clock can't tell it from the program's
own. `threads` is the processor time of other threads that is in `data`.

With "parts" it holds what of that time is the program's own on either side, without what reading the clock takes:

- `networks`, the policy's own modules: networks and distributions, on tensors, and the modules that work on TensorDicts
  (choices of values, exploration). What carries values between these, tensordict's TensorDictModule,
  ProbabilisticTensorDictModule and sequences with their subclasses, isn't counted: whoever calls a policy decides how
  its modules are driven.
- `environments`, the environments' own steps and resets: those of simulators made for gymnasium, its wrappers left out,
  and `_step` and `_reset` of environments that the program defines.
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
    """Seconds within wrapped calls, and within what is the program's own that these call."""

    def __init__(self) -> None:
        self.seconds, self.own = 0.0, {"networks": 0.0, "environments": 0.0}
        self._inside = self._in_own = False
        self._reading = min(-in_thread() + in_thread() for _ in range(READINGS))

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the call with its time counted, unless it's made by another one."""

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
        """Returns a method with its time counted as the program's own; drivers and transforms are none of its."""

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
        """Counts what classes define under these names as the program's own."""
        for cls in classes:
            for name in set(names) & set(vars(cls)):
                setattr(cls, name, self.program(part, vars(cls)[name]))

    def items(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Returns what makes an iterator, with the time of its items counted."""

        @functools.wraps(iterate)
        def metered(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items, end = iter(iterate(*args, **kwargs)), object()
            advance = self.around(lambda: next(items, end))
            while (item := advance()) is not end:
                yield item

        return metered


def derived(cls: type) -> Iterator[type]:
    """Yields the classes that derive from another one."""
    for below in cls.__subclasses__():
        yield below
        yield from derived(below)


def take_apart(meter: Meter, collector: Any, env: type) -> None:
    """Counts what is the program's own; its environments are there when it makes a collector."""
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
    """Does what the command line says."""
    way, what, program, *arguments = sys.argv[1:]
    if way == "takeover":
        importlib.import_module("gleanrl.takeover")
    # With this module importing them, these are gleanrl's under takeover, as they are for the program.
    collectors, data, envs = (
        importlib.import_module(f"torchrl.{name}") for name in ("collectors", "data", "envs")
    )
    for name in ("modules", "objectives"):
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
