"""A multi-agent environment whose agents die one after the other, written as a user of the library would write it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase, check_marl_grouping
from tests.fakes import Script
from tests.fakes_base import flag_spec

GROUPS = {"red": ["anna", "bert"], "blue": ["cleo"]}


class SurvivorEnv(EnvBase):
    """Three agents in two groups. An agent observes `(stream, episode, step)` and earns 1 per step until it dies.

    Agent k dies k steps after the script's episode length.

    Args:
        ends: when the episode ends: "all" (last death), "any" (first death) or None. With None, the environment
            has no flags at the root, and each group's mask resets its agents.
        script: the lengths.
        batch_size: batch dimensions.
        groups: maps each group to its agents.
    """

    def __init__(
        self,
        ends: str | None = "all",
        script: Script | None = None,
        batch_size: tuple[int, ...] = (),
        groups: dict[str, list[str]] | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size)
        self.groups = groups or GROUPS
        agents = [agent for group in self.groups.values() for agent in group]
        check_marl_grouping(self.groups, agents)
        self.ends, self.script, self.num_agents = ends, script or Script(lengths=(2, 4)), len(agents)
        rows = (max(1, self.batch_size.numel()), self.num_agents)
        self._streams = torch.arange(rows[0])[:, None].expand(rows)
        self._episode, self._clock = torch.full(rows, -1), torch.zeros(rows, dtype=torch.int64)
        self._dead = torch.zeros(rows, dtype=torch.bool)
        self.masks: list[torch.Tensor] = []
        self._declare()

    def _declare(self) -> None:
        def each(make: Any) -> dict[str, Composite]:
            sizes = {name: torch.Size((*self.batch_size, len(group))) for name, group in self.groups.items()}
            return {name: Composite(make(tuple(size)), shape=size) for name, size in sizes.items()}

        flags = ("done", "terminated", "truncated")
        self.observation_spec = self._composite(each(lambda n: {"observation": Unbounded((*n, 3))}))
        self.action_spec = self._composite(each(lambda n: {"action": Bounded(-1.0, 1.0, (*n, 2))}))
        self.reward_spec = self._composite(each(lambda n: {"reward": Unbounded((*n, 1))}))
        own = {} if self.ends is None else {k: flag_spec((*self.batch_size, 1)) for k in flags}
        nested = each(lambda n: {k: flag_spec((*n, 1)) for k in flags})
        self.done_spec = self._composite({**own, **nested})

    def _composite(self, entries: dict[str, Any]) -> Composite:
        return Composite(entries, shape=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = torch.ones_like(self._dead)
        if tensordict is not None and ("red", "_reset") in tensordict.keys(True):
            parts = [tensordict[name, "_reset"].reshape(len(mask), -1) for name in self.groups]
            mask = torch.cat(parts, -1)
        self.masks.append(mask)
        self._episode += mask
        self._clock[mask], self._dead[mask] = 0, False
        return self._package()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        alive = ~self._dead
        self._clock += alive
        lengths = torch.tensor(
            [
                [self.script.length(int(s), int(e)) + k for k, (s, e) in enumerate(zip(*row, strict=True))]
                for row in zip(self._streams, self._episode, strict=True)
            ]
        )
        self._dead |= self._clock >= lengths
        return self._package(alive.float())

    def _set_seed(self, seed: int | None) -> None:
        self._episode.fill_(-1)

    def _package(self, reward: torch.Tensor | None = None) -> TensorDict:
        rows = torch.stack([self._streams, self._episode, self._clock], -1).float()
        out = TensorDict({}, self.batch_size)
        ended = self._dead.all(-1) if self.ends == "all" else self._dead.any(-1)
        if self.ends is not None:
            out["terminated"] = ended.reshape(*self.batch_size, 1)
        first = 0
        for name, group in self.groups.items():
            size = torch.Size((*self.batch_size, len(group)))
            part = slice(first, first + len(group))
            first += len(group)
            values = {"observation": rows[:, part], "terminated": self._dead[:, part, None]}
            if reward is not None:
                values["reward"] = reward[:, part, None]
            shaped = {k: v.reshape(*size, v.shape[-1]).clone() for k, v in values.items()}
            out[name] = TensorDict(shaped, size)
        return out
