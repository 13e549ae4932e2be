"""Environments of TorchRL for the tests of this folder; worker processes import it too."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import (
    ActionMask,
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)


class Episodes(EnvBase):
    """Observes ``(seed, episode, step)``; episodes have `length` steps, and odd ones end truncated.

    Args:
        length: of an episode.
        batch_size: `()` or `(P,)`; row p's episodes are p steps longer.
    """

    def __init__(self, length: int = 3, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        rows = (*batch_size, 1)
        self.length = length + torch.arange(max(1, torch.Size(batch_size).numel())).reshape(rows)
        self.seed = torch.zeros(rows)
        self.episode, self.clock = torch.full(rows, -1), torch.zeros(rows, dtype=torch.int64)
        flag = Categorical(2, shape=rows, dtype=torch.bool)
        self.observation_spec = Composite(observation=Unbounded((*batch_size, 3)), shape=batch_size)
        self.action_spec = Unbounded((*batch_size, 2))
        self.reward_spec = Unbounded(rows)
        self.done_spec = Composite(done=flag, terminated=flag, truncated=flag, shape=batch_size)

    def _observed(self) -> torch.Tensor:
        return torch.cat([self.seed, self.episode.float(), self.clock.float()], -1)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = torch.ones_like(self.clock, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict.keys():
            rows = tensordict["_reset"].reshape(rows.shape)
        self.episode = self.episode + rows
        self.clock = torch.where(rows, 0, self.clock)
        return TensorDict({"observation": self._observed()}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.clock = self.clock + 1
        over, odd = self.clock >= self.length, self.episode % 2 == 1
        outcome = {
            "observation": self._observed(),
            "reward": tensordict["action"].sum(-1, keepdim=True),
            "done": over,
            "terminated": over & ~odd,
            "truncated": over & odd,
        }
        return TensorDict(outcome, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self.seed = torch.full_like(self.seed, float(seed or 0) % 997)


class Team(EnvBase):
    """Three agents with an observation, an action and a reward each; rewards are the actions.

    Args:
        own_flags: whether the agents have end flags instead of the environment.
    """

    def __init__(self, own_flags: bool = False) -> None:
        super().__init__()
        self.own_flags, self.clock = own_flags, 0
        flag = Categorical(2, shape=(3, 1) if own_flags else (1,), dtype=torch.bool)
        self.observation_spec = Composite(
            agents=self._group(observation=Unbounded((3, 2))), clock=Unbounded((1,))
        )
        self.action_spec = Composite(agents=self._group(action=Categorical(4, shape=(3,))))
        self.reward_spec = Composite(agents=self._group(reward=Unbounded((3, 1))))
        self.done_spec = Composite(agents=self._group(done=flag)) if own_flags else Composite(done=flag)

    @staticmethod
    def _group(**leaves: Any) -> Composite:
        return Composite(**leaves, shape=(3,))

    def _observed(self) -> dict[str, Any]:
        seen = torch.arange(3.0).unsqueeze(-1).expand(3, 2) + self.clock
        return {
            "agents": TensorDict({"observation": seen.clone()}, [3]),
            "clock": torch.tensor([float(self.clock)]),
        }

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.clock = 0
        return TensorDict(self._observed(), [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.clock += 1
        outcome = TensorDict(self._observed(), [])
        outcome["agents", "reward"] = tensordict["agents", "action"].float().unsqueeze(-1)
        over = self.clock >= 5
        key = ("agents", "done") if self.own_flags else "done"
        return outcome.set(key, torch.full((3, 1) if self.own_flags else (1,), over))

    def _set_seed(self, seed: int | None) -> None:
        pass


class Turns(EnvBase):
    """Allows one action at a time, and raises at any other."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.observation_spec = Composite(
            observation=Unbounded((1,)), action_mask=Binary(4, dtype=torch.bool)
        )
        self.action_spec, self.reward_spec = Categorical(4), Unbounded((1,))

    def _observed(self) -> dict[str, Any]:
        return {
            "observation": torch.tensor([float(self.clock)]),
            "action_mask": torch.arange(4) == self.clock % 4,
        }

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.clock = 0
        return TensorDict(self._observed(), [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if int(tensordict["action"]) != self.clock % 4:
            raise ValueError("not your turn")
        self.clock += 1
        outcome = {**self._observed(), "reward": torch.zeros(1), "done": torch.tensor([self.clock >= 6])}
        return TensorDict(outcome, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


def cartpole(**kwargs: Any) -> EnvBase:
    return GymEnv("CartPole-v1", **kwargs)


def pendulum() -> EnvBase:
    return GymEnv("Pendulum-v1")


def counted() -> EnvBase:
    return TransformedEnv(cartpole(), Compose(StepCounter(max_steps=12), RewardSum(), InitTracker()))


def frames() -> EnvBase:
    chain = Compose(DoubleToFloat(), StepCounter(30), CatFrames(N=3, dim=-1, in_keys=["observation"]))
    return TransformedEnv(pendulum(), chain)


def several() -> EnvBase:
    return SerialEnv(2, cartpole)


def several_counted() -> EnvBase:
    return TransformedEnv(SerialEnv(2, cartpole), Compose(StepCounter(max_steps=12), RewardSum()))


def turns() -> EnvBase:
    return TransformedEnv(Turns(), ActionMask())


ENVS = [cartpole, pendulum, counted, frames, several, several_counted, Episodes, Team]
