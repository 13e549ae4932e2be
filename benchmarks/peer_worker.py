"""One side of a case in this interpreter, at the command of another: `peer_worker.py CASE SIDE [PACKAGE]`.

The other end, and the protocol, is `remote.py`. SIDE is the name of a module of PACKAGE, or that and after a space
the name of a variant. The module has `VERSION` and `SETUPS` (case, or "case variant" -> set-up).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(case: str, side: str, package: str = "benchmarks.peers") -> None:
    """Sets the side up, says so, and works once for each line that comes in."""
    # Libraries print to standard output; the answers get a stream of their own and the rest goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    sys.path[0] = str(ROOT)
    try:
        now = importlib.import_module("benchmarks.clock").now
        settle = importlib.import_module("benchmarks.settle")
        settle.settle_allocator()
        name, _, variant = side.partition(" ")
        module = importlib.import_module(f"{package}.{name}")
        work: Callable[[], float] = module.SETUPS[f"{case} {variant}".strip()]()
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    settle.settle_garbage()
    say({"ready": module.VERSION})
    for _ in sys.stdin:
        try:
            gc.collect()
            start = now()
            amount = work()
            say({"seconds": now() - start, "amount": amount})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
