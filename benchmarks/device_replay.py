"""Buffers on the accelerator against rings of tensors there, and batches that move to it from the CPU's memory.

Each turn ends when the device has finished its work. Without an accelerator everything runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Setup, Work
from benchmarks.slices import LENGTH, SLICES, Table
from benchmarks.workload import (
    DEVICE,
    IMAGE_CHUNK,
    STORED,
    Columns,
    as_tensordict,
    episode_rows,
    first_priorities,
    rows,
    settle_device,
    stored,
)
from gleanrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

RING = {"cartpole": 100_000, "image": 4_000}
"""Rows of the buffers in the cases of `extend`."""
EXTEND, BATCH, AHEAD = 200, 256, 3
ALPHA, BETA = 0.6, 0.4
HAND = "ring by hand"
PAYLOADS = {"cartpole": "CartPole-like rows (11 leaves)", "image": "84x84x4 uint8 pairs (11 leaves)"}


def turns(calls: int, call: Callable[[], Any]) -> Work:
    """Return work that makes `calls` calls and waits until the device has finished them."""

    def work() -> int:
        for _ in range(calls):
            call()
        settle_device()
        return calls

    return work


class Ring:
    """A ring of columns on the accelerator, written at a cursor and read by index.

    Args:
        columns: the first rows; their number is the size of the ring.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = [torch.from_numpy(column).to(DEVICE) for column in columns.values()]
        self.num_rows, self._cursor = len(self.columns[0]), 0

    def extend(self, leaves: Sequence[Tensor]) -> None:
        """Copy rows to the cursor. The ring's size must be a multiple of their number."""
        stop = self._cursor + len(leaves[0])
        for column, leaf in zip(self.columns, leaves, strict=True):
            column[self._cursor : stop].copy_(leaf)
        self._cursor = stop % self.num_rows

    def read(self, index: Tensor) -> list[Tensor]:
        """Return the rows at an index on the accelerator, (n,) int64."""
        return [column.index_select(0, index) for column in self.columns]


def full_ring(kind: str) -> Ring:
    """Return a ring that holds `stored(kind)`."""
    return Ring(stored(kind))


