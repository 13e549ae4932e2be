"""Rows that identify their origin, and a plain Python model of the rows that a ring of time steps holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
TRUNCATED = ("next", "truncated")
FLAGS = ("done", "terminated", "truncated")
ADDED = ("index", "_weight", "priority_weight", "_generation")


class Tape:
    """Endless streams as a pure function of (stream, t): the observation is `(stream, episode, step)`.

    Episode e of stream s has `lengths[(s + e) % len(lengths)]` steps. Even episodes terminate, odd ones are truncated.

    Args:
        lengths: the episode lengths, repeated for ever.
        shape: the batch dimensions before time; their product is the number of streams.
    """

    def __init__(self, lengths: Sequence[int] = (7,), shape: Sequence[int] = ()) -> None:
        self.lengths, self.shape, self.streams = tuple(lengths), tuple(shape), math.prod(shape)
        turns = [lengths[s % len(lengths) :] + lengths[: s % len(lengths)] for s in range(self.streams)]
        # starts[s, e] is the first step of episode e of stream s, within one pass through `lengths`.
        self._starts = torch.tensor([[0, *turn] for turn in turns]).cumsum(1)
        self._turn = sum(lengths)

    def episode(self, stream: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (episode, step) at step t."""
        starts = self._starts[stream]
        place = torch.searchsorted(starts, (t % self._turn)[..., None], right=True)[..., 0] - 1
        step = t % self._turn - starts.gather(-1, place[..., None])[..., 0]
        return t // self._turn * len(self.lengths) + place, step

    def clock(self, stream: torch.Tensor, episode: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return the time t at which a stream has this `step` of this `episode`."""
        place = (episode % len(self.lengths))[..., None]
        start = self._starts[stream].gather(-1, place)[..., 0]
        return episode // len(self.lengths) * self._turn + start + step

    def expected(self, stream: torch.Tensor, t: torch.Tensor) -> TensorDict:
        """Return the rows of these streams at these times, in any shape."""
        episode, step = self.episode(stream, t)
        last = self.episode(stream, t + 1)[0] != episode
        size, flag = list(t.shape), torch.zeros(*t.shape, 1, dtype=torch.bool)
        after = TensorDict(
            {
                "done": last[..., None].clone(),
                "observation": torch.stack([stream, episode, step + 1], -1).float(),
                "reward": t[..., None].float(),
                "terminated": (last & (episode % 2 == 0))[..., None],
                "truncated": (last & (episode % 2 == 1))[..., None],
            },
            size,
        )
        root = {
            "action": stream * 1_000_003 + t * 7919,
            "collector": TensorDict({"traj_ids": episode * self.streams + stream}, size),
            "next": after,
            "observation": torch.stack([stream, episode, step], -1).float(),
        }
        return TensorDict({**root, **{name: flag.clone() for name in FLAGS}}, size)

    def rows(self, start: int, stop: int) -> TensorDict:
        """Return the steps ``[start, stop)`` of all streams, ``[*shape, T]``, as a collector delivers them."""
        stream = torch.arange(self.streams)[:, None].expand(-1, stop - start)
        t = torch.arange(start, stop).expand(self.streams, -1)
        size = (*self.shape, stop - start)
        return self.expected(stream.reshape(size), t.reshape(size))

    def step_at(self, t: int) -> TensorDict:
        """Return one time step of all streams, ``[*shape]``, as `add` accepts it."""
        return self.rows(t, t + 1)[..., 0]

    def locate(self, rows: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (stream, t) of each row by its observation."""
        stream, episode, step = rows["observation"].long().unbind(-1)
        return stream, self.clock(stream, episode, step)

    def check(
        self, rows: TensorDictBase, cut: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (stream, t) of each row, after checking that every leaf belongs to it.

        Args:
            rows: rows that a buffer served.
            cut: rows at which a sampler truncates, a bool tensor of the rows' shape; None for no row.
        """
        stream, t = self.locate(rows)
        expected = self.expected(stream, t)
        if cut is not None:
            for key in ("truncated", "done"):
                expected["next", key] |= cut[..., None]
        found = {key: leaf for key, leaf in rows.items(True, True) if key not in (*ADDED, MASK)}
        right = dict(expected.items(True, True))
        assert found.keys() == right.keys()
        for key, leaf in found.items():
            assert leaf.dtype == right[key].dtype, key
            assert torch.equal(leaf, right[key]), (
                f"{key} doesn't belong to (stream, episode, step) of its row:\n{leaf}\n{right[key]}"
            )
        return stream, t


def check_bijection(rows: TensorDictBase, names: dict[int, tuple[int, int]]) -> None:
    """Check that ids and episodes correspond one to one, over all rows so far; `names` keeps the pairs."""
    for one, (stream, episode, _) in zip(
        rows[IDS].flatten().tolist(), rows["observation"].reshape(-1, 3).tolist(), strict=True
    ):
        assert names.setdefault(one, (stream, episode)) == (stream, episode)
    assert len(set(names.values())) == len(names)


class Ring:
    """A model of a ring of time steps: the step and the number of writes of each slot, and the write cursor."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.cursor, self.written = capacity, 0, 0
        self.slots: list[Any] = [None] * capacity
        self.generation = [0] * capacity

    def extend(self, steps: Iterable[Any]) -> list[int]:
        """Write steps in order and return the slot of each.

        A write that is longer than the ring keeps its newest steps. Its older steps get -1.
        """
        steps = list(steps)
        places = []
        for step in steps:
            self.slots[self.cursor] = step
            places.append(self.cursor)
            self.cursor = (self.cursor + 1) % self.capacity
        self.written += min(len(steps), self.capacity)
        gone = max(len(places) - self.capacity, 0)
        for place in places[gone:]:
            self.generation[place] += 1
        return [-1] * gone + places[gone:]

    def clear(self) -> None:
        """Remove all records but keep the generations."""
        self.slots, self.cursor = [None] * self.capacity, 0

    def __len__(self) -> int:
        return sum(step is not None for step in self.slots)

    def order(self) -> list[int]:
        """Return the filled slots, oldest first."""
        turn = [*range(self.cursor, self.capacity), *range(self.cursor)]
        return [slot for slot in turn if self.slots[slot] is not None]

    def pieces(self, tape: Tape, stream: int = 0) -> list[list[int]]:
        """Return one stream's trajectories in the ring, as runs of times t, oldest first."""
        runs: list[list[int]] = []
        steps = torch.tensor([self.slots[slot] for slot in self.order()], dtype=torch.int64)
        if not len(steps):
            return runs
        episodes = tape.episode(torch.full_like(steps, stream), steps)[0].tolist()
        before = None
        for t, episode in zip(steps.tolist(), episodes, strict=True):
            if episode != before:
                runs.append([])
            runs[-1].append(t)
            before = episode
        return runs


def chunks(total: int, sizes: Sequence[int] = (1, 5, 3, 11, 2)) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` ranges of different sizes that cover ``[0, total)``."""
    ranges, start, turn = [], 0, 0
    while start < total:
        stop = min(total, start + sizes[turn % len(sizes)])
        ranges.append((start, stop))
        start, turn = stop, turn + 1
    return ranges


def chi_square(counts: Sequence[float], probabilities: Sequence[float]) -> None:
    """Check that counts are draws from these probabilities, at about 4.5 standard deviations."""
    total = sum(counts)
    assert len(counts) == len(probabilities) and abs(sum(probabilities) - 1) < 1e-9
    expected = [total * p for p in probabilities]
    assert min(expected) >= 5, "too few draws for the test"
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    freedom = len(counts) - 1
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    if freedom:
        z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        assert z < 4.5, f"chi-square {statistic:.1f} at {freedom} degrees: {list(counts)} {expected}"
