"""An environment that obeys every rule of `check_env`, and variants that each break one rule."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data import Bounded, Composite, Unbounded
from gleanrl.envs import EnvBase
from tests.fakes_base import flag_spec


class Walk(EnvBase):
    """Random walks, one per row of the batch with a private generator; a walk ends beyond +-3.

    An episode begins within +-0.1.
    """

    def __init__(self, batch_size: tuple[int, ...] = (3,), **kwargs: Any) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        self.rows = max(1, self.batch_size.numel())
        self.observation_spec = Composite(observation=Unbounded((*batch_size, 2)), shape=batch_size)
        self.action_spec = Bounded(-1.0, 1.0, (*batch_size, 1))
        self.reward_spec = Unbounded((*batch_size, 1))
        flags = ("done", "terminated", "truncated")
        self.done_spec = Composite({k: flag_spec((*batch_size, 1)) for k in flags}, shape=batch_size)
        self.draws = [torch.Generator() for _ in range(self.rows)]
        self.place, self.clock = torch.zeros(self.rows, 1), torch.zeros(self.rows, 1)

    def _set_seed(self, seed: int | None) -> None:
        for i, draw in enumerate(self.draws):
            draw.manual_seed((seed or 0) + i)

    def draw(self) -> torch.Tensor:
        return torch.stack([torch.rand(1, generator=draw) for draw in self.draws])

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        for i in range(self.rows):
            if mask is None or mask.reshape(-1)[i]:
                self.place[i] = (torch.rand(1, generator=self.draws[i]) - 0.5) / 5
                self.clock[i] = 0
        return self.packed()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.place += tensordict["action"].reshape(-1, 1).clamp(-1, 1) + (self.draw() - 0.5)
        self.clock += 1
        out = self.packed()
        out["terminated"] = self.shaped(self.place.abs() > 3)
        out["truncated"] = self.shaped(self.clock >= 12)
        out["done"] = out["terminated"] | out["truncated"]
        return out.set("reward", self.shaped(-self.place.abs()))

    def packed(self) -> TensorDict:
        rows = torch.cat([self.place, self.clock], -1).reshape(*self.batch_size, 2).clone()
        return TensorDict({"observation": rows}, self.batch_size)

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(*self.batch_size, 1).clone()


class SeedingWalk(Walk):
    """A right environment, which seeds torch itself."""

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(seed)
        torch.manual_seed(0 if seed is None else seed)


class StartsDone(Walk):
    """contract"""

    def _reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return super()._reset(*args, **kwargs).set("done", self.shaped(torch.ones(self.rows) > 0))


class Greedy(Walk):
    """input"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        tensordict["action"].mul_(2)
        return out


class Doubling(Walk):
    """specs"""

    def packed(self) -> TensorDict:
        return super().packed().double()


class Chatty(Walk):
    """specs"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("surprise", self.shaped(self.clock))


class Narrow(Walk):
    """specs"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = self.observation_spec["observation"].shape
        self.observation_spec = Composite(observation=Bounded(-1.0, 1.0, shape), shape=self.batch_size)


class Infinite(Walk):
    """finite"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("reward", self.shaped(1 / (self.clock - 5)))


class Undecided(Walk):
    """flags"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        return out.set("done", out["terminated"].clone())


class Reusing(Walk):
    """aliasing"""

    def packed(self) -> TensorDict:
        kept = self.__dict__.setdefault("_kept", super().packed()["observation"].clone())
        kept.copy_(super().packed()["observation"])
        return TensorDict({"observation": kept}, self.batch_size)


class Forgetting(Walk):
    """following root"""

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().maybe_reset(tensordict.set("observation", tensordict["observation"] * 0))


class SelfResetting(Walk):
    """last observation"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        if out["done"].any():
            request = TensorDict({"_reset": out["done"]}, self.batch_size)
            out["observation"] = Walk._reset(self, request)["observation"]
        return out


class Unseeded(Walk):
    """determinism"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        torch.default_generator.manual_seed(torch.seed())
        self.place += torch.rand(self.rows, 1) / 100
        return super()._step(tensordict)


class OneSeed(Walk):
    """seed"""

    def _set_seed(self, seed: int | None) -> None:
        super()._set_seed(0)


class Overreaching(Walk):
    """other rows"""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset()


class Zeroing(Walk):
    """partial reset"""

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        wanted = mask is not None and not torch.equal(mask, tensordict["done"])
        out = super().reset(tensordict, **kwargs)
        if wanted:
            out["observation"] = out["observation"] * mask
        return out


class Fragile(Walk):
    """odd actions"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        odd = tensordict["action"].abs() > 1
        return out.set("observation", torch.where(odd, torch.nan, out["observation"]))


class Hanging(Walk):
    """odd actions"""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict["action"].abs().max() > 1:
            self.broken = True
            raise ValueError("what an action")
        return super()._step(tensordict)

    def _reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        if getattr(self, "broken", False):
            raise ValueError("broken for good")
        return super()._reset(*args, **kwargs)


class OtherPath(Walk):
    """rollout"""

    def make_stepper(self, *rules: Any) -> Any:
        stepper = super().make_stepper(*rules)
        bind, step = stepper.bind, stepper.step
        rewards: list[Any] = []

        def bound(block: Any, *arguments: Any) -> None:
            rewards[:] = block.rows(("next", "reward"))
            bind(block, *arguments)

        def wrong(t: int) -> None:
            step(t)
            rewards[t] += 1

        stepper.bind, stepper.step = bound, wrong
        return stepper


BROKEN = [
    *(StartsDone, Greedy, Doubling, Chatty, Narrow, Infinite, Undecided, Reusing, Forgetting),
    *(SelfResetting, Unseeded, OneSeed, Overreaching, Zeroing, Fragile, Hanging, OtherPath),
]