def our_buffer(kind: str, device: str = DEVICE, **options: Any) -> ReplayBuffer:
    """Return a buffer on a device that holds `stored(kind)`."""
    size = STORED[kind]
    made = ReplayBuffer(storage=LazyTensorStorage(size, device=device), **options)
    step = IMAGE_CHUNK if kind == "image" else size
    chunk = as_tensordict(rows(kind, step))
    for _ in range(size // step):
        made.extend(chunk)
    return made


def extending(kind: str, source: str, calls: int) -> dict[str, Setup]:
    """Return the sides of `extend` with EXTEND rows that are on the device `source`."""

    def by_hand() -> Work:
        ring = Ring(
            {path: column.repeat(RING[kind] // EXTEND, 0) for path, column in rows(kind, EXTEND).items()}
        )
        leaves = [torch.from_numpy(column).to(source) for column in rows(kind, EXTEND).values()]
        return turns(calls, lambda: ring.extend(leaves))

    def ours() -> Work:
        made = ReplayBuffer(storage=LazyTensorStorage(RING[kind], device=DEVICE))
        data = as_tensordict(rows(kind, EXTEND)).to(source)
        for _ in range(RING[kind] // EXTEND):
            made.extend(data)
        return turns(calls, lambda: made.extend(data))

    return {HAND: by_hand, "gleanrl": ours}


def sampling(kind: str, batch: int, calls: int) -> dict[str, Setup]:
    """Return the sides of uniform samples. One ring draws its indices on the device, one gets them from the CPU."""

    def by_hand() -> Work:
        ring = full_ring(kind)
        return turns(calls, lambda: ring.read(torch.randint(ring.num_rows, (batch,), device=DEVICE)))

    def from_the_cpu() -> Work:
        ring = full_ring(kind)
        return turns(calls, lambda: ring.read(torch.randint(ring.num_rows, (batch,)).to(DEVICE)))

    def ours() -> Work:
        made = our_buffer(kind)
        return turns(calls, lambda: made.sample(batch))

    return {HAND: by_hand, f"{HAND}, indices of the CPU": from_the_cpu, "gleanrl": ours}


def prioritized(calls: int) -> dict[str, Setup]:
    """Return the sides of samples with weights, each followed by new priorities that are on the accelerator."""
    size = STORED["cartpole"]

    def by_hand() -> Work:
        ring, errors = full_ring("cartpole"), torch.rand(BATCH, device=DEVICE) + 0.01
        priority = torch.from_numpy(first_priorities(size)).to(DEVICE) ** ALPHA

        def call() -> None:
            sums = priority.cumsum(0)
            index = torch.searchsorted(sums, torch.rand(BATCH, device=DEVICE) * sums[-1]).clamp_(max=size - 1)
            ring.read(index).append((priority[index] / priority.min()) ** -BETA)
            priority[index] = errors**ALPHA

        return turns(calls, call)

    def ours() -> Work:
        made = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(size, device=DEVICE), batch_size=BATCH
        )
        index = made.extend(as_tensordict(stored("cartpole")))
        made.update_priority(index, torch.from_numpy(first_priorities(size)))
        errors = torch.rand(BATCH, device=DEVICE) + 0.01

        def call() -> None:
            batch = made.sample()
            batch["td_error"] = errors
            made.update_tensordict_priority(batch)

        return turns(calls, call)

    return {HAND: by_hand, "gleanrl": ours}


def slicing(calls: int) -> dict[str, Setup]:
    """Return the sides of samples of SLICES slices of LENGTH steps."""
    size = STORED["cartpole"]

    def by_hand() -> Work:
        columns = episode_rows(size)
        ring, table = Ring(columns), Table(columns)
        starts, choices = (torch.from_numpy(array).to(DEVICE) for array in (table.starts, table.choices))
        steps = torch.arange(LENGTH, device=DEVICE)

        def call() -> None:
            episode = torch.randint(len(starts), (SLICES,), device=DEVICE)
            ahead = (torch.rand(SLICES, device=DEVICE) * choices[episode]).long()
            ring.read(((starts[episode] + ahead)[:, None] + steps).flatten())

        return turns(calls, call)

    def ours() -> Work:
        made = TensorDictReplayBuffer(
            storage=LazyTensorStorage(size, device=DEVICE),
            sampler=SliceSampler(num_slices=SLICES),
            batch_size=SLICES * LENGTH,
        )
        made.extend(as_tensordict(episode_rows(size)))
        return turns(calls, made.sample)

    return {HAND: by_hand, "gleanrl": ours}


class Sender:
    """A hand-written loop that gathers rows on the CPU into pinned memory and copies them to the accelerator.

    It has two sets of pinned tensors. While one set is copied, the next rows are gathered into the other.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = [torch.from_numpy(column) for column in columns.values()]
        pinned = {"pin_memory": DEVICE == "cuda"}
        self._slots = [
            [torch.empty(BATCH, *column.shape[1:], dtype=column.dtype, **pinned) for column in self._columns]
            for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in self._slots] if DEVICE == "cuda" else []
        self._turn = 0

    def send(self) -> list[Tensor]:
        """Return a batch on the accelerator. Its copies may still be in progress."""
        self._turn = 1 - self._turn
        slot = self._slots[self._turn]
        if self._copied:
            # The rows of two batches ago must have left the pinned memory before new rows are written there.
            self._copied[self._turn].synchronize()
        index = torch.randint(len(self._columns[0]), (BATCH,))
        for column, out in zip(self._columns, slot, strict=True):
            torch.index_select(column, 0, index, out=out)
        batch = [leaf.to(DEVICE, non_blocking=True) for leaf in slot]
        if self._copied:
            self._copied[self._turn].record()
        return batch


def no_learner(observation: Tensor) -> None:
    """Do nothing with a batch."""


class Convolutions:
    """A step of a learner: the forward and the backward pass of three convolutions over a batch of frames."""

    def __init__(self) -> None:
        layers = nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)
        self._net = nn.Sequential(*layers).to(DEVICE)

    def __call__(self, observation: Tensor) -> None:
        """Compute gradients for observations (batch, height, width, 4)."""
        self._net.zero_grad()
        self._net(observation.permute(0, 3, 1, 2).float()).mean().backward()


def serving(kind: str, calls: int, learner: Callable[[], Callable[[Tensor], None]]) -> dict[str, Setup]:
    """Return the sides that move batches from a buffer in the CPU's memory to the accelerator."""

    def by_hand() -> Work:
        sender, learn = Sender(stored(kind)), learner()
        return turns(calls, lambda: learn(sender.send()[0]))

    def ours(**options: Any) -> Setup:
        def setup() -> Work:
            made, learn = our_buffer(kind, "cpu", batch_size=BATCH, **options), learner()
            return turns(calls, lambda: learn(made.sample().to(DEVICE, non_blocking=True)["observation"]))

        return setup

    pinned = {"pin_memory": DEVICE == "cuda"}
    return {
        "loop by hand": by_hand,
        "gleanrl": ours(**pinned, prefetch=AHEAD),
        "gleanrl, pinned alone": ours(**pinned),
        "gleanrl, neither": ours(),
    }


def _case(
    name: str,
    title: str,
    sides: dict[str, Setup],
    reference: str = HAND,
    threads: int = 1,
    peers: tuple[str, ...] = ("torchrl",),
) -> Case:
    return Case(
        f"device-replay/{name}", f"{title}; {DEVICE}", "call", sides, reference, peers=peers, threads=threads
    )


CASES = (
    *(
        _case(
            f"extend-{kind}-from-{place}",
            f"extend of {EXTEND} {PAYLOADS[kind]} that are on the {place}",
            extending(kind, {"cpu": "cpu", "device": DEVICE}[place], calls),
        )
        for kind, calls in (("cartpole", 100), ("image", 20))
        for place in ("cpu", "device")
    ),
    _case(
        "sample-32", f"sample(32) of {PAYLOADS['cartpole']} out of a million", sampling("cartpole", 32, 200)
    ),
    _case(
        "sample",
        f"sample({BATCH}) of {PAYLOADS['cartpole']} out of a million",
        sampling("cartpole", BATCH, 200),
    ),
    _case(
        "sample-image", f"sample({BATCH}) of {PAYLOADS['image']} out of 20,000", sampling("image", BATCH, 50)
    ),
    _case(
        "prioritized",
        f"prioritized sample({BATCH}) out of a million rows, then as many new priorities",
        prioritized(100),
    ),
    _case("slices", f"{SLICES} slices of {LENGTH} steps out of a million rows", slicing(100)),
    _case(
        "serve",
        f"batches of {BATCH} CartPole-like rows, from the CPU's memory to the device",
        serving("cartpole", 100, lambda: no_learner),
        "loop by hand",
        threads=4,
    ),
    _case(
        "serve-image",
        f"batches of {BATCH} pairs of images, from the CPU's memory to the device",
        serving("image", 30, lambda: no_learner),
        "loop by hand",
        threads=4,
    ),
    _case(
        "serve-image-learning",
        f"batches of {BATCH} pairs of images, each followed by the gradients of three convolutions",
        serving("image", 30 if DEVICE == "cuda" else 2, Convolutions),
        "loop by hand",
        threads=4,
        peers=(),
    ),
)
