"""Fake environments on `EnvBase`, written as a user of the library would write them.

They follow the oracle of `tests/fakes.py`: an observation is `(stream, episode, step)`, and a `Script` defines the
episodes.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase
from tests.fakes import Script

FLAGS = ("done", "terminated", "truncated")


def flag_spec(shape: tuple[int, ...]) -> Categorical:
    """Return the spec of a boolean flag."""
    return Categorical(2, shape=torch.Size(shape), dtype=torch.bool)


class CountingEnv(EnvBase):
    """One or more oracle streams in one environment; it records the calls that it receives.

    Args:
        script: lengths, endings and rewards of the episodes.
        batch_size: `()` or `(P,)`; stream p is row p.
        flags: the flag keys that are declared and returned.
    """

    def __init__(
        self,
        script: Script | None = None,
        batch_size: tuple[int, ...] = (),
        *,
        flags: tuple[str, ...] = FLAGS,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size), **kwargs)
        self.script, self.flags = script or Script(), flags
        self.seeds: list[int] = []
        self.masks: list[torch.Tensor | None] = []
        self.reset_kwargs: list[dict[str, Any]] = []
        self.actions: list[torch.Tensor] = []
        self._streams = torch.arange(max(1, self.batch_size.numel()))
        self._episode = torch.full_like(self._streams, -1)
        self._clock = torch.zeros_like(self._streams)
        self._declare()

    def _declare(self) -> None:
        shape = tuple(self.batch_size)
        self.observation_spec = Composite(
            observation=Unbounded(shape=(*shape, 3), dtype=torch.float32), shape=self.batch_size
        )
        self.action_spec = Bounded(low=-1.0, high=1.0, shape=(*shape, 2), dtype=torch.float32)
        self.reward_spec = Unbounded(shape=(*shape, 1), dtype=torch.float32)
        self.done_spec = Composite({key: flag_spec((*shape, 1)) for key in self.flags}, shape=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None and tensordict is not None and ("agents", "_reset") in tensordict.keys(True):
            mask = tensordict["agents", "_reset"].any(-2)
        self.masks.append(None if mask is None else mask.clone())
        self.reset_kwargs.append(kwargs)
        rows = torch.ones_like(self._streams, dtype=torch.bool) if mask is None else mask.reshape(-1)
        self._episode += rows
        self._clock[rows] = 0
        return self._package({key: torch.zeros_like(rows) for key in self.flags})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.actions.append(tensordict["action"].clone())
        self._clock += 1
        triples = self._triples()
        ends = torch.tensor([self.script.flags(*triple) for triple in triples])  # (P, 2) bool
        flags = {"done": ends.any(-1), "terminated": ends[:, 0], "truncated": ends[:, 1]}
        out = self._package({key: flags[key] for key in self.flags})
        rewards = torch.tensor([self.script.reward(*triple) for triple in triples], dtype=torch.float32)
        out["reward"] = rewards.reshape(*self.batch_size, 1)
        return out

    def _set_seed(self, seed: int | None) -> None:
        self.seeds.append(seed)

    def _triples(self) -> list[tuple[int, int, int]]:
        columns = (self._streams.tolist(), self._episode.tolist(), self._clock.tolist())
        return list(zip(*columns, strict=True))

    def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
        rows = torch.tensor(self._triples(), dtype=torch.float32).reshape(*self.batch_size, 3)
        fields = {key: value.reshape(*self.batch_size, 1) for key, value in flags.items()}
        return TensorDict({"observation": rows, **fields}, self.batch_size, device=self.device)


class StepCountEnv(CountingEnv):
    """Declares an observation named `step_count`, as the step counter of the library does."""

    def _declare(self) -> None:
        super()._declare()
        shape = tuple(self.batch_size)
        spec = self.observation_spec
        spec["step_count"] = Unbounded(shape=(*shape, 1), dtype=torch.int64)
        self.observation_spec = spec

    def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
        out = super()._package(flags)
        out["step_count"] = self._clock.reshape(*self.batch_size, 1).clone()
        return out


class TwoKeyEnv(CountingEnv):
    """Two observation keys: `place` is (stream, episode), `clock` is (step,)."""

    def _declare(self) -> None:
        super()._declare()
        shape = tuple(self.batch_size)
        self.observation_spec = Composite(
            place=Unbounded(shape=(*shape, 2), dtype=torch.float32),
            clock=Unbounded(shape=(*shape, 1), dtype=torch.float32),
            shape=self.batch_size,
        )

    def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
        out = super()._package(flags)
        rows = out.pop("observation")
        return out.update({"place": rows[..., :2].clone(), "clock": rows[..., 2:].clone()})


class TwoActionEnv(CountingEnv):
    """Two action keys: `arm` (continuous) and `gripper` (categorical)."""

    def _declare(self) -> None:
        super()._declare()
        shape = tuple(self.batch_size)
        self.action_spec = Composite(
            arm=Bounded(low=-1.0, high=1.0, shape=(*shape, 2), dtype=torch.float32),
            gripper=Categorical(3, shape=torch.Size(shape), dtype=torch.int64),
            shape=self.batch_size,
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(TensorDict({"action": tensordict["arm"]}, tensordict.batch_size))


class TeamEnv(CountingEnv):
    """Two agents under "agents", each with an observation, an action and a reward.

    Flags are at the root. With `nested_flags`, each agent has flags as well. All agents of a team end together.
    """

    def __init__(self, *args: Any, nested_flags: bool = False, **kwargs: Any) -> None:
        self.__dict__["nested_flags"] = nested_flags
        super().__init__(*args, **kwargs)

    def _declare(self) -> None:
        shape, size = tuple(self.batch_size), self.batch_size
        two = torch.Size((*shape, 2))
        nested = {key: flag_spec((*two, 1)) for key in self.flags} if self.nested_flags else {}
        self.observation_spec = Composite(
            agents=Composite(observation=Unbounded(shape=(*two, 3)), shape=two), shape=size
        )
        self.action_spec = Composite(
            agents=Composite(
                action=Bounded(low=-1.0, high=1.0, shape=(*two, 2), dtype=torch.float32), shape=two
            ),
            shape=size,
        )
        self.reward_spec = Composite(
            agents=Composite(reward=Unbounded(shape=(*two, 1)), shape=two), shape=size
        )
        root = {key: flag_spec((*shape, 1)) for key in self.flags}
        if nested:
            root["agents"] = Composite(nested, shape=two)
        self.done_spec = Composite(root, shape=size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(TensorDict({"action": tensordict["agents", "action"]}, self.batch_size))
        reward = out.pop("reward").unsqueeze(-2)
        out["agents", "reward"] = torch.cat([reward, reward + 1], -2)
        return out

    def _package(self, flags: dict[str, torch.Tensor]) -> TensorDict:
        out = super()._package(flags)
        two = torch.Size((*self.batch_size, 2))
        agents = {"observation": out.pop("observation").unsqueeze(-2).expand(*two, 3).clone()}
        if self.nested_flags:
            for key in self.flags:
                agents[key] = out[key].unsqueeze(-2).expand(*two, 1).clone()
        out["agents"] = TensorDict(agents, two, device=self.device)
        return out


class CrookedEnv(CountingEnv):
    """Violates its own declaration after its `at`-th step (0: every step); `fault` selects the violation."""

    def __init__(self, fault: str, at: int = 1, **kwargs: Any) -> None:
        self.__dict__.update(fault=fault, at=at)
        super().__init__(**kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        if self.at and len(self.actions) != self.at:
            return out
        if self.fault == "missing":
            del out["observation"]
        elif self.fault == "extra":
            out["surprise"] = out["observation"].clone()
        elif self.fault == "dtype":
            out["observation"] = out["observation"].double()
        elif self.fault == "shape":
            out["observation"] = out["observation"][..., :2].clone()
        elif self.fault == "nan":
            out["observation"][..., -1, 1] = float("nan")
        elif self.fault == "raise":
            raise ValueError("the fake broke on purpose")
        return out


class StillDoneEnv(CountingEnv):
    """Returns set done flags from resets."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        out["done"].fill_(True)
        out["terminated"].fill_(True)
        return out


