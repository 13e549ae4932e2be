"""Lists of operations for small policies: malformed ones raise, and none crashes or writes outside of its memory.

With ``GLEANRL_SANITIZED_CORE``, the path of a core that was built with ``-DGLEANRL_SANITIZE=address,undefined``, the
programs of the child process run in that core. ``GLEANRL_SANITIZER`` then names the sanitizer's library
(``gcc -print-file-name=libasan.so``).
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gleanrl import _core
from gleanrl._arrays.native import ActorProgram
from gleanrl._rollout.native_program import _Kind

INPUT, CONSTANT, DENSE, NORM, UNARY, BINARY, COPY = (
    int(_Kind[name]) for name in ("INPUT", "CONSTANT", "DENSE", "NORM", "UNARY", "BINARY", "COPY")
)
ARGMAX, ONE_HOT, CATEGORICAL, GATHER, EXPLORE, NORMAL = (
    int(_Kind[name]) for name in ("ARGMAX", "ONE_HOT", "CATEGORICAL", "GATHER", "EXPLORE", "NORMAL")
)
SANITIZED = os.environ.get("GLEANRL_SANITIZED_CORE")

HALTING = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "halt_on_error=1"}

Given = dict[str, Any]
"""A program with its columns; see ``actor_child.py``."""


class Child:
    """A process that runs programs and is started again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, given: Given) -> list[str]:
        """Return the outcomes; the last one is "crash" if the process ended."""
        if self._process is None:
            script = Path(__file__).with_name("actor_child.py")
            command = [
                sys.executable,
                str(script),
                SANITIZED or _core.__file__,
                *(["sanitized"] if SANITIZED else []),
            ]
            preloaded = {"LD_PRELOAD": os.environ["GLEANRL_SANITIZER"], **HALTING} if SANITIZED else {}
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **preloaded},
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            return ["crash"]
        found: list[str] = json.loads(line)
        return found

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.close()


