"""Compact buffers of several libraries, fed with the same steps: `python -m benchmarks.compact_peers [PYTHON]`.

PYTHON is an interpreter that has the other libraries (see `make_peers.sh`). Without it, only gleanrl runs. Each side
runs in a separate process. Its buffer is a class `Compact`, in `compact.py` or in a module of `peers`. The program
prints, for stacks of four frames and for vectors of 17 floats:

- the bytes of a transition: the growth of the resident memory while a buffer fills up;
- the time of a write of one step and of 200 steps, and of `sample(256)`, in rounds in which the sides alternate;
- the wrong ones of 100,000 sampled rows, drawn between writes, from one and from two environments.

Each step carries its number, so all entries of a sampled row can be compared with the step that was written. The kinds
of wrong rows are:

- root: the observation or the action isn't the one of the reward's step;
- terminated, truncated: the next observation of a step with this end is another one than the last of the episode;
- missing: the next observation is a filler, zeros or NaN;
- inside: the next observation of any other step is wrong;
- flags: only an end flag is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import WARM_UP, interleave, reason, spread
from benchmarks.remote import RemoteSide
from benchmarks.workload import settled_resident

VERSION = ""
SIDES = {  # the module, and arguments of its class
    "gleanrl plain": ("compact", ("plain",)),
    "gleanrl compact": ("compact", ("compact",)),
    "gleanrl frames": ("compact", ("frames",)),
    "sb3": ("peers.sb3", ()),
    "tianshou": ("peers.tianshou", ()),
    "cpprb": ("peers.cpprb", ()),
    "torchrl": ("peers.torchrl", (False,)),
    "torchrl counted": ("peers.torchrl", (True,)),
}
KINDS = ("stacks", "floats")
BATCH, CHUNK, DRAWN = 256, 200, 100_000
FILLED = {"stacks": 20_000, "floats": 300_000}  # rows of the buffers whose memory is read
TIMED = {"stacks": 4_000, "floats": 100_000}
CHECKED = {"stacks": 3_000, "floats": 20_000}
ROUNDS = 9
FRAMES, SIDE, WIDTH = 4, 84, 17
OF_ENV = 4_000_000  # the number of an environment's first step, and of its first observation
TERMINATED, TRUNCATED = 1, 2


class Steps(NamedTuple):
    """Consecutive steps of environments."""

    observation: NDArray[Any]  # (T, E, *observation)
    action: NDArray[Any]  # (T, E) int64, or (T, E, 6) float32
    reward: NDArray[np.float32]  # (T, E), the number of the step
    following: NDArray[Any]  # (T, E, *observation), the next observation
    terminated: NDArray[np.bool_]  # (T, E)
    truncated: NDArray[np.bool_]  # (T, E)
    episode: NDArray[np.int64]  # (T, E), different for each episode of all environments


class Stream:
    """The steps of environments. Their episodes have 1 to 199 steps, and a tenth of them 1 to 3.

    Half of the episodes terminate, the others are truncated. No observation or frame occurs twice. An observation is a
    vector, or a stack of the last frames, in which the first frame of an episode is repeated.

    Args:
        kind: "stacks" (4x84x84 uint8) or "floats" (17 float32).
        steps: the number of steps of each environment, at most 4,000,000 with all last observations.
        envs: the number of environments.
    """

    def __init__(self, kind: str, steps: int, envs: int = 1) -> None:
        rng = np.random.default_rng(0)
        self.kind, self.num_steps = kind, steps
        self._images = rng.integers(0, 256, (61, SIDE, SIDE), dtype=np.uint8)
        self._vectors = rng.standard_normal((1021, WIDTH), dtype=np.float32)
        self._actions = rng.standard_normal((1013, 6), dtype=np.float32)
        self._episode, self._start = np.empty((2, envs, steps), np.int64)
        self._end = np.zeros((envs, steps), np.int8)
        for env in range(envs):
            lengths = rng.integers(1, 200, steps)
            lengths = np.where(rng.random(steps) < 0.1, lengths % 3 + 1, lengths)
            stops = np.cumsum(lengths)
            stops = stops[stops <= steps]
            self._end[env, stops - 1] = rng.choice([TERMINATED, TRUNCATED], len(stops))
            self._episode[env] = np.searchsorted(stops, np.arange(steps), side="right")
            self._start[env] = np.concatenate([[0], stops])[self._episode[env]]

    def _observations(self, env: NDArray[Any], step: NDArray[Any], later: int) -> NDArray[Any]:
        """Return the observation before each step, or the one after it if `later` is 1."""
        first = env * OF_ENV + self._start[env, step] + self._episode[env, step]
        number = first + step - self._start[env, step] + later
        if self.kind == "floats":
            out = self._vectors[number % len(self._vectors)]
            out[:, 0] = number
            return out
        numbers = np.maximum(number[:, None] + np.arange(1 - FRAMES, 1), first[:, None])
        stacks = self._images[numbers % len(self._images)]
        stacks.reshape(*numbers.shape, -1)[..., :8] = numbers[..., None].view(np.uint8)
        return stacks

    def at(self, env: NDArray[Any], step: NDArray[Any]) -> Steps:
        """Return single steps, with (n, *entry) arrays."""
        action = step % 4 if self.kind == "stacks" else self._actions[step % len(self._actions)]
        end = self._end[env, step]
        return Steps(
            self._observations(env, step, 0),
            action,
            (env * OF_ENV + step).astype(np.float32),
            self._observations(env, step, 1),
            end == TERMINATED,
            end == TRUNCATED,
            env * OF_ENV + self._episode[env, step],
        )

    def steps(self, start: int, count: int) -> Steps:
        """Return consecutive steps of all environments."""
        step, env = (grid.reshape(-1) for grid in np.mgrid[start : start + count, : len(self._end)])
        return Steps(*(column.reshape(count, -1, *column.shape[1:]) for column in self.at(env, step)))

    def wrong(self, rows: dict[str, NDArray[Any]]) -> Counter[str]:
        """Return the number of wrong rows of each kind in a batch of `Steps`, by field; flags may be one "done"."""
        number = rows["reward"].reshape(-1).astype(np.int64)
        right = self.at(number // OF_ENV, number % OF_ENV)

        def differs(name: str, truth: NDArray[Any]) -> NDArray[np.bool_]:
            given = np.ascontiguousarray(rows[name], truth.dtype).reshape(len(number), -1)
            bits = given.view(np.uint8) != np.ascontiguousarray(truth).reshape(len(number), -1).view(np.uint8)
            return bits.any(1)

        following = rows["following"].reshape(len(number), -1)
        filler = ((following == 0) | (following != following)).all(1)
        after = differs("following", right.following)
        flags = np.zeros(len(number), bool)
        for name, truth in (
            ("terminated", right.terminated),
            ("truncated", right.truncated),
            ("done", right.terminated | right.truncated),
        ):
            if name in rows:
                flags |= differs(name, truth)
        kinds = {
            "root": differs("observation", right.observation) | differs("action", right.action),
            "missing": after & filler,
            "terminated": after & right.terminated,
            "truncated": after & right.truncated,
            "inside": after,
            "flags": flags,
        }
        kind = np.select(list(kinds.values()), range(1, 7))  # the first one that applies
        return Counter({name: n for at, name in enumerate(kinds, 1) if (n := int((kind == at).sum()))})


def make(side: str, kind: str, size: int, envs: int = 1) -> Any:
    """Return an empty buffer of a side for `size` transitions."""
    module, arguments = SIDES[side]
    return importlib.import_module(f"benchmarks.{module}").Compact(kind, size, envs, *arguments)


def fill(buffer: Any, stream: Stream, start: int, stop: int, chunk: int = CHUNK) -> None:
    """Write the steps from `start` to `stop`, up to `chunk` at once."""
    for at in range(start, stop, CHUNK):
        for write in buffer.writes(stream.steps(at, min(CHUNK, stop - at)), chunk):
            buffer.write(write)


def bytes_of(side: str, kind: str) -> float:
    """Fill a buffer and return the growth of the resident memory, in bytes for each transition."""
    size = FILLED[kind]
    stream = Stream(kind, size)
    first = make(side, kind, CHUNK * 5)  # loads everything that only the first use of a buffer loads
    fill(first, stream, 0, CHUNK * 5)
    first.sample()
    before = settled_resident()
    buffer = make(side, kind, size)
    fill(buffer, stream, 0, size)
    buffer.sample()
    return (settled_resident() - before) / size


def wrong_of(side: str, kind: str, envs: int) -> dict[str, int] | None:
    """Sample rows between writes, from a ring that wraps around, and return the number of wrong ones of each kind.

    Returns:
        The numbers per DRAWN rows; None if the library offers no such buffer for several environments.
    """
    size = CHECKED[kind] // envs  # of each environment
    stream = Stream(kind, 4 * size, envs)
    buffer = make(side, kind, size * envs, envs)
    if buffer is None:
        return None
    counts: Counter[str] = Counter()
    rng, drawn, at = np.random.default_rng(1), 0, 0
    while drawn < DRAWN:
        count = int(rng.integers(1, max(6 * size // (DRAWN // BATCH), 2)))
        assert at + count <= stream.num_steps
        fill(buffer, stream, at, at + count, int(rng.choice([1, count])))
        at += count
        if at < 20:  # some libraries can't sample a batch from so few steps
            continue
        rows = buffer.rows(buffer.sample())
        drawn += len(rows["reward"].reshape(-1))
        counts += stream.wrong(rows)
    return {name: round(count * DRAWN / drawn) for name, count in counts.items()}


def timed(side: str, kind: str) -> Callable[[], Callable[[], float]]:
    """Return the set-up of work whose turns measure the calls of CASES one after the other, and return their number."""

    def setup() -> Callable[[], float]:
        size, few = TIMED[kind], kind == "stacks"
        stream, buffer = Stream(kind, size + CHUNK), make(side, kind, size)
        fill(buffer, stream, 0, size)
        steps = stream.steps(size, CHUNK)
        one, many, cases = cycle(buffer.writes(steps, 1)), cycle(buffer.writes(steps, CHUNK)), cycle(CASES)

        def work() -> int:
            case, done = next(cases), 0
            if case == "sample":
                for _ in range(10 if few else 100):
                    buffer.sample()
                return 10 if few else 100
            while done < (400 if few else 1000):
                done += buffer.write(next(many if case == "extend" else one))
            return done

        return work

    return setup


CASES = ("add", "extend", "sample")
SETUPS = {f"times {side} {kind}": timed(side, kind) for side in SIDES for kind in KINDS}


def reading(python: str, side: str, kind: str) -> list[Any]:
    """Return the bytes and the wrong rows of a side, read in a new process; each time the reason if it failed."""
    done = subprocess.run(
        [python, "-m", "benchmarks.compact_peers", "--read", side, kind],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        return [f"failed: {done.stderr.strip().splitlines()[-1]}"] * 3
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(kind: str, pythons: dict[str, str], rounds: int) -> None:
    """Print the figures of one kind of observations."""
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        sides = {}
        for side, python in pythons.items():
            try:
                sides[side] = stack.enter_context(
                    RemoteSide(python, "times", f"compact_peers {side} {kind}", package="benchmarks")
                )
            except Exception as error:
                failures[side] = reason(error)
        speeds = interleave(sides, rounds * len(CASES), failures)

    def time_of(side: str, case: str) -> str:
        if side in failures:
            return failures[side]
        first = (CASES.index(case) - WARM_UP) % len(
            CASES
        )  # the turns before the counted ones were of other calls
        return f"{1e6 / spread(speeds[side][first :: len(CASES)]).median:,.1f}"

    print(f"\n| {kind} | bytes | add us | of 200 us | sample us | wrong, 1 env | wrong, 2 envs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for side, python in pythons.items():
        size, *wrong = reading(python, side, kind)
        cells = [f"{size:,.0f}" if isinstance(size, float) else str(size)]
        cells += [time_of(side, case) for case in CASES]
        for counts in wrong:
            found = (
                f"{sum(counts.values()):,} {counts or ''}" if isinstance(counts, dict) else f"{counts or ''}"
            )
            cells.append(found.strip())
        print(f"| {side} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Run the sides of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compact_peers", description=__doc__)
    parser.add_argument("peers", nargs="?", help="an interpreter that has the other libraries")
    parser.add_argument("--kind", choices=KINDS, action="append", help="observations (default: both)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted rounds (default: %(default)s)")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        size = bytes_of(*options.read)
        print(json.dumps([size, *(wrong_of(*options.read, envs) for envs in (1, 2))]))
        return
    pythons = {
        side: sys.executable if module == "compact" else options.peers
        for side, (module, _) in SIDES.items()
        if module == "compact" or options.peers
    }
    for kind in options.kind or KINDS:
        chosen = {
            side: python for side, python in pythons.items() if kind == "stacks" or "frames" not in side
        }
        compare(kind, chosen, options.rounds)


if __name__ == "__main__":
    main()
