"""Transforms that each break one rule of `check_transform`, which their first line names."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.data import Unbounded
from gleanrl.envs.transforms import Transform
from gleanrl.envs.transforms.row_view import Row

BATCH = TensorDict({"a": torch.arange(6.0), "b": torch.ones(6)}, [6])


class Age(Transform):
    """A right transform: it adds the number of steps since the reset."""

    def __init__(self) -> None:
        super().__init__()
        self.age: Any = 0

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        return next_tensordict.set("age", tensordict["age"] + 1)

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset.set("age", torch.zeros_like(tensordict_reset["done"], dtype=torch.int64))

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        shape = (*self.parent.batch_size, 1)
        observation_spec["age"] = Unbounded(shape, dtype=torch.int64)
        return observation_spec


class Misdeclared(Age):
    """specs"""

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        observation_spec["age"] = Unbounded((*self.parent.batch_size, 1))
        return observation_spec


class InPlace(Age):
    """in place"""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        next_tensordict["observation"].mul_(0.5)
        return super()._step(tensordict, next_tensordict)


class Leaking(Age):
    """trajectories"""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        self.age = self.age + 1
        return next_tensordict.set("age", torch.full_like(tensordict["age"], self.age))


class Unsaved(Age):
    """state"""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        self.age = self.age + 1
        return next_tensordict.set("age", torch.full_like(tensordict["age"], self.age))

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        if tensordict.get("_reset", None) is None:
            self.age = 0
        return super()._reset(tensordict, tensordict_reset)


class ResetsAll(Age):
    """other rows"""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 1, dtype=torch.int64))

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        self.total += 1
        return next_tensordict.set("age", self.total.clone())

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        self.total.zero_()
        return super()._reset(tensordict, tensordict_reset)


class OnlyOnRows(Age):
    """rollout"""

    on_rows = True

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        on_a_row = isinstance(next_tensordict, Row)
        step = 2 if on_a_row else 1
        return next_tensordict.set("age", tensordict.get("age") + step)

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        done = tensordict_reset.get("done")
        return tensordict_reset.set("age", torch.zeros_like(done, dtype=torch.int64))


class Halving(Transform):
    """A right transform: it stores halves and reads doubles."""

    def __init__(self) -> None:
        super().__init__(["a"], ["a"], ["a"], ["a"])

    def _apply_transform(self, value: Any) -> Any:
        return value * 2

    def _inv_apply_transform(self, value: Any) -> Any:
        return value / 2


class WritesIntoReads(Halving):
    """read"""

    def _apply_transform(self, value: Any) -> Any:
        return value.mul_(2)


class WritesIntoWrites(Halving):
    """written"""

    def _inv_apply_transform(self, value: Any) -> Any:
        return value.div_(2)


class NoInverse(Halving):
    """inverse"""

    def _inv_apply_transform(self, value: Any) -> Any:
        return value / 4


BROKEN = (Misdeclared, InPlace, Leaking, Unsaved, ResetsAll, OnlyOnRows)
BROKEN_IN_BUFFERS = (WritesIntoReads, WritesIntoWrites, NoInverse)
