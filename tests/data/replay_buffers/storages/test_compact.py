"""After any history of calls, a compact storage and a plain storage return the same bits."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import re
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl._checkpoint.row_segments import bytes_of
from gleanrl._os import fault_points
from gleanrl.data import replay_buffers as parts
from gleanrl.errors import (
    CapacityError,
    GleanError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    UnsupportedError,
)
from tests.data.replay_buffers.sharing import in_child
from tests.interrupts import double_interruptions, in_another_thread, interruptions

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


def bits_of(value: Any) -> dict[Any, Any]:
    """Return the bits of all tensors in a result, by key."""
    if isinstance(value, torch.Tensor):
        return {(): (value.dtype, value.shape, bytes_of(value).tobytes())}
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        return {(key, *rest): bits for key, part in value.items() for rest, bits in bits_of(part).items()}
    if isinstance(value, (list, tuple)):
        return {(key, *rest): bits for key, part in enumerate(value) for rest, bits in bits_of(part).items()}
    return {(): value}


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


def chained(
    count: int, first: int = 0, length: int = 50, width: int = 4, odd: int = 0, frames: int = 0
) -> TensorDict:
    """Return steps of one stream, numbered from `first` on, in episodes of `length` steps.

    All numbers of an observation are the number of its step. Outcomes repeat the following root, except at the end of
    an episode, and in each step whose number `odd` divides. There they are negative. With `frames`, an observation is a
    stack of so many frames ``[frames, width]``; the first ones of an episode repeat its first frame.
    """
    t = torch.arange(first, first + count)
    done = (t % length == length - 1)[:, None]
    apart = done | ((t % odd == 0)[:, None] if odd else done)
    root = t[:, None].double()
    outcome = root + 1
    if frames:
        start = root - root % length
        root, outcome = (
            torch.maximum(last + torch.arange(1.0 - frames, 1), start) for last in (root, outcome)
        )
        root, outcome, apart = root[..., None], outcome[..., None], apart[..., None]
    outcome = torch.where(apart, -outcome, outcome)
    root, outcome = (rows.expand(*rows.shape[:-1], width).clone() for rows in (root, outcome))
    flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
    after = {"observation": outcome, "reward": t[:, None].double(), **flags}
    return TensorDict({"observation": root, "t": t, "next": after}, [count])


def right(batch: TensorDict, length: int = 50, odd: int = 0) -> bool:
    """Return whether each row is one of `chained`."""
    *frames, width = batch["observation"].shape[1:]
    expected = torch.cat([chained(1, int(t), length, width, odd, *frames) for t in batch["t"]])
    keys = ["observation", ("next", "observation"), ("next", "reward")]
    return all(torch.equal(batch[key], expected[key]) for key in keys)


def compact(size: int, **options: Any) -> Any:
    return parts.LazyTensorStorage(size, compact=True, **options)


def test_only_outcomes_at_the_ends_of_episodes_are_stored_apart() -> None:
    buffer = parts.ReplayBuffer(storage=compact(1000), batch_size=64)
    for first in range(0, 3000, 100):
        buffer.extend(chained(100, first))
    assert "20 of 1000 outcomes stored apart" in repr(buffer.storage)
    assert right(buffer.sample()) and right(buffer[:])
    assert buffer.describe()[("next", "observation")].megabytes == 20 * 32 / 1e6
    assert buffer.describe()["observation"].megabytes == 1000 * 32 / 1e6


@pytest.mark.parametrize("batch", [7, 100, 1000])
def test_each_frame_of_a_stack_is_stored_once(batch: int) -> None:
    buffer = parts.ReplayBuffer(storage=compact(1000), batch_size=64)
    for first in range(0, 3010, batch):
        buffer.extend(chained(batch, first, width=16, frames=4))
    text = repr(buffer.storage)
    assert "stack={'observation': 4}, " in text
    ends, moved = (int(part.split()[0]) for part in re.findall(r"\d+ of 1000 \w+ stored apart", text))
    assert ends <= 22 and moved <= 3, "the ends of episodes, and the oldest steps"
    assert right(buffer.sample()) and right(buffer[:])
    assert buffer.describe()["observation"].megabytes == (1000 * 128 + moved * 512) / 1e6
    assert buffer.describe()[("next", "observation")].megabytes == ends * 512 / 1e6
    buffer.storage.check_valid()


def channels_last(data: TensorDict) -> TensorDict:
    for key in ("observation", ("next", "observation")):
        data[key] = data[key].transpose(-1, -2).contiguous()
    return data


def test_stacks_are_found_in_the_first_records() -> None:
    found = {
        "{'observation': 4}": [
            chained(20, width=16, frames=4),
            chained(1, 7, width=16, frames=4)[0],
            channels_last(chained(20, width=16, frames=4)),
            chained(20, width=16, odd=3, frames=4),
        ],
        "": [
            chained(20, width=32),
            chained(20, width=2, frames=4),  # frames of 16 bytes
            torch.zeros_like(chained(20, width=16, frames=4)),
        ],
    }
    for expected, batches in found.items():
        for data in batches:
            buffer = parts.ReplayBuffer(storage=compact(100))
            buffer.add(data) if not data.ndim else buffer.extend(data)
            assert ("stack=" + expected in repr(buffer.storage)) == bool(expected)
            assert bits_of(buffer[0]) == bits_of(data if not data.ndim else data[0])


def test_declared_stacks_are_checked() -> None:
    for stack, error in (
        ({"observation": 1}, InvalidArgumentError),
        ({"observation": "4"}, InvalidTypeError),
        ({"observation": (4, 0, 0)}, InvalidTypeError),
        (4, InvalidTypeError),
    ):
        with pytest.raises(error, match="stack: expected"):
            parts.Compact(stack=stack)
    with pytest.raises(InvalidTypeError, match="compact: expected True, False or a Compact, got 4"):
        parts.LazyTensorStorage(5, compact=4)
    for stack, reason in (
        ({"pixels": 4}, "got 'pixels'"),
        ({"t": 4}, "got 't'"),
        ({"observation": 5}, r"multiple of 5 frames, got the shape \(4, 16\)$"),
        ({"observation": (4, 2)}, "dimension 2"),
        ({"observation": (3, 1)}, "dimension 1"),
    ):
        storage = parts.LazyTensorStorage(50, compact=parts.Compact(stack=stack))
        with pytest.raises(SchemaError, match=reason):
            storage.set(range(20), chained(20, width=16, frames=4))
        assert not storage.initialized
    storage = parts.LazyTensorStorage(50, compact=parts.Compact(stack={}))
    storage.set(range(20), chained(20, width=16, frames=4))
    assert "stack" not in repr(storage)
    storage = parts.LazyTensorStorage(50, compact=parts.Compact(stack={"observation": 16}))
    storage.set(range(20), chained(20, width=16, frames=4))
    assert right(storage.get(slice(None))), "wrongly declared stacks only take more memory"


@pytest.mark.parametrize("way", ["state", "checkpoint"])
@pytest.mark.parametrize("of", ["compact", "plain"])
def test_loads_find_stacks(way: str, of: str, tmp_path: Path) -> None:
    source, other = (
        parts.ReplayBuffer(storage=parts.LazyTensorStorage(100, compact=is_compact), batch_size=64)
        for is_compact in (of == "compact", True)
    )
    source.extend(chained(130, width=16, odd=9, frames=4))
    if way == "state":
        other.load_state_dict(source.state_dict())
    else:
        source.dumps(tmp_path)
        other.loads(tmp_path)
    assert "stack={'observation': 4}" in repr(other.storage)
    other.extend(chained(30, 130, width=16, odd=9, frames=4))
    assert right(other[:], odd=9) and right(other.sample(), odd=9)
    other.storage.check_valid()


def test_interleaved_streams_of_one_dimension_are_stored_apart() -> None:
    storage = compact(100)
    rows = torch.stack([chained(50), chained(50, 1000)], 1).reshape(-1)
    storage.set(range(100), rows)
    assert "100 of 100 outcomes stored apart" in repr(storage)
    assert right(storage.get(slice(None)))
    storage = compact(100, ndim=2)
    storage.set(range(50), torch.stack([chained(50), chained(50, 1000)], 1))
    assert "2 of 100 outcomes stored apart" in repr(storage)


def test_a_correction_keeps_the_neighbours() -> None:
    storage = compact(20)
    storage.set(range(20), chained(20))
    storage[5] = chained(1, 700)[0]
    found = storage.get(slice(None))
    assert right(found) and found["t"][5] == 700
    storage[5] = chained(1, 5)[0]
    storage.check_valid()
    assert right(storage.get(slice(None)))
    assert "2 of 20 outcomes stored apart" in repr(storage), "the last step of each write"


def test_views_of_shared_entries_are_copies_and_all_others_are_live() -> None:
    storage = compact(20)
    storage.set(range(20), chained(20))
    view = storage.get(slice(3, 6))
    for key in ("observation", ("next", "observation")):
        view[key].zero_()
        storage.get(key).zero_()
    storage.get(7)["next", "reward"].zero_()
    storage.get(("next", "done"))[8] = True
    found = storage.get(slice(None))
    assert torch.equal(found["observation"], chained(20)["observation"])
    assert torch.equal(found["next", "observation"], chained(20)["next", "observation"])
    assert found["next", "reward"][7] == 0 and found["next", "done"][8]


def test_a_key_is_read_alone() -> None:
    storage = compact(1_000_000)
    storage.set(range(10), chained(10))
    assert storage.get("t").shape == (10,)
    assert set(storage.get("next").keys()) == {"observation", "reward", "done", "terminated", "truncated"}


def test_refused_uses_name_an_alternative() -> None:
    class Derived(parts.LazyTensorStorage):
        """A storage of a user."""

    for make in (
        lambda: parts.LazyTensorStorage(5, device="auto", compact=True),
        lambda: parts.LazyTensorStorage(5, device="meta", compact=True),
        lambda: Derived(5, compact=True),
        lambda: parts.ReplayBuffer(storage=compact(5), shared=True),
        lambda: parts.ReplayBuffer(storage=parts.LazyMemmapStorage(5, compact=True)).share(),
    ):
        with pytest.raises(
            UnsupportedError, match="leave out compact|use a real device|expected|LazyTensorStorage"
        ):
            make()
    storage = compact(6, ndim=2)
    storage.set(range(3), torch.stack([chained(3), chained(3, 9)], 1))
    with pytest.raises(UnsupportedError, match="build it without compact"):
        storage.flatten()
    column = storage.column(("next", "observation"))
    with pytest.raises(UnsupportedError, match=r"column\(path\)\[slots\]"):
        column.mean()
    assert column[torch.tensor([1])].shape == (1, 4) and column[:2].dtype == column.dtype
    buffer = parts.ReplayBuffer(storage=storage)
    with pytest.raises(UnsupportedError, match="write the keys with the first records"):
        buffer["new"] = torch.zeros(2, 3, 1)
    assert right(storage.get(slice(None)).reshape(-1))


def test_records_without_repeated_entries_are_stored_as_usual() -> None:
    for data in (torch.arange(12.0).view(3, 4), chained(3).exclude("observation"), chained(3, width=1)):
        storage = compact(3)
        storage.set(range(3), data)
        assert bits_of(storage.get(slice(None))) == bits_of(data)


def test_an_outcome_of_an_outcome_is_stored_as_usual() -> None:
    data = chained(9)
    data["next", "next"] = chained(9, 1).select("observation")
    storage = compact(20)
    storage.set(range(9), data)
    assert bits_of(storage.get(slice(None))) == bits_of(data)
    assert "1 of 9 outcomes stored apart" in repr(storage)


def test_lists_are_stored_next_to_shared_entries() -> None:
    data = chained(4)
    buffer = parts.ReplayBuffer(storage=compact(4), batch_size=4)
    texts = [f"step {t}" for t in range(4)]
    for t in range(4):
        record = data[t].clone()
        record.set_non_tensor("text", texts[t])
        buffer.add(record)
    assert buffer[:]["text"] == texts and right(buffer[:])
    again = parts.ReplayBuffer(storage=compact(4), batch_size=4)
    again.load_state_dict(buffer.state_dict())
    assert again[:]["text"] == texts and right(again[:])


def test_a_full_disk_refuses_the_write_and_changes_nothing(tmp_path: Path) -> None:
    buffer = parts.ReplayBuffer(storage=parts.LazyMemmapStorage(40, scratch_dir=tmp_path, compact=True))
    full = fault_points.At(OSError(errno.ENOSPC, "No space left on device"), 7)  # the six columns exist
    with (
        fault_points.inject({"fs.reserve": full}),
        pytest.raises(CapacityError, match="spare rows: .*No space left"),
    ):
        buffer.extend(chained(20, odd=2))
    assert len(buffer) == 0
    buffer.extend(chained(20, odd=2))
    assert right(buffer[:], odd=2)
    sizes = {file.name: file.stat() for file in tmp_path.rglob("observation.memmap")}
    assert [found.st_size for found in sizes.values()] == [(2 * 40 + 2) * 32]


def test_a_load_replaces_the_files_of_a_directory(tmp_path: Path) -> None:
    def make(name: str) -> Any:
        storage = parts.LazyMemmapStorage(20, scratch_dir=tmp_path / name, compact=True)
        return parts.ReplayBuffer(storage=storage, batch_size=8)

    one, other = make("one"), make("other")
    one.extend(chained(30, odd=3))
    other.extend(chained(7, 100))
    one.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert right(other[:], odd=3) and other[:]["t"].max() == 29
    other.extend(chained(15, 30, odd=3))
    assert right(other[:], odd=3) and right(other.sample(), odd=3)
    other.storage.check_valid()
    files = {
        file.relative_to(tmp_path / "other").as_posix() for file in (tmp_path / "other").rglob("*.memmap")
    }
    flags = {f"next/{flag}.memmap" for flag in ("done", "terminated", "truncated")}
    assert files == {"observation.memmap", "t.memmap", "next/reward.memmap", *flags}


def test_a_forked_process_reads_a_copy_in_memory_but_no_files() -> None:
    for storage in (compact(20), parts.LazyMemmapStorage(20, compact=True)):
        buffer = parts.ReplayBuffer(storage=storage, batch_size=8)
        buffer.extend(chained(30))

        def reads(buffer: Any = buffer) -> None:
            assert right(buffer.sample()) and right(buffer[:])
            buffer.extend(chained(5, 30))
            assert right(buffer[:])

        def is_refused(buffer: Any = buffer) -> None:
            for call in (
                buffer.sample,
                lambda: buffer.extend(chained(2)),
                lambda: buffer[:],
                buffer.state_dict,
            ):
                with pytest.raises(UnsupportedError, match="forked process"):
                    call()

        assert in_child(is_refused if isinstance(storage, parts.LazyMemmapStorage) else reads) == 0
        assert right(buffer[:])


@pytest.mark.parametrize("frames", [0, 4])
@pytest.mark.parametrize("ahead", [None, 2])
def test_batches_are_right_while_a_writer_moves_rows(ahead: int | None, frames: int) -> None:
    odd, size = 3, 40
    rows = partial(chained, width=2000 if not frames else 500, odd=odd, frames=frames)
    buffer = parts.ReplayBuffer(storage=compact(size), batch_size=32, prefetch=ahead)
    buffer.extend(rows(size))
    stop, failures, counts = threading.Event(), [], [0, 0, 0]

    def read(which: int) -> None:
        try:
            while not stop.is_set():
                if which == 2:
                    state = parts.LazyTensorStorage(size)
                    state.load_state_dict(buffer.storage.state_dict())
                    found = state.get(slice(None))
                else:
                    found = buffer.sample()
                assert right(found, odd=odd)
                counts[which] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    t = size
    while min(counts) < 20 and not failures:
        count = t % 7 + 1
        if t % 5:
            buffer.extend(rows(count, t))
            t += count
        else:
            slot = t % size
            buffer[slot] = rows(1, t)[0]
            t += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    buffer.storage.check_valid()


@pytest.mark.parametrize("frames", [0, 4])
@pytest.mark.parametrize("way", ["ring", "slots"])
def test_snapshots_keep_rows_that_move_after_them(way: str, frames: int) -> None:
    width = 40_000  # a snapshot copies pieces of 256 KB, so each row is one
    storage = compact(12)
    buffer = parts.ReplayBuffer(storage=storage)
    rows = partial(chained, width=width, frames=frames)
    buffer.extend(rows(17))
    before, value = storage.get(slice(None)).clone(), storage.snapshot()
    if way == "ring":
        for t in range(17, 21):  # the newest step's outcome leaves its spare row, which is used again
            buffer.add(rows(1, t)[0])
    else:
        storage.set([9, 2], rows(2, 800))  # the outcomes of slots 8 and 1 leave the slots behind them
    other = parts.LazyTensorStorage(12)
    other.load_state_dict(storage.plain_state(value))
    assert bits_of(other.get(slice(None))) == bits_of(before)


class Overtaken:
    """Rows that are read after a writer has been called, once for each read."""

    def __init__(self, columns: Any, writes: list[Callable[[], Any]]) -> None:
        self.columns, self.writes = columns, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.columns, name)

    def gather(self, *arguments: Any) -> Any:
        if self.writes:
            self.writes.pop(0)()
        return self.columns.gather(*arguments)


def test_outcomes_that_move_during_a_read_are_read_again() -> None:
    def overtaken(written: int, *writes: Callable[[Any], Any]) -> tuple[Any, Overtaken]:
        storage = compact(20)
        buffer = parts.ReplayBuffer(storage=storage)
        buffer.extend(chained(written))
        store = storage._table.columns
        store.apart = Overtaken(store.apart, [lambda write=write: write(buffer) for write in writes])
        return storage, store.apart

    def follow(buffer: Any) -> None:
        """Let the newest step's outcome leave its spare row, which then serves another step."""
        for t in (10, 11, 12):
            buffer.add(chained(1, t)[0])

    def correct(buffer: Any) -> None:
        """Let the outcome of step 8 leave the slot of step 9."""
        buffer[9] = chained(1, 700)[0]

    def many(buffer: Any) -> None:
        """Make more writes than a reader can find."""
        correct(buffer)
        for _ in range(300):
            buffer[0] = chained(1, 900)[0]

    for slot, *writes in ((9, follow), (8, correct), (8, many), (8, follow, correct), (8, *[correct] * 9)):
        storage, left = overtaken(10, *writes)
        assert right(storage.fetch(torch.tensor([3, slot, 4]))), writes
        assert len(left.writes) <= 4, "the last try makes writers wait"


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "extend": lambda buffer, rows: buffer.extend(rows(5, 60, odd=3)),
    "extend_all": lambda buffer, rows: buffer.extend(rows(30, 60, odd=3)),
    "continue": lambda buffer, rows: buffer.extend(rows(5, 25, odd=7)),
    "add": lambda buffer, rows: buffer.add(rows(1, 60)[0]),
    "set": lambda buffer, rows: buffer.__setitem__(slice(2, 5), rows(3, 60, odd=2)),
    "set_some": lambda buffer, rows: buffer.storage.set([7, 3, 4, 3], rows(4, 60, odd=2)),
    "column": lambda buffer, rows: buffer.__setitem__("observation", buffer[:]["observation"].flip(0)),
    "empty": lambda buffer, rows: buffer.empty(),
    "load": lambda buffer, rows: buffer.load_state_dict(saved(rows)),
}


