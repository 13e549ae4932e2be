"""What environments do, in numbers: `TrajCounter`, `Timer`."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs.transforms.following import Following, OfEnvironment, require_free
from gleanrl.envs.transforms.keys import Keys
from gleanrl.envs.transforms.rows import Record, trailing
from gleanrl.envs.transforms.spec_tools import count_spec
from gleanrl.schema import Field
from gleanrl.system import clock
from gleanrl.tree import NestedKey


class TrajCounter(Following):
    """Numbers trajectories in the order of their resets, over all environments of the batch; the first one is 0.

    The number is state: an environment that loads it goes on counting. Environments in other processes count for
    themselves.

    Args:
        out_key: where the number stands, ``(*batch, 1)`` int64, in the root and below ``"next"``.
        repeats: no effect, nor has it one in the releases that take it.
    """

    on_rows = True
    total: Tensor

    def __init__(self, out_key: NestedKey = "traj_count", *, repeats: int | None = None) -> None:
        super().__init__()
        self.out_keys = [out_key]
        self.register_buffer("total", torch.zeros((), dtype=torch.int64, device="cpu"))

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return nothing: the number is added, nothing is read."""
        return []

    def written_keys(self) -> list[NestedKey]:
        """Return the key of the number."""
        return self.out_keys

    def carries(self) -> dict[NestedKey, Field]:
        """Return the numbers."""
        return {self.out_keys[0]: Field(torch.Size((*self.surroundings().batch_size, 1)), torch.int64)}

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        (key,) = self.out_keys
        return next_tensordict.set(key, self.last(tensordict, key).clone())

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        (key,), rows = self.out_keys, self.asked(tensordict)
        size = tensordict_reset.batch_size
        begins = torch.ones(size, dtype=torch.bool, device="cpu") if rows is None else rows.cpu()
        numbers = self.total.cpu() + begins.flatten().cumsum(0).reshape(size) - 1
        self.total += int(begins.sum())
        numbers = numbers.unsqueeze(-1).to(self.home())
        mask = None if rows is None else trailing(rows, numbers)
        return tensordict_reset.set(key, self.renewed(key, numbers, mask, self.own(tensordict, key)))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the number."""
        (key,), out = self.out_keys, observation_spec.clone()
        require_free(self, observation_spec, key, "out_key")
        out[key] = count_spec(self.carries()[key].shape, self.home())
        return out


class Timer(OfEnvironment):
    """Measures, in seconds: how long a step took, how long the policy before it, and how long a reset.

    Below ``"next"`` stand the times of the step and of the policy, and zero for the reset; in the root after a reset
    the reset's time, and zeros. Each is ``(*batch,)`` float32, the same for all environments. Rollouts run on
    TensorDicts for it.

    Args:
        out_keys: of the three times; None for `time_key` with ``"_step"``, ``"_policy"`` and ``"_reset"``.
        time_key: see `out_keys`.
    """

    def __init__(self, out_keys: Keys | None = None, time_key: str = "time") -> None:
        super().__init__()
        self.time_key = time_key
        self.out_keys = (
            [f"{time_key}_{what}" for what in ("step", "policy", "reset")] if out_keys is None else out_keys
        )
        self._mark = clock.monotonic()
        self._policy = 0.0

    def pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """Return nothing: times are added, nothing is read."""
        return []

    def _lap(self) -> float:
        """Return the seconds since the last lap."""
        before, self._mark = self._mark, clock.monotonic()
        return self._mark - before

    def _inv_call(self, tensordict: Record) -> Record:
        self._policy = self._lap()
        return tensordict

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        return self._written(next_tensordict, self._lap(), self._policy, 0.0)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        self._lap()
        return super()._reset_env_preprocess(tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        return self._written(tensordict_reset, 0.0, 0.0, self._lap())

    def _written(self, record: Record, *seconds: float) -> Record:
        for key, value in zip(self.out_keys, seconds, strict=True):
            record.set(key, torch.full(record.batch_size, value, device=record.device))
        return record

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the times."""
        out = observation_spec.clone()
        for key in self.out_keys:
            out[key] = Unbounded(observation_spec.shape, device=observation_spec.device)
        return out
