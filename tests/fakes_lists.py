"""Environments whose observations identify environment, trajectory and step, in several data types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from gleanrl.data import Categorical, Composite, NonTensor, Unbounded
from gleanrl.envs import EnvBase


class TalkingEnv(EnvBase):
    """Observes ``(name, trajectory, step)`` as tensor ``"code"``, as string ``"text"`` and as object ``"thing"``.

    Args:
        name: number of the environment.
        lengths: lengths of its trajectories, repeated in this order.
        ragged: whether to add ``"spread"``, a tensor of shape ``(step + 1, 2)`` filled with the step.
        width: length of ``"wide"``, a vector filled with the step; None for none. Environments may differ in it.
    """

    def __init__(
        self, name: int = 0, lengths: Sequence[int] = (3, 1, 2), ragged: bool = True, width: int | None = None
    ) -> None:
        super().__init__()
        self.name, self.lengths, self.ragged, self.width = name, tuple(lengths), ragged, width
        self.trajectory, self.count = -1, 0
        spec: dict[str, Any] = {
            "code": Unbounded((3,)),
            "text": NonTensor(shape=()),
            "group": Composite(thing=NonTensor(shape=())),
        }
        if ragged:
            spec["group"]["spread"] = Unbounded((-1, 2))
        if width is not None:
            spec["wide"] = Unbounded((width,))
        self.observation_spec = Composite(**spec)
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, (1,), dtype=torch.bool)

    def _observed(self) -> dict[str, Any]:
        code = (self.name, self.trajectory, self.count)
        group = TensorDict({"thing": NonTensorData({"list": [*code]})}, [])
        if self.ragged:
            group["spread"] = torch.full((self.count + 1, 2), float(self.count))
        found = {
            "code": torch.tensor(code, dtype=torch.float32),
            "text": "/".join(map(str, code)),
            "group": group,
        }
        return (
            found if self.width is None else {**found, "wide": torch.full((self.width,), float(self.count))}
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.trajectory, self.count = self.trajectory + 1, 0
        return TensorDict(self._observed(), [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        over = self.count >= self.lengths[self.trajectory % len(self.lengths)]
        outcome = {"reward": torch.tensor([float(self.count)]), "done": torch.tensor([over])}
        return TensorDict({**self._observed(), **outcome}, [])

    def _set_seed(self, seed: int | None) -> None:
        """Restart from the first trajectory. The environment draws no random numbers."""
        self.trajectory = -1


def rows_of(batch: TensorDictBase) -> list[Any]:
    """Return the single records of a batch, in order."""
    rows = [batch]
    for _ in range(batch.ndim):
        rows = [below for row in rows for below in row.unbind(0)]
    return rows


def said(record: Any) -> tuple[int, int, int]:
    """Return the triple of an observation, after checking that all of its forms agree."""
    code = tuple(int(number) for number in record["code"])
    assert record["text"] == "/".join(map(str, code)), (record["text"], code)
    assert record["group", "thing"]["list"] == [*code]
    for key in (("group", "spread"), "wide"):
        if key in record.keys(True, True):
            spread = record[key]
            assert (spread == code[2]).all(), (spread, code)
            assert key == "wide" or spread.shape == (code[2] + 1, 2)
    return code  # type: ignore[return-value]


def check_rows(batch: TensorDictBase) -> list[tuple[int, int, int]]:
    """Check that the values of each record agree; return the triples of the roots."""
    found = []
    for row in rows_of(batch):
        (name, trajectory, step), after = said(row), said(row["next"])
        assert after == (name, trajectory, step + 1) and row["next", "reward"] == step + 1
        found.append((name, trajectory, step))
    return found


def check_streams(batch: TensorDictBase) -> list[tuple[int, int, int]]:
    """Check the rows of a batch ``[*B, T]`` and the order of each environment; return the triples of the roots."""
    said_here = check_rows(batch)
    length = batch.shape[-1]
    for start in range(0, len(said_here), length):
        rows = rows_of(batch)[start : start + length]
        for t in range(length - 1):
            name, trajectory, step = said_here[start + t]
            done = bool(rows[t]["next", "done"])
            assert said_here[start + t + 1] == (
                (name, trajectory + 1, 0) if done else (name, trajectory, step + 1)
            )
    return said_here


def talking(number: int, **arguments: Any) -> list[Any]:
    """Return functions that create environments with different trajectory lengths."""
    lengths = [(3, 1, 2), (2, 2, 4), (1, 5), (4, 1)]
    return [lambda i=i: TalkingEnv(i, lengths[i % 4], **arguments) for i in range(number)]