def filled(is_compact: bool, written: int = 25, rows: Callable[..., TensorDict] = chained) -> Any:
    buffer = parts.ReplayBuffer(storage=parts.LazyTensorStorage(20, compact=is_compact), batch_size=8, seed=0)
    buffer.extend(rows(written, odd=7))
    return buffer


@cache
def saved(rows: Callable[..., TensorDict]) -> Any:
    return filled(False, 17, rows).state_dict()


def content(buffer: Any) -> dict[Any, Any]:
    state = buffer.state_dict()["_storage"]
    return bits_of({key: state[key] for key in ("columns", "num_steps", "end") if key in state})


@pytest.mark.slow
@pytest.mark.parametrize("rows", [chained, partial(chained, width=16, frames=4)], ids=["rows", "stacks"])
@pytest.mark.parametrize("kind", ["once", "twice"])
@pytest.mark.parametrize("call", CALLS)
def test_interrupted_write_is_whole_or_absent(call: str, kind: str, rows: Callable[..., TensorDict]) -> None:
    make, change = partial(filled, rows=rows), partial(CALLS[call], rows=rows)
    saved(rows)
    plain = [make(False), make(False)]
    change(plain[1])
    states = [content(buffer) for buffer in plain]
    interrupted = interruptions if kind == "once" else double_interruptions
    for subject, place in interrupted(lambda: make(True), change, 120):
        try:
            found = in_another_thread(lambda subject=subject: content(subject))
            assert found in states, "half a change"
            subject.storage.check_valid()
            other = make(False)
            if found == states[1]:
                change(other)
            for buffer in (subject, other):
                buffer.extend(rows(13, 100, odd=4))
                buffer[3] = rows(1, 200)[0]
                buffer.extend(rows(9, 113, odd=4))
            assert content(subject) == content(other)
            subject.storage.check_valid()
        except Exception as error:
            raise AssertionError(f"interrupted at {place}: {error}") from error


