"""Runs lists of operations that may crash: a child process for `test_actor.py`.

A line of the standard input is a program as JSON, and a line of the standard output is its result. The core is loaded
by its path, because an import of torch takes seconds, and so that a core with sanitizers can be tested.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
from typing import Any

import numpy as np

MARGIN = 4096
"""Bytes before and after each column that must not change."""


def core_at(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("_core", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def columns(
    sizes: list[int], parts: int, steps: int, fill: float
) -> tuple[list[Any], list[tuple[int, int, int]]]:
    """Return float columns with margins, and the places of the rows in them."""
    arrays, places = [], []
    for size in sizes:
        nbytes = 8 * size
        array = np.full(2 * MARGIN + nbytes * parts * steps, 0xAB, np.uint8)
        inner = array[MARGIN : len(array) - MARGIN]
        inner.view(np.float32)[:] = fill
        arrays.append(array)
        places.append((inner.ctypes.data, nbytes * steps, nbytes))
    return arrays, places


def attempt(core: Any, given: dict[str, Any]) -> list[str]:
    """Return the outcome of each call: "ok" or the name of an error."""
    outcomes: list[str] = []

    def call(function: Any, *arguments: Any) -> Any:
        try:
            found = function(*arguments)
        except Exception as error:
            outcomes.append(type(error).__name__)
            return None
        outcomes.append("ok")
        return True if found is None else found

    operations = [tuple(one) for one in given["operations"]]
    outputs = [tuple(one) for one in given["outputs"]]
    program = call(
        core.ActorProgram, given["slots"], operations, outputs, given["num_inputs"], given["num_weights"]
    )
    if program is None:
        return outcomes
    if given.get("early"):
        call(program.bind, *given["early"])
        call(program.act, 0)
    weights = [np.full(max(count, 1), 0.5, np.float32) for count in given["weights"]]
    counts = given["weights"]
    if call(program.pack, [(one.ctypes.data, n) for one, n in zip(weights, counts, strict=True)]) is None:
        return outcomes
    parts, steps = given["parts"], given["steps"]
    inputs, sources = columns(given["inputs"], parts, steps, given["fill"])
    made, targets = columns(given["results"], parts, steps, 0.0)
    ahead = given.get("claimed_parts", parts)
    if call(program.bind, sources, targets, ahead, steps, 7, 0, 0) is None:
        return outcomes
    for t in (0, steps - 1, -1, steps, 2**62, -(2**63)):
        call(program.act, t)
    whole = all(
        (one[:MARGIN] == 0xAB).all() and (one[len(one) - MARGIN :] == 0xAB).all() for one in (*inputs, *made)
    )
    read_only = all(
        (one[MARGIN : len(one) - MARGIN].view(np.float32) == np.float32(given["fill"])).all()
        for one in inputs
    )
    return [*outcomes, "whole" if whole else "overrun", "kept" if read_only else "input changed"]


def main() -> None:
    core = core_at(sys.argv[1])
    if len(sys.argv) < 3:  # a sanitizer reserves terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for line in sys.stdin:
        print(json.dumps(attempt(core, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
