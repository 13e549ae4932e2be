"""Run one side of a case on command of another process: `peer_worker.py CASE SIDE [PACKAGE]`.

`remote.py` is the other end of the protocol and describes it. SIDE is the name of a module of PACKAGE, or that name, a
space and the name of a variant. The module has `VERSION` and `SETUPS` (case, or "case variant" -> set-up).
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
    """Set the side up, report the result, and do its work once for each line on standard input."""
    # Libraries print to standard output. Only answers are written there; all other output goes to standard error.
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