class SameObjectEnv(CountingEnv):
    """Returns its input tensordict from reset, which the contract forbids."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        return out if tensordict is None else tensordict.update(out)


class ReusingBase(CountingEnv):
    """Returns the same tensordict from all steps and overwrites its tensors in place."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        kept = self.__dict__.setdefault("_kept_step", out)
        for key, value in out.items():
            kept[key].copy_(value)
        return kept


class ForgetfulEnv(CountingEnv):
    """Returns zeros in the rows that a partial reset excludes."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        mask = self.masks[-1]
        return out if mask is None else out.masked_fill(~mask.reshape(self.batch_size), 0)


class GreedyEnv(CountingEnv):
    """Overwrites the action and the reset mask that it receives."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        tensordict["action"].fill_(77)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        if tensordict is not None and "_reset" in tensordict.keys():
            tensordict["_reset"].fill_(True)
        return out


class PayingEnv(CountingEnv):
    """Returns the reward under `key` with `dtype`; the spec declares float32."""

    def __init__(self, key: str = "reward", dtype: torch.dtype = torch.float32, **kwargs: Any) -> None:
        self.__dict__.update(pay_key=key, pay_dtype=dtype)
        super().__init__(**kwargs)

    def _declare(self) -> None:
        super()._declare()
        shape = (*self.batch_size, 1)
        self.reward_spec = Composite({self.pay_key: Unbounded(shape=shape)}, shape=self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        del out["reward"]
        clock = self._clock.reshape(*self.batch_size, 1)
        return out.set(self.pay_key, clock.to(self.pay_dtype))
