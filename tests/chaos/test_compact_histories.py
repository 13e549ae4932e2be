"""After any history of calls, a compact storage and a plain storage return the same bits."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import (
    GleanError,
)
from tests.bits import bits_of

FULL = bool(os.environ.get("GLEANRL_CHAOS"))
ROWS = 10_000_000 if FULL else 500_000  # rows that the histories of all kinds of storages write

FIELDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "floats": ((4,), torch.float32),
    "pixels": ((2, 3, 4), torch.uint8),
    "odd": ((17,), torch.uint8),
    "doubles": ((2,), torch.float64),
    "brain": ((8,), torch.bfloat16),
    "complex": ((2,), torch.complex64),
    "short": ((3,), torch.float32),  # 12 bytes: stored twice
    "frames": ((4, 3, 2), torch.uint8),
    "last": ((2, 3, 3), torch.float32),
    "colors": ((6, 4), torch.uint8),
}
STACKS = {"frames": 4, "last": (3, -1), "colors": (3, 0)}  # the frames of observations that are stacks
FLOATS = {torch.float32: 4, torch.float64: 8, torch.bfloat16: 2, torch.complex64: 4}
SHAPES = {1: (), 2: (3,), 3: (2, 2)}


class Streams:
    """Makes steps of parallel streams, whose outcomes are repeated by the following roots except for odd ones.

    Args:
        choices: the source of random numbers.
        batch: the shape of the streams.
        oddity: the probability that an outcome isn't repeated.
        keys: the observations.
    """

    def __init__(
        self, choices: random.Random, batch: tuple[int, ...], oddity: float, keys: list[str]
    ) -> None:
        self.random = np.random.default_rng(choices.randrange(1 << 30))
        self.batch, self.streams = batch, torch.Size(batch).numel()
        self.oddity, self.keys, self.t = oddity, keys, 0
        self.now = {key: self.bits(key, 1)[0] for key in keys}

    def bits(self, key: str, count: int) -> np.ndarray:
        """Return frames ``[count, streams, frames, bytes]`` of few kinds, among them NaN payloads and both zeros."""
        (shape, dtype), (frames, _) = FIELDS[key], stack_of(key)
        size = torch.Size(shape).numel() * dtype.itemsize
        data = self.random.integers(0, 256, (count, self.streams, frames, size // frames), np.uint8)
        kind = self.random.integers(0, 4, count)
        data[kind == 0] = 0
        if dtype in FLOATS:
            data[(kind == 0) & (np.arange(count) % 2 == 1), ..., FLOATS[dtype] - 1 :: FLOATS[dtype]] = (
                128  # -0.0
            )
        data[kind == 1] = np.array([0, 127, 255], np.uint8)[data[kind == 1] % 3]  # NaNs with payloads
        return data

    def observations(self, key: str, count: int) -> np.ndarray:
        """Return the present observation and the following ones. A stack gets another frame, or begins again.

        Then it repeats its newest frame, or has zeros, or nothing of both.
        """
        made = self.bits(key, count + 1)
        made[0] = self.now[key]
        if key in STACKS:
            begins = self.random.random(count + 1) < self.oddity / 2
            padding = self.random.integers(0, 3, count + 1)
            for t in range(1, count + 1):
                if not begins[t]:
                    made[t, :, :-1] = made[t - 1, :, 1:]
                elif padding[t]:
                    made[t, :, :-1] = made[t, :, -1:] * (padding[t] == 1)
        self.now[key] = made[-1]
        return made

    def tensor(self, key: str, data: np.ndarray) -> torch.Tensor:
        """Return frames in the shape of observations, ``[count, *batch, *shape]``."""
        (shape, dtype), (frames, dim) = FIELDS[key], stack_of(key)
        frame = [size // frames if d == dim else size for d, size in enumerate(shape)]
        made = torch.from_numpy(data.copy()).view(dtype).view(-1, frames, *frame)
        return made.movedim(1, 1 + dim).reshape(len(data), *self.batch, *shape).contiguous()

    def steps(self, count: int) -> TensorDict:
        """Return `count` steps, ``[time, *batch]``."""
        roots, outcomes = {}, {}
        odd = self.random.random(count) < self.oddity
        for position, key in enumerate(self.keys):
            made = self.observations(key, count)
            roots[key], outcome = self.tensor(key, made[:-1]), made[1:].copy()
            for t in np.flatnonzero(odd & (np.arange(count) % len(self.keys) == position)):
                changed = outcome[t].reshape(-1)
                changed[self.random.integers(changed.size)] ^= 1 << (t % 8)  # one bit
            outcomes[key] = self.tensor(key, outcome)
        lead = (count, *self.batch, 1)
        ended = torch.from_numpy(self.random.random(lead) < self.oddity / 2)
        number = torch.arange(self.t + 1, self.t + count + 1).view(-1, *[1] * len(self.batch), 1).expand(lead)
        self.t += count
        data = {
            **roots,
            "action": torch.from_numpy(self.random.random((*lead[:-1], 2), np.float32)),
            "t": number.clone(),
            "next": {
                **outcomes,
                "done": ended,
                "terminated": ended & (number % 2 == 0),
                "reward": -number.float(),
            },
        }
        return TensorDict(data, lead[:-1])


def stack_of(key: str) -> tuple[int, int]:
    """Return the number of frames of an observation, and their dimension."""
    value = STACKS.get(key, 1)
    frames, dim = value if isinstance(value, tuple) else (value, 0)
    return frames, dim % len(FIELDS[key][0])


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "random": lambda size: parts.RandomSampler(),
    "once": lambda size: parts.SamplerWithoutReplacement(),
    "prioritized": lambda size: parts.PrioritizedSampler(size, alpha=0.7, beta=0.5),
    "slices": lambda size: parts.SliceSampler(num_slices=4, end_key=("next", "done"), strict_length=False),
}


class Twins:
    """A buffer over a compact storage and one over a plain storage, which get the same calls."""

    def __init__(
        self, choices: random.Random, ndim: int, sampler: str, memmap: bool, prefetch: int, folder: Path
    ) -> None:
        self.choices, self.folder, self.count = choices, folder, 0
        batch = SHAPES[ndim]
        self.streams = torch.Size(batch).numel()
        self.capacity = choices.choice([1, 2, 5, 12, 64, 900])
        size = self.capacity * self.streams
        kind = parts.LazyMemmapStorage if memmap else parts.LazyTensorStorage
        keys = choices.sample(sorted(FIELDS), choices.randint(1, 5))
        self.source = Streams(choices, batch, choices.choice([0.0, 0.1, 0.5, 1.0]), keys)
        self.other = Streams(choices, batch, 0.3, keys)
        self.kind, self.size, self.ndim, self.sampler_kind, self.prefetch = (
            kind,
            size,
            ndim,
            sampler,
            prefetch,
        )
        self.compact, self.plain = self.make(True), self.make(False)
        self.written = 0

    def make(self, compact: bool, size: int | None = None) -> Any:
        size = size or self.size
        stack = {key: STACKS[key] for key in self.source.keys if key in STACKS}
        storage = self.kind(size, ndim=self.ndim, compact=compact and parts.Compact(stack=stack))
        sampler = SAMPLERS[self.sampler_kind](size)
        return parts.TensorDictReplayBuffer(
            storage=storage,
            sampler=sampler,
            batch_size=8,
            prefetch=self.prefetch or None,
            seed=7,
            dim_extend=0,
        )

    def both(self, call: Callable[[Any], Any]) -> None:
        """Call both buffers; results and errors must be equal."""
        found = []
        for buffer in (self.compact, self.plain):
            try:
                found.append(bits_of(call(buffer)))
            except GleanError as error:
                found.append({"error": type(error).__name__})
        assert found[0] == found[1], [key for key in found[1] if found[0].get(key) != found[1][key]]

    def check(self) -> None:
        """Compare everything that is stored."""
        self.compact.storage.check_valid()
        self.both(lambda buffer: buffer.storage.get(slice(None)) if len(buffer) else None)
        for name in ("num_steps", "end", "rows_written", "ordered", "overwritten"):
            assert getattr(self.compact.storage, name) == getattr(self.plain.storage, name), name

    def rows(self, count: int) -> TensorDict:
        source = self.other if self.choices.random() < 0.2 else self.source
        self.written += count * self.streams
        return source.steps(count)

    # One method for each kind of call

    def extend(self) -> None:
        data = self.rows(
            self.choices.choice([1, 2, 3, self.capacity, self.choices.randint(1, 2 * self.capacity)])
        )
        self.both(lambda buffer: buffer.extend(data.clone()))

    def add(self) -> None:
        data = self.rows(1)[0]
        self.both(lambda buffer: buffer.add(data.clone()))

    def sample(self) -> None:
        self.both(lambda buffer: buffer.sample(return_info=True))

    def sample_keys(self) -> None:
        key = self.choices.choice([("next", self.source.keys[0]), self.source.keys[0], "next", "t"])
        self.both(lambda buffer: buffer.sample(keys=[key]) if not self.prefetch else None)

    def priorities(self) -> None:
        index = torch.randint(max(len(self.plain.storage), 1), (3,))
        if self.sampler_kind == "prioritized" and self.ndim == 1 and len(self.plain):
            self.both(lambda buffer: buffer.update_priority(index, 1.0 + index))

    def get(self) -> None:
        steps = max(self.plain.storage.num_steps, 1)
        one, two = sorted(self.choices.randrange(steps) for _ in range(2))
        index = self.choices.choice(
            [one, -1, slice(one, two + 1), slice(None, None, 2), [one, two, one], ..., self.source.keys[0]]
            + [("next", self.source.keys[-1]), ("next", "done"), "next", torch.arange(steps) % 2 == 0]
        )
        self.both(lambda buffer: buffer.storage.get(index))
        self.both(lambda buffer: buffer[index])

    def set(self) -> None:
        storage = self.plain.storage
        start = self.choices.randrange(storage.num_steps + 1) % self.capacity
        count = self.choices.randint(1, self.capacity)
        steps = [(start + place) % self.capacity for place in range(count)]
        if self.choices.random() < 0.5:
            self.choices.shuffle(steps)
        if self.choices.random() < 0.3:
            steps = [self.choices.choice(steps) for _ in steps]
        data = self.rows(count)
        self.both(lambda buffer: buffer.storage.set(steps, data.clone()))

    def set_one(self) -> None:
        step, data = self.choices.randrange(self.capacity), self.rows(1)[0]
        self.both(lambda buffer: buffer.storage.set(step, data.clone()))

    def assign(self) -> None:
        if len(self.plain):
            step, data = self.choices.randrange(self.plain.storage.num_steps), self.rows(1)[0]
            self.both(lambda buffer: buffer.__setitem__(step, data.clone()))

    def move_inside(self) -> None:
        """Write stored records to other slots."""
        if len(self.plain):
            steps = self.plain.storage.num_steps
            to, of = self.choices.randrange(steps), self.choices.randrange(steps)
            self.both(lambda buffer: buffer.__setitem__(to, buffer.storage.get(of)))
            self.both(lambda buffer: buffer.extend(buffer.storage.get(slice(of, None))))

    def assign_column(self) -> None:
        if len(self.plain):
            key = self.choices.choice(
                [self.source.keys[0], ("next", self.source.keys[0]), ("next", "reward")]
            )
            column = self.plain.storage.get(slice(None)).get(key).clone()
            column = column.roll(self.choices.randint(0, 2), 0)
            self.both(lambda buffer: buffer.__setitem__(key, column.clone()))

    def write_view(self) -> None:
        """Write flags through a live view."""
        if len(self.plain):
            step, value = self.choices.randrange(self.plain.storage.num_steps), self.choices.random() < 0.5
            self.both(lambda buffer: buffer.storage.get(step)["next", "done"].fill_(value))

    def move_end(self) -> None:
        step = self.choices.randrange(self.capacity)
        self.both(lambda buffer: setattr(buffer.storage, "end", step))

    def empty(self) -> None:
        if self.choices.random() < 0.3:
            self.both(lambda buffer: buffer.empty())

    def exchange_states(self) -> None:
        """Load the state of each buffer into a new buffer of the other kind, perhaps of another size."""
        states = self.compact.state_dict(), self.plain.state_dict()
        size = self.size if self.choices.random() < 0.7 or self.prefetch else self.size + self.streams
        self.compact, self.plain = self.make(True, size), self.make(False, size)
        self.size, self.capacity = size, size // self.streams
        self.compact.load_state_dict(states[1])
        self.plain.load_state_dict(states[0])

    def load_over(self) -> None:
        """Load a state over later content."""
        states = self.compact.state_dict(), self.plain.state_dict()
        self.extend()
        self.compact.load_state_dict(states[1])
        self.plain.load_state_dict(states[0])

    def exchange_checkpoints(self) -> None:
        """Load the checkpoint of each buffer into a buffer of the other kind, in place or new."""
        self.count += 1
        paths = [self.folder / f"{self.count}-{kind}" for kind in ("compact", "plain")]
        self.compact.dumps(paths[0])
        self.plain.dumps(paths[1])
        if self.choices.random() < 0.5:
            size = self.size if self.choices.random() < 0.7 or self.prefetch else self.size + self.streams
            self.compact, self.plain = self.make(True, size), self.make(False, size)
            self.size, self.capacity = size, size // self.streams
        else:
            self.extend()
        self.compact.loads(paths[1])
        self.plain.loads(paths[0])

    def copy(self) -> None:
        make = self.choices.choice([copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
        self.compact, self.plain = make(self.compact), make(self.plain)

    def snapshot(self) -> None:
        """Take snapshots, write, and compare the snapshots."""
        values = [buffer.storage.snapshot() for buffer in (self.compact, self.plain)]
        for _ in range(self.choices.randint(1, 3)):
            self.choices.choice([self.extend, self.add, self.set, self.assign])()
        states = [
            buffer.storage.plain_state(value)
            for buffer, value in zip((self.compact, self.plain), values, strict=True)
        ]
        found = [
            bits_of({k: v for k, v in state.items() if k in ("columns", "num_steps", "end")})
            for state in states
        ]
        assert found[0] == found[1]

    def inspect(self) -> None:
        if len(self.plain) and self.ndim == 1:
            self.both(lambda buffer: repr(buffer.verify()))

    def column(self) -> None:
        slots = torch.randint(max(len(self.plain.storage), 1), (5,))
        path = self.choices.choice([(self.source.keys[0],), ("next", self.source.keys[0])])
        if len(self.plain):
            self.both(lambda buffer: buffer.storage.column(path)[slots])
            self.both(lambda buffer: buffer.storage.column(path)[: len(buffer.storage)])


WRITES = (
    "extend",
    "extend",
    "extend",
    "add",
    "add",
    "set",
    "set_one",
    "assign",
    "assign_column",
    "move_inside",
)
READS = ("sample", "sample", "get", "sample_keys", "column", "priorities", "inspect")
RARE = (
    "empty",
    "write_view",
    "move_end",
    "exchange_states",
    "load_over",
    "exchange_checkpoints",
    "copy",
    "snapshot",
)


# Random bits are also signalling NaNs.
@pytest.mark.timeout(7200 if FULL else 600)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("memmap", [False, True], ids=["ram", "memmap"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_random_histories_give_the_same_bits(ndim: int, memmap: bool, tmp_path: Path) -> None:
    rows, seed = 0, 0
    while rows < ROWS // 6:
        seed += 1
        choices = random.Random(f"{ndim} {memmap} {seed}")
        torch.manual_seed(seed)
        sampler = choices.choice(sorted(SAMPLERS))
        twins = Twins(choices, ndim, sampler, memmap, choices.choice([0, 0, 2]), tmp_path)
        history: list[str] = []
        try:
            for _ in range(choices.randint(10, 60)):
                group = choices.choices((WRITES, READS, RARE), (5, 3, 1))[0]
                history.append(choices.choice(group))
                getattr(twins, history[-1])()
                twins.check()
        except BaseException as error:
            error.add_note(
                f"seed {seed}, {sampler}, capacity {twins.capacity}, {twins.source.keys}: {history}"
            )
            raise
        rows += twins.written
