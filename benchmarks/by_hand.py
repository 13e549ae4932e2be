"""Hand-written loops that replace the collector and the buffer of two programs.

They show how much time a program needs without a library. Each loop does only the work that its program needs. It
knows the environment, the transforms and the networks, and checks nothing. It keeps the tensors of all steps and
stacks them when the batch is complete. Modules and environments get the same inputs as from a library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

ONE = torch.Size()


class CartPoles:
    """CartPole with a step counter, and the policy of the DQN program: action values, choice, exploration."""

    def __init__(
        self, env: Any, policy: Any, frames_per_batch: int, total_frames: int, init_random_frames: int
    ) -> None:
        self.env = gym.make("CartPole-v1")
        self.policy, self.num_steps = policy, frames_per_batch
        self.num_batches = total_frames // frames_per_batch
        self.num_random = init_random_frames // frames_per_batch

    @torch.no_grad()
    def __iter__(self) -> Iterator[TensorDict]:
        """Yield the batches."""
        (values, choose), explore = self.policy[0], self.policy[1]
        steps, count = self.num_steps, 0
        obs, _ = self.env.reset(seed=0)
        for batch in range(self.num_batches):
            array = {
                key: np.zeros((steps, size), kind)
                for key, size, kind in (
                    *(("obs", 4, np.float32), ("after", 4, np.float32), ("reward", 1, np.float32)),
                    *(("terminated", 1, bool), ("truncated", 1, bool), ("count", 1, np.int64)),
                )
            }
            column = {key: torch.from_numpy(one) for key, one in array.items()}
            rows, made = column["obs"].unbind(0), []
            choices = torch.randint(2, (steps,)) if batch < self.num_random else None
            for t in range(steps):
                array["obs"][t], array["count"][t] = obs, count
                if choices is None:
                    row = TensorDict._new_unsafe({"observation": rows[t]}, ONE)
                    row["action_value"] = values.module(rows[t])
                    made.append(row := explore(choose(row)))
                    action = int(row["action"].argmax())
                else:
                    action = int(choices[t])
                obs, reward, terminated, truncated, _ = self.env.step(action)
                count += 1
                array["after"][t], array["reward"][t] = obs, reward
                array["terminated"][t], array["truncated"][t] = terminated, truncated
                if terminated or truncated:
                    (obs, _), count = self.env.reset(), 0
            yield self._batch(column, made, choices)

    def _batch(self, column: dict[str, torch.Tensor], made: list[Any], choices: Any) -> TensorDict:
        """Return a batch with the entries of a collector's batch. The action values of random steps are 0."""
        keys = ("action", "action_value", "chosen_action_value")
        if choices is None:
            out = {key: torch.stack([row[key] for row in made]) for key in keys}
        else:
            out = {keys[0]: torch.nn.functional.one_hot(choices, 2)}
            out |= {keys[1]: torch.zeros(self.num_steps, 2), keys[2]: torch.zeros(self.num_steps, 1)}
        flags = {key: column[key] for key in ("terminated", "truncated")}
        ended = column["terminated"] | column["truncated"]
        after = {
            "observation": column["after"],
            "reward": column["reward"],
            "step_count": column["count"] + 1,
        }
        none = {key: torch.zeros_like(ended) for key in ("done", *flags)}
        size = [self.num_steps]
        return TensorDict(
            {
                **({"observation": column["obs"], "step_count": column["count"]} | out | none),
                "next": TensorDict({**after, **flags, "done": ended}, size),
            },
            size,
        )


