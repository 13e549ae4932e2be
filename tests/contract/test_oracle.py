"""The oracle accepts a right stream and detects each planted mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from tests.contract.helpers import IDS, check_stream
from tests.fakes import Script

SCRIPT = Script(lengths=(3, 5, 2), ending="mixed")


def good_batches(rows: int = 2, steps: int = 6, number: int = 3) -> list[TensorDict]:
    """Return the batches ``[rows, steps]`` that a correct collector would deliver."""
    columns: dict[str, list[list[object]]] = {name: [] for name in ("root", "next", "flags", "reward", "ids")}
    for row in range(rows):
        lists: dict[str, list[object]] = {name: [] for name in columns}
        episode, clock = 0, 0
        for _ in range(steps * number):
            terminated, truncated = SCRIPT.flags(row, episode, clock + 1)
            lists["root"].append([row, episode, clock])
            lists["next"].append([row, episode, clock + 1])
            lists["flags"].append([terminated or truncated, terminated, truncated])
            lists["reward"].append([SCRIPT.reward(row, episode, clock + 1)])
            lists["ids"].append(episode * rows + row)
            episode, clock = (episode + 1, 0) if terminated or truncated else (episode, clock + 1)
        for name, values in lists.items():
            columns[name].append(values)
    flags = torch.tensor(columns["flags"])
    names = ("done", "terminated", "truncated")
    data = TensorDict({"observation": torch.tensor(columns["root"]).float()}, [rows, steps * number])
    data[IDS] = torch.tensor(columns["ids"])
    data["next"] = TensorDict({"observation": torch.tensor(columns["next"]).float()}, data.batch_size)
    data["next", "reward"] = torch.tensor(columns["reward"])
    for place, name in enumerate(names):
        data[name] = torch.zeros_like(flags[..., :1])
        data["next", name] = flags[..., place : place + 1].clone()
    return [batch.clone() for batch in data.split(steps, 1)]


def test_a_good_stream_passes() -> None:
    check_stream(good_batches(), SCRIPT)


MISTAKES: dict[str, Callable[[list[TensorDict]], object]] = {
    "a lost frame": lambda b: b.__setitem__(1, b[1][:, 1:]),
    "a lost batch": lambda b: b.pop(1),
    "a repeated frame": lambda b: b.__setitem__(1, torch.cat([b[1][:, :1], b[1]], 1)),
    "batches in the wrong order": lambda b: b.reverse(),
    "rows swapped": lambda b: b.__setitem__(1, b[1][[1, 0]]),
    "next is the root": lambda b: b[0]["next", "observation"].copy_(b[0]["observation"]),
    "next after done is the reset observation": lambda b: b[0]["next", "observation"][0, 2].copy_(
        b[0]["observation"][0, 3]
    ),
    "a root of zeros after a reset": lambda b: b[0]["observation"][1, 5].zero_(),
    "a stale row": lambda b: b.__setitem__(2, b[1]),
    "done lost": lambda b: b[0]["next", "done"].zero_(),
    "terminated for truncated": lambda b: b[1]["next", "terminated"].fill_(True),
    "truncated for terminated": lambda b: b[0]["next", "truncated"].copy_(b[0]["next", "terminated"]),
    "root done": lambda b: b[0]["done"].copy_(b[0]["next", "done"]),
    "rewards shifted": lambda b: b[0]["next", "reward"].copy_(b[0]["next", "reward"].roll(1, 1)),
    "ids from zero in each batch": lambda b: [batch[IDS].sub_(batch[IDS].min()) for batch in b],
    "one id for everything": lambda b: [batch[IDS].zero_() for batch in b],
    "the rows share ids": lambda b: [batch[IDS].copy_(batch[IDS] // 2) for batch in b],
    "an id that changes in mid-episode": lambda b: b[2][IDS].add_(100),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake: str) -> None:
    batches = good_batches()
    MISTAKES[mistake](batches)
    with pytest.raises(AssertionError):
        check_stream(batches, SCRIPT)
