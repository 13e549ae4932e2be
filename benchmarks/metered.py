"""Runs a program and says how long it took, and how long it was in collectors and replay buffers.

`python -m benchmarks.metered WAY PROGRAM ARGUMENTS`, where WAY is "torchrl" or "takeover", in an interpreter with
torchrl. The last line on stdout is JSON: `whole`, `data` and, within `data`, `networks` and `environments`, in seconds
of `benchmarks.clock`, imports left out. The calls that a program makes are wrapped, the same on either side; what one
of them calls of the others isn't counted twice.

`data` is the time in the constructor and the iteration of the collector, and in the constructor, extend, add, sample,
priority updates and iteration of buffers: all of it, policies and environments included. What programs reach past these
calls isn't in it (`rb[:]`, `len`, updates of weights that loss modules make). With processor time, that of all other
threads belongs to it, whenever they work: they are those of buffers that fetch ahead, whose work isn't less for being
done between two calls, since the interpreter runs one thread at a time. The wall's clock can't tell it from the
program's own.

`networks` is the part of it that the policy's own modules take, which is the program's on either side: networks and
distributions, on tensors, and the modules that work on TensorDicts (choices of values, exploration). What carries
values between these, tensordict's TensorDictModule, ProbabilisticTensorDictModule and sequences with their subclasses,
isn't counted as the program's: whoever calls a policy decides how its modules are driven.

`environments` is the part that the environments' own steps and resets take: those of simulators made for gymnasium, its
wrappers left out, and `_step` and `_reset` of environments that the program defines.

`counting` is what counting these parts costs, which is in `data`, too: so many calls, by what a call that does nothing
costs at the end of the run. `threads` is the processor time of other threads that is in `data`.
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

from benchmarks.clock import CLOCK, in_thread, now

BUFFERS = ("ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
DRIVERS = (TensorDictModule, ProbabilisticTensorDictModule)
DRAWS = ("__init__", "sample", "rsample", "log_prob", "sample_and_log_prob", "rsample_and_log_prob")
CALLS_TIMED, REPEATS = 10_000, 5
CALLS = ("__init__", "extend", "add", "sample", "update_priority", "update_tensordict_priority", "empty")


class Meter:
    """Seconds within wrapped calls, and within what is the program's own that these call."""

    def __init__(self) -> None:
        self.seconds, self.own = 0.0, {"networks": 0.0, "environments": 0.0}
        self._counted = self._passed = 0
        self._inside = self._in_own = False

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
            if not self._inside or self._in_own:
                return call(owner, *args, **kwargs)
            if isinstance(owner, DRIVERS) or ".envs.transforms." in type(owner).__module__:
                self._passed += 1
                return call(owner, *args, **kwargs)
            self._counted += 1
            self._in_own, start = True, in_thread()
            try:
                return call(owner, *args, **kwargs)
            finally:
                self._in_own = False
                self.own[part] += in_thread() - start

        return metered

    def counting(self) -> float:
        """Returns the seconds of `seconds`, those of the parts left out, that counting them took."""
        cost = {}
        for owner in (object(), object.__new__(TensorDictModule)):  # one that is counted, and one that isn't
            meter = Meter()
            meter._inside, run = True, meter.program("networks", _nothing)
            plain, metered = (
                min(_seconds_of(call, owner) for _ in range(REPEATS)) for call in (_nothing, run)
            )
            own = meter.own["networks"] / REPEATS
            cost[owner] = max(0.0, metered - plain - own) / CALLS_TIMED
        counted, passed = cost.values()
        return self._counted * counted + self._passed * passed

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


def _nothing(owner: Any) -> None:
    pass


def _seconds_of(call: Callable[[Any], Any], owner: Any) -> float:
    start = in_thread()
    for _ in range(CALLS_TIMED):
        call(owner)
    return in_thread() - start


def derived(cls: type) -> Iterator[type]:
    """Yields the classes that derive from another one."""
    for below in cls.__subclasses__():
        yield below
        yield from derived(below)


def main() -> None:
    """Does what the command line says."""
    way, program, *arguments = sys.argv[1:]
    if way == "takeover":
        importlib.import_module("gleanrl.takeover")
    # With this module importing them, these are gleanrl's under takeover, as they are for the program.
    collectors, data, envs = (
        importlib.import_module(f"torchrl.{name}") for name in ("collectors", "data", "envs")
    )
    for name in ("modules", "objectives"):
        importlib.import_module(f"torchrl.{name}")
    meter = Meter()
    for cls in (collectors.Collector, *(getattr(data, name) for name in BUFFERS)):
        for name in CALLS:
            if name in vars(cls):
                setattr(cls, name, meter.around(vars(cls)[name]))
    for cls in (collectors.Collector, data.ReplayBuffer):
        cls.__iter__ = meter.items(cls.__iter__)
    meter.methods("networks", [torch.nn.Module], ["__call__"])
    meter.methods("networks", {*derived(Distribution)}, DRAWS)
    make = collectors.Collector.__init__

    def make_after_environments(*args: Any, **kwargs: Any) -> None:
        simulators = {cls for cls in derived(gym.Env) if not issubclass(cls, gym.Wrapper)}
        meter.methods("environments", simulators, ["step", "reset"])
        meter.methods(
            "environments",
            {cls for cls in derived(envs.EnvBase) if cls.__module__ == "__main__"},
            ["_step", "_reset"],
        )
        make(*args, **kwargs)

    collectors.Collector.__init__ = make_after_environments
    sys.argv[:] = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    start, start_here = now(), in_thread()
    runpy.run_path(program, run_name="__main__")
    whole, here = now() - start, in_thread() - start_here
    others = whole - here if CLOCK == "cpu" else 0.0
    found = {"whole": whole, "data": meter.seconds + others, **meter.own, "threads": others}
    found["counting"] = meter.counting()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