class Builder:
    """Collects the operations of a valid program."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.operations: list[list[Any]] = []
        self.inputs: list[int] = []
        self.weights: list[int] = []
        self.floats: list[int] = []  # slots with any numbers, of positive size

    def new(self, size: int) -> int:
        self.slots.append(size)
        return len(self.slots) - 1

    def add(self, kind: int, size: int, sources: list[int], sizes: list[int], numbers: Any = ()) -> int:
        to = self.new(size)
        self.operations.append([kind, to, sources, sizes, list(numbers)])
        return to

    def weight(self, count: int) -> int:
        self.weights.append(count)
        return len(self.weights) - 1

    def input(self, size: int) -> int:
        self.inputs.append(size)
        return self.add(INPUT, size, [], [len(self.inputs) - 1, 0])

    def given(self, outputs: list[list[int]], parts: int = 2, steps: int = 2, fill: float = 0.25) -> Given:
        return {
            "slots": self.slots,
            "operations": self.operations,
            "outputs": outputs,
            "num_inputs": len(self.inputs),
            "num_weights": len(self.weights),
            "weights": self.weights,
            "inputs": self.inputs,
            "results": [self.slots[slot] for slot, _ in outputs],
            "parts": parts,
            "steps": steps,
            "fill": fill,
        }


@st.composite
def programs(draw: st.DrawFn) -> Given:
    """Return a valid program with one to seven operations behind its inputs."""
    made = Builder()
    values = [made.input(draw(st.sampled_from([1, 2, 3, 6, 8, 17]))) for _ in range(draw(st.integers(1, 2)))]
    results = []
    for _ in range(draw(st.integers(1, 7))):
        x = draw(st.sampled_from(values))
        size = made.slots[x]
        kind = draw(
            st.sampled_from(
                ["constant", "dense", "norm", "unary", "binary", "copy", "argmax", "choice", "normal"]
            )
        )
        if kind == "constant":
            values.append(made.add(CONSTANT, size, [], [made.weight(size), size]))
        elif kind == "dense":
            groups = draw(st.sampled_from([k for k in (1, 2, 3) if size % k == 0]))
            inner, outer = size // groups, draw(st.sampled_from([1, 2, 5, 16, 33]))
            numbers = [made.weight(inner * outer), made.weight(outer) if draw(st.booleans()) else -1]
            values.append(made.add(DENSE, outer * groups, [x], [*numbers, inner, outer, groups]))
        elif kind == "norm":
            numbers = [made.weight(size) if draw(st.booleans()) else -1 for _ in range(2)]
            values.append(made.add(NORM, size, [x], [*numbers, size, 1], [1e-5]))
        elif kind == "unary":
            values.append(made.add(UNARY, size, [x], [draw(st.integers(0, 20))], [1.0, 20.0]))
        elif kind == "binary":
            fitting = [one for one in values if made.slots[one] in (size, 1)]
            values.append(
                made.add(BINARY, size, [x, draw(st.sampled_from(fitting))], [draw(st.integers(0, 5))])
            )
        elif kind == "copy":
            first = draw(st.integers(0, size - 1))
            values.append(
                made.add(COPY, 2 * size - first, [x, x], [1, first, size - first, size, 0, size, size])
            )
        elif kind == "argmax":
            index = made.add(ARGMAX, 1, [x], [size, 1, draw(st.integers(0, 1))])
            results += [index, made.add(ONE_HOT, size, [index], [size]), made.add(GATHER, 1, [x, index], [])]
            single = draw(st.sampled_from([index, *[one for one in values if made.slots[one] == 1]]))
            mask = draw(st.sampled_from([-1, *[one for one in values if made.slots[one] == size]]))
            results.append(made.add(EXPLORE, 1, [index, single, mask], [size]))
        elif kind == "choice":
            score = made.new(1)
            mask = draw(st.sampled_from([-1, *[one for one in values if made.slots[one] == size]]))
            numbers = [
                size,
                draw(st.integers(0, 1)),
                draw(st.integers(0, 1)),
                draw(st.sampled_from([-1, score])),
            ]
            results += [made.add(CATEGORICAL, 1, [x, mask], numbers), *([] if numbers[-1] == -1 else [score])]
        else:
            squashed, summed = draw(st.integers(0, 1)), draw(st.integers(0, 1))
            score = made.new(1 if summed else size)
            scale = made.add(CONSTANT, size, [], [made.weight(size), size])
            numbers = [draw(st.integers(0, 1)), squashed, summed, draw(st.sampled_from([-1, score]))]
            results += [
                made.add(NORMAL, size, [x, scale], numbers, [-1.0, 1.0]), *([] if numbers[-1] == -1 else [score])
            ]  # fmt: skip
    dtypes = {True: st.integers(0, 1), False: st.integers(0, 5)}
    shown = draw(st.lists(st.sampled_from([*values, *results]), min_size=1, max_size=4))
    outputs = [[slot, draw(dtypes[slot in values])] for slot in shown]
    return made.given(
        outputs, draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([0.25, 1.0, 3e38]))
    )


HUGE = [
    -(2**63),
    -(2**40),
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    16,
    2**16,
    2**24 - 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
]


@st.composite
def mutated(draw: st.DrawFn) -> Given:
    """Return a program with one to three changes: exchanged, missing and additional numbers and operations."""
    found = copy.deepcopy(draw(programs()))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from(
                ["number", "number", "number", "number", "list", "operations", "slots", "outputs", "counts"]
            )
        )
        operations = found["operations"]
        if kind in ("number", "list") and operations:
            operation = operations[draw(st.integers(0, len(operations) - 1))]
            field = draw(st.integers(0, 4))
            if field < 2:
                operation[field] = change(draw, operation[field])
            elif kind == "number" and operation[field]:
                at = draw(st.integers(0, len(operation[field]) - 1))
                operation[field][at] = change(draw, operation[field][at]) if field < 4 else draw(st.floats())
            elif draw(st.booleans()):
                operation[field].append(draw(st.sampled_from([0, 1, -1])))
            elif operation[field]:
                operation[field].pop(draw(st.integers(0, len(operation[field]) - 1)))
        elif kind == "operations" and operations:
            a, b = (draw(st.integers(0, len(operations) - 1)) for _ in range(2))
            how = draw(st.sampled_from(["swap", "drop", "repeat", "share"]))
            if how == "swap":
                operations[a], operations[b] = operations[b], operations[a]
            elif how == "drop":
                operations.pop(a)
            elif how == "repeat":
                operations.insert(b, copy.deepcopy(operations[a]))
            else:  # two operations share a slot
                operations[a][1] = operations[b][1]
        elif kind == "slots":
            at = draw(st.integers(0, len(found["slots"]) - 1))
            found["slots"][at] = change(draw, found["slots"][at])
        elif kind == "outputs":
            output = found["outputs"][draw(st.integers(0, len(found["outputs"]) - 1))]
            at = draw(st.integers(0, 1))
            output[at] = change(draw, output[at])
        elif kind == "counts":
            name = draw(st.sampled_from(["num_inputs", "num_weights"]))
            found[name] = draw(st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 1000]))
    return found


def change(draw: st.DrawFn, number: int) -> int:
    return draw(st.sampled_from([-1, -2, number + 1, number - 1, -number]) | st.sampled_from(HUGE))


def require_safe(outcomes: list[str], given: Given, valid: bool) -> None:
    """Check the outcomes of a program."""
    assert outcomes[-1] != "crash", given
    if outcomes[0] != "ok":
        assert not valid and outcomes[0] in ("ValueError", "OverflowError"), (outcomes, given)
        return
    if "ok" not in outcomes[1:2]:
        assert not valid and outcomes[1] == "ValueError", (outcomes, given)
        return
    if outcomes[2] != "ok":
        assert not valid and outcomes[2] in ("ValueError", "MemoryError"), (outcomes, given)
        return
    assert outcomes[3:] == [
        "ok",
        "ok",
        "IndexError",
        "IndexError",
        "IndexError",
        "IndexError",
        "whole",
        "kept",
    ], (outcomes, given)


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(given_=programs())
def test_valid_programs_run(child: Child, given_: Given) -> None:
    require_safe(child.run(given_), given_, valid=True)


@settings(
    deadline=None,
    max_examples=1000 if os.environ.get("GLEANRL_CHAOS") == "1" or SANITIZED else 200,
    suppress_health_check=list(HealthCheck),
)
@given(given_=mutated())
def test_mutated_programs_raise_or_run_without_damage(child: Child, given_: Given) -> None:
    if any(len(str(one)) > 25 for one in given_["slots"]):
        return
    given_ = {**given_, "results": [slot_size(given_, slot) for slot, _ in given_["outputs"]]}
    given_["inputs"], given_["weights"] = room(given_), weights_of(given_)
    require_safe(child.run(given_), given_, valid=False)


def slot_size(given: Given, slot: int) -> int:
    sizes = given["slots"]
    return min(max(sizes[slot], 0), 2**20) if 0 <= slot < len(sizes) else 0


def room(given: Given) -> list[int]:
    """Return a size for each input that all operations fit that read it."""
    found = [0] * max(given["num_inputs"], 0)
    for kind, to, _, sizes, _ in given["operations"]:
        if kind == INPUT and sizes and 0 <= sizes[0] < len(found):
            found[sizes[0]] = max(found[sizes[0]], slot_size(given, to))
    return found


def weights_of(given: Given) -> list[int]:
    """Return the number of floats of each weight as the last operation says that reads it; -1 for none."""
    found = [-1] * max(given["num_weights"], 0)
    for kind, _, _, n, _ in given["operations"]:
        counts = {
            CONSTANT: lambda n: {n[0]: n[1]},
            DENSE: lambda n: {n[0]: n[2] * n[3], n[1]: n[3]},
            NORM: lambda n: {n[0]: n[2], n[1]: n[2]},
        }
        if kind in counts and len(n) == {CONSTANT: 2, DENSE: 5, NORM: 4}[kind]:
            for number, count in counts[kind](n).items():
                if 0 <= number < len(found) and -1 <= count < 2**20:
                    found[number] = count
    return found


# ------------------------------------------------------------------------------------------------ malformed operations
X = [INPUT, 0, [], [0, 0], []]
"""Reads slot 0."""

BAD: dict[str, tuple[list[int], list[list[Any]]]] = {
    "unknown kind": ([4, 4], [X, [len(_Kind), 1, [0], [], []]]),
    "negative kind": ([4, 4], [X, [-1, 1, [0], [], []]]),
    "result in no slot": ([4, 4], [X, [UNARY, 2, [0], [0], [0.0, 0.0]]]),
    "result in a negative slot": ([4, 4], [X, [UNARY, -1, [0], [0], [0.0, 0.0]]]),
    "source in no slot": ([4, 4], [X, [UNARY, 1, [2], [0], [0.0, 0.0]]]),
    "source in a negative slot": ([4, 4], [X, [UNARY, 1, [-1], [0], [0.0, 0.0]]]),
    "negative slot size": ([4, -1], [X]),
    "large slot": ([4, 2**24], [X]),
    "unknown input": ([4], [[INPUT, 0, [], [1, 0], []]]),
    "negative input": ([4], [[INPUT, 0, [], [-1, 0], []]]),
    "input of integers": ([4], [[INPUT, 0, [], [0, 2], []]]),
    "input of an unknown dtype": ([4], [[INPUT, 0, [], [0, 9], []]]),
    "result in the slot of an input": ([4, 4], [X, [UNARY, 0, [0], [0], [0.0, 0.0]]]),
    "constant without a weight": ([4, 4], [X, [CONSTANT, 1, [], [-1, 4], []]]),
    "constant of an unknown weight": ([4, 4], [X, [CONSTANT, 1, [], [2, 4], []]]),
    "constant of another size": ([4, 4], [X, [CONSTANT, 1, [], [0, 3], []]]),
    "dense without a weight": ([4, 2], [X, [DENSE, 1, [0], [-1, 1, 4, 2, 1], []]]),
    "dense with a bias of -2": ([4, 2], [X, [DENSE, 1, [0], [0, -2, 4, 2, 1], []]]),
    "dense with an unknown bias": ([4, 2], [X, [DENSE, 1, [0], [0, 2, 4, 2, 1], []]]),
    "dense with an unknown weight": ([4, 2], [X, [DENSE, 1, [0], [5, 1, 4, 2, 1], []]]),
    "dense whose weight is its bias": ([1, 1], [X, [DENSE, 1, [0], [0, 0, 1, 1, 1], []]]),
    "dense into itself": ([4, 4], [X, [DENSE, 0, [0], [0, 1, 4, 4, 1], []]]),
    "dense of other inputs": ([4, 2], [X, [DENSE, 1, [0], [0, 1, 3, 2, 1], []]]),
    "dense of other outputs": ([4, 2], [X, [DENSE, 1, [0], [0, 1, 4, 3, 1], []]]),
    "dense of negative inputs and groups": ([4, 2], [X, [DENSE, 1, [0], [0, 1, -4, 2, -1], []]]),
    "dense without outputs": ([4, 0], [X, [DENSE, 1, [0], [0, 1, 4, 0, 1], []]]),
    "dense whose product overflows": ([0, 0], [X, [DENSE, 1, [0], [0, 1, 2**40, 2**40, 2**40], []]]),
    "dense with outputs without groups": ([0, 0], [X, [DENSE, 1, [0], [0, 1, 2**62, 4, 0], []]]),
    "norm of an unknown weight": ([4, 4], [X, [NORM, 1, [0], [7, -1, 4, 1], [1e-5]]]),
    "norm of another size": ([4, 4], [X, [NORM, 1, [0], [-1, -1, 3, 1], [1e-5]]]),
    "norm without eps": ([4, 4], [X, [NORM, 1, [0], [-1, -1, 4, 1], []]]),
    "norm whose product overflows": ([0, 0], [X, [NORM, 1, [0], [-1, -1, 2**62, 4], [1e-5]]]),
    "unknown function": ([4, 4], [X, [UNARY, 1, [0], [21], [0.0, 0.0]]]),
    "negative function": ([4, 4], [X, [UNARY, 1, [0], [-1], [0.0, 0.0]]]),
    "function of another size": ([4, 3], [X, [UNARY, 1, [0], [0], [0.0, 0.0]]]),
    "function with one number": ([4, 4], [X, [UNARY, 1, [0], [0], [0.0]]]),
    "function of two values": ([4, 4], [X, [UNARY, 1, [0, 0], [0], [0.0, 0.0]]]),
    "unknown function of two": ([4, 4], [X, [BINARY, 1, [0, 0], [6], []]]),
    "function of two with one value": ([4, 4], [X, [BINARY, 1, [0], [0], []]]),
    "function of two sizes": ([4, 3], [X, [BINARY, 1, [0, 0], [0], []]]),
    "copy of nothing": ([4, 0], [X, [COPY, 1, [], [], []]]),
    "copy behind the end": ([4, 3], [X, [COPY, 1, [0], [1, 2, 3, 4], []]]),
    "copy before the start": ([4, 3], [X, [COPY, 1, [0], [1, -1, 3, 4], []]]),
    "copy of a negative count": ([4, 0], [X, [COPY, 1, [0, 0], [1, 4, -1, 4, 0, 1, 4], []]]),
    "copy whose end overflows": ([4, 1], [X, [COPY, 1, [0], [1, 2**63 - 1, 1, 4], []]]),
    "copy whose groups overflow": ([0, 0], [X, [COPY, 1, [0], [2**32, 0, 2**32, 2**32], []]]),
    "copy into itself": ([4, 4], [X, [COPY, 0, [0], [1, 0, 4, 4], []]]),
    "copy with missing numbers": ([4, 4], [X, [COPY, 1, [0], [1, 0, 4], []]]),
    "argmax of nothing": ([0, 0], [X, [ARGMAX, 1, [0], [0, 0, 0], []]]),
    "argmax of another size": ([4, 1], [X, [ARGMAX, 1, [0], [3, 1, 0], []]]),
    "argmax whose product overflows": ([0, 0], [X, [ARGMAX, 1, [0], [2**62, 4, 0], []]]),
    "argmax of negative groups": ([4, 1], [X, [ARGMAX, 1, [0], [-4, -1, 0], []]]),
    "one-hot of several": ([4, 4], [X, [ONE_HOT, 1, [0], [4], []]]),
    "one-hot of another size": ([1, 4], [X, [ONE_HOT, 1, [0], [5], []]]),
    "gather by several": ([4, 4, 1], [X, [GATHER, 2, [0, 0], [], []]]),
    "gather from nothing": ([0, 1, 1], [X, [GATHER, 2, [0, 1], [], []]]),
    "gather without a source": ([4, 1], [X, [GATHER, 1, [-1, 1], [], []]]),
    "exploration without choices": ([1, 1], [X, [EXPLORE, 1, [0, 0, -1], [0], []]]),
    "exploration without a choice": ([1, 1], [X, [EXPLORE, 1, [-1, 0, -1], [2], []]]),
    "exploration without a probability": ([1, 1], [X, [EXPLORE, 1, [0, -1, -1], [2], []]]),
    "exploration with a mask of -2": ([1, 1], [X, [EXPLORE, 1, [0, 0, -2], [2], []]]),
    "exploration with a short mask": ([1, 1], [X, [EXPLORE, 1, [0, 0, 0], [2], []]]),
    "choice without logits": ([4, 1], [X, [CATEGORICAL, 1, [-1, -1], [4, 0, 0, -1], []]]),
    "choice with an unknown mask": ([4, 1], [X, [CATEGORICAL, 1, [0, 5], [4, 0, 0, -1], []]]),
    "choice with a mask of -2": ([4, 1], [X, [CATEGORICAL, 1, [0, -2], [4, 0, 0, -1], []]]),
    "choice with a short mask": ([4, 1], [X, [CATEGORICAL, 1, [0, 1], [4, 0, 0, -1], []]]),
    "choice among another number": ([4, 1], [X, [CATEGORICAL, 1, [0, -1], [5, 0, 0, -1], []]]),
    "choice with an unknown slot": ([4, 1], [X, [CATEGORICAL, 1, [0, -1], [4, 0, 0, 2], []]]),
    "choice with a slot of -2": ([4, 1], [X, [CATEGORICAL, 1, [0, -1], [4, 0, 0, -2], []]]),
    "choice with a large slot for its score": ([4, 1], [X, [CATEGORICAL, 1, [0, -1], [4, 0, 0, 0], []]]),
    "choice with a slot beyond int": ([4, 1], [X, [CATEGORICAL, 1, [0, -1], [4, 0, 0, 2**32], []]]),
    "choice with the slot of an input for its score": ([1, 1], [X, [CATEGORICAL, 1, [0, -1], [1, 0, 0, 0], []]]),
    "normal of other sizes": ([4, 3], [X, [NORMAL, 1, [0, 0], [0, 0, 0, -1], [0.0, 0.0]]]),
    "normal without bounds": ([4, 4], [X, [NORMAL, 1, [0, 0], [0, 0, 0, -1], []]]),
    "normal with a scalar score for each": ([4, 4, 1], [X, [NORMAL, 1, [0, 0], [0, 0, 0, 2], [0.0, 0.0]]]),
    "normal with scores for the sum": ([4, 4, 4], [X, [NORMAL, 1, [0, 0], [0, 0, 1, 2], [0.0, 0.0]]]),
    "normal with an unknown slot": ([4, 4], [X, [NORMAL, 1, [0, 0], [0, 0, 0, 9], [0.0, 0.0]]]),
    "normal of many numbers": ([1, 65537], [X, [NORMAL, 1, [0, 0], [0, 0, 0, -1], [0.0, 0.0]]]),
    "weight of two sizes": ([4, 2, 4], [X, [DENSE, 1, [0], [0, -1, 4, 2, 1], []], [CONSTANT, 2, [], [0, 4], []]]),
    "weight and constant": ([4, 2, 8], [X, [DENSE, 1, [0], [0, -1, 4, 2, 1], []], [CONSTANT, 2, [], [0, 8], []]]),
    "bias and constant": ([4, 2, 2], [X, [DENSE, 1, [0], [0, 1, 4, 2, 1], []], [CONSTANT, 2, [], [1, 2], []]]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_malformed_operations_raise(case: str) -> None:
    slots, operations = BAD[case]
    with pytest.raises(ValueError, match="actor: expected"):
        ActorProgram(slots, [tuple(one) for one in operations], [], 1, 2)


@pytest.mark.parametrize("case", BAD)
def test_malformed_operations_do_no_damage(child: Child, case: str) -> None:
    slots, operations = BAD[case]
    shown = [[slot, 0] for slot in range(len(slots)) if 0 <= slots[slot] < 100]
    results = [slots[slot] for slot, _ in shown]
    for weights in itertools.product((-1, 0, 1, 2, 4, 8), (-1, 1, 2, 8)):
        program = {
            "slots": slots,
            "operations": operations,
            "outputs": shown,
            "num_inputs": 1,
            "num_weights": 2,
        }
        room_ = {
            "weights": weights,
            "inputs": [max(slots[0], 0)],
            "results": results,
            "parts": 1,
            "steps": 1,
            "fill": 7.0,
        }
        outcomes = child.run({**program, **room_})
        assert "crash" not in outcomes and "overrun" not in outcomes and "input changed" not in outcomes, (
            outcomes
        )


@pytest.mark.parametrize("number", [2.0, 7.0, -1.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "operation", [[ONE_HOT, 1, [0], [2], []], [GATHER, 2, [1, 0], [], []]], ids=["one-hot", "gather"]
)
def test_an_index_out_of_range_is_left_to_torch(number: float, operation: list[Any]) -> None:
    source, target = np.array([number], np.float32), np.full(100, 7.0, np.float32)
    scores = np.zeros(2, np.float32)
    constant = (CONSTANT, 3 if operation[1] == 1 else 1, [], [0, 2], [])
    program = ActorProgram([1, 2, 1, 2], [tuple(X), constant, tuple(operation)], [(operation[1], 0)], 1, 1)
    program.pack([(scores.ctypes.data, 2)])
    program.bind([(source.ctypes.data, 4, 4)], [(target[50:].ctypes.data, 8, 8)], 1, 1, 0, 0, 0)
    assert program.act(0) is False
    assert (target == 7).all()


@pytest.mark.parametrize("output", [(1, 0), (-1, 0), (0, 6), (0, -1)])
def test_malformed_outputs_raise(output: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="actor: expected"):
        ActorProgram([4], [tuple(X)], [output], 1, 0)


@pytest.mark.parametrize(
    "operation",
    [(), (0, 0, [], [0, 0]), (0, 0, [], [0, 0], [], 0), [0, 0, [], [0, 0], []], 5, None, "abcde", (0, 0, 1, [0, 0], []),
     (0, 0, [], [0.5, 0], []), (0, "0", [], [0, 0], []), (2**40, 0, [], [0, 0], []), (0, 2**40, [], [0, 0], []),
     (0, 0, [], [2**70, 0], []), (0, 0, [], [0, 0], ["a"]), (0, 0, [None], [0, 0], [])],
    ids=str,
)  # fmt: skip
def test_operations_of_other_types_raise(operation: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        ActorProgram([4], [operation], [], 1, 0)


@pytest.mark.parametrize("counts", [(-1, 0), (1, -1), (-(2**31), 0), (1, 2**31 - 1)])
def test_counts_out_of_range_raise(child: Child, counts: tuple[int, int]) -> None:
    program = {
        "slots": [4],
        "operations": [X],
        "outputs": [],
        "num_inputs": counts[0],
        "num_weights": counts[1],
    }
    room_ = {"weights": [], "inputs": [4], "results": [], "parts": 1, "steps": 1, "fill": 1.0}
    outcomes = child.run({**program, **room_})
    assert "crash" not in outcomes and outcomes != ["ok"] * len(outcomes), outcomes
    assert outcomes[-1] in ("ValueError", "MemoryError"), outcomes


LAYER: Given = {
    "slots": [4, 2, 2], "operations": [X, [DENSE, 1, [0], [0, 1, 4, 2, 1], []], [CONSTANT, 2, [], [2, 2], []]],
    "outputs": [[1, 0], [2, 0]], "num_inputs": 1, "num_weights": 3, "weights": [8, 2, 2], "inputs": [4],
    "results": [2, 2], "parts": 2, "steps": 2, "fill": 1.0,
}  # fmt: skip


def test_a_layer_runs(child: Child) -> None:
    require_safe(child.run(LAYER), LAYER, valid=True)


@pytest.mark.parametrize(
    "weights", [[8, 2], [8, 2, 2, 1], [7, 2, 2], [8, 3, 2], [8, 2, 0], [-8, 2, 2], []], ids=str
)
def test_weights_of_other_sizes_raise(child: Child, weights: list[int]) -> None:
    assert child.run({**LAYER, "weights": weights}) == ["ok", "ValueError"]


@pytest.mark.parametrize(
    "change",
    [{"inputs": []}, {"inputs": [4, 4]}, {"results": [2]}, {"results": []}, {"claimed_parts": -1},
     {"claimed_parts": 2**61}, {"claimed_parts": 2**63 - 1}, {"claimed_parts": 2**60}],
    ids=str,
)  # fmt: skip
def test_columns_of_other_counts_raise(child: Child, change: Given) -> None:
    outcomes = child.run({**LAYER, **change})
    assert outcomes[:2] == ["ok", "ok"] and outcomes[2:] in (["ValueError"], ["MemoryError"]), outcomes


def test_a_program_without_weights_does_not_run(child: Child) -> None:
    early = {**LAYER, "early": [[(0, 0, 0)], [(0, 0, 0), (0, 0, 0)], 0, 1, 0, 0, 0]}
    outcomes = child.run(early)
    assert "crash" not in outcomes, outcomes
    assert "ValueError" in outcomes[1:3], "a program that has no weights yet can't be bound or run"


def test_a_program_without_columns_has_no_rows() -> None:
    program = ActorProgram([4], [tuple(X)], [], 1, 0)
    for t in (0, 1, -1):
        with pytest.raises(IndexError):
            program.act(t)