class Points:
    """The environment of the PPO program with its scaling, step counter and reward sum, and the program's policy."""

    def __init__(self, env: Any, policy: Any, frames_per_batch: int, total_frames: int, device: str) -> None:
        self.env, self.policy = env.base_env, policy
        self.size = env.batch_size
        self.num_steps = frames_per_batch // self.size.numel()
        self.num_batches = total_frames // frames_per_batch

    @torch.no_grad()
    def __iter__(self) -> Iterator[TensorDict]:
        """Yield the batches."""
        env, size, limit = self.env, self.size, 25
        network, draw = self.policy.module[0].module, self.policy.module[1]
        kind, kwargs = draw.distribution_class, draw.distribution_kwargs
        root = env._reset()
        raw, target = root["position"], root["target"]
        position, count, total = raw / 1.5, torch.zeros(*size, 1, dtype=torch.int64), torch.zeros(*size, 1)
        for _ in range(self.num_batches):
            before, after = [], []
            for _ in range(self.num_steps):
                loc, scale = network(position, target)
                distribution = kind(loc, scale, **kwargs)
                action = distribution.rsample()
                score = distribution.log_prob(action)
                before.append((position, target, loc, scale, action, score, count, total))
                out = env._step(
                    TensorDict._new_unsafe({"position": raw, "target": target, "action": action}, size)
                )
                raw, target, reward = out["position"], out["target"], out["reward"]
                position, count, total = raw / 1.5, count + 1, total + reward
                truncated = count >= limit
                done = out["done"] | truncated
                after.append((position, target, reward, count, total, done, out["terminated"], truncated))
                if bool(done.any()):
                    asked = {"position": raw, "target": target, "_reset": done}
                    root = env._reset(TensorDict._new_unsafe(asked, size))
                    raw, target = root["position"], root["target"]
                    position = raw / 1.5
                    count, total = torch.where(done, 0, count), torch.where(done, 0.0, total)
            yield self._batch(before, after)

    def _batch(self, before: list[Any], after: list[Any]) -> TensorDict:
        whole = [*self.size, self.num_steps]
        names = ("position", "target", "loc", "scale", "action", "action_log_prob", "step_count")
        made = dict(zip((*names, "episode_reward"), _columns(before), strict=True))
        names = ("position", "target", "reward", "step_count", "episode_reward", "done", "terminated")
        then = dict(zip((*names, "truncated"), _columns(after), strict=True))
        none = {key: torch.zeros_like(then["done"]) for key in ("done", "terminated", "truncated")}
        return TensorDict({**made, **none, "next": TensorDict(then, whole)}, whole)

    def shutdown(self) -> None:
        """Do nothing. The program calls this method at its end."""


def _columns(rows: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [torch.stack(column, 1) for column in zip(*rows, strict=True)]


class Rows:
    """A buffer that appends batches and samples rows uniformly."""

    def __init__(self, storage: Any, batch_size: int) -> None:
        self.batch_size, self.max_size, self.count = batch_size, storage.max_size, 0
        self.columns: dict[Any, torch.Tensor] = {}

    def extend(self, batch: TensorDict) -> None:
        """Append a batch."""
        stop = self.count + batch.shape[0]
        for key, value in batch.items(True, True):
            if key not in self.columns:
                self.columns[key] = torch.empty(self.max_size, *value.shape[1:], dtype=value.dtype)
            self.columns[key][self.count : stop] = value
        self.count = stop

    def sample(self) -> TensorDict:
        """Return `batch_size` random rows, drawn with replacement."""
        return self._taken(torch.randint(self.count, (self.batch_size,)))

    def _taken(self, index: torch.Tensor) -> TensorDict:
        levels: tuple[dict[str, Any], dict[str, Any]] = ({"index": index}, {})
        for key, value in self.columns.items():
            levels[type(key) is tuple][key[1] if type(key) is tuple else key] = value.index_select(0, index)
        levels[0]["next"] = TensorDict._new_unsafe(levels[1], index.shape)
        return TensorDict._new_unsafe(levels[0], index.shape)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.count

    def __getitem__(self, _: slice) -> TensorDict:
        """Return all rows, for any slice."""
        return TensorDict({key: value[: self.count] for key, value in self.columns.items()}, [self.count])


class Epochs(Rows):
    """A buffer that holds one batch and samples each of its rows once per epoch."""

    def __init__(self, storage: Any, sampler: Any, batch_size: int) -> None:
        super().__init__(storage, batch_size)
        self.left: list[torch.Tensor] = []

    def extend(self, batch: TensorDict) -> None:
        """Replace the stored batch."""
        self.count, self.left = 0, []
        super().extend(batch)

    def sample(self) -> TensorDict:
        """Return the next rows of a random permutation; after its last rows, start a new permutation."""
        self.left = self.left or list(torch.randperm(self.count).split(self.batch_size))
        return self._taken(self.left.pop())


LOOPS: dict[str, tuple[type, dict[str, type]]] = {
    "dqn": (CartPoles, {"TensorDictReplayBuffer": Rows}),
    "ppo_continuous": (Points, {"ReplayBuffer": Epochs}),
}
"""For each program: the class that replaces its collector, and the classes that replace its buffers, by name."""