def test_other_parts_get_the_same_records() -> None:
    def goals(storage: Any) -> Any:
        reward = lambda rows: (rows["next", "observation"] - rows["desired_goal"]).sum(-1, keepdim=True)  # noqa: E731
        buffer = parts.HERReplayBuffer(
            reward, achieved_goal_key="observation", strategy="future", storage=storage, batch_size=32, seed=0
        )
        buffer.extend(TensorDict({**chained(90, odd=7), "desired_goal": torch.zeros(90, 4).double()}, [90]))
        return buffer

    def best(storage: Any) -> Any:
        writer = parts.TensorDictMaxValueWriter(rank_key=("next", "reward"))
        buffer = parts.ReplayBuffer(storage=storage, writer=writer, batch_size=32, seed=0)
        for first in (60, 0, 120, 30):
            buffer.extend(chained(30, first, odd=7))
        return buffer

    def ensemble(storage: Any) -> Any:
        members = [filled(isinstance(storage, type(compact(1)))) for _ in range(2)]
        return parts.ReplayBufferEnsemble(*members, batch_size=32)

    for make in (goals, best, ensemble):
        found = [make(storage) for storage in (compact(60), parts.LazyTensorStorage(60))]
        for _ in range(5):
            torch.manual_seed(0)
            one = found[0].sample()
            torch.manual_seed(0)
            assert bits_of(one) == bits_of(found[1].sample()), make.__name__
