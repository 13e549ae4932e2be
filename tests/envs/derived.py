"""Environments as users derived them from releases 0.5 to 0.9 of the API. Each declares its specs in another style.

`kinds(envs, data)` makes the classes over any library's `EnvBase` and specs. So a test can run the same classes on
gleanrl and on the original.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


def kinds(envs: Any, data: Any) -> dict[str, Any]:
    """Return environment factories by the name of their particular feature."""
    Base, Composite, Unbounded, Bounded = envs.EnvBase, data.Composite, data.Unbounded, data.Bounded
    Categorical, Binary = data.Categorical, data.Binary

    def flag(*shape: int) -> Any:
        return Categorical(2, shape=(*shape, 1), dtype=torch.bool)

    class Counting(Base):
        """The base of most classes here: counts to five."""

        def _reset(self, tensordict=None, **kwargs):
            rows = torch.ones(*self.batch_size, 1, dtype=torch.bool)
            if tensordict is not None and "_reset" in tensordict.keys():
                rows = tensordict["_reset"].reshape(rows.shape)
            old = getattr(self, "count", torch.zeros(*self.batch_size, 1))
            self.count = torch.where(rows, 0.0, old)
            return TensorDict({"observation": self.count.clone()}, self.batch_size, device=self.device)

        def _step(self, tensordict):
            self.count = self.count + 1
            out = {"observation": self.count.clone(), "reward": tensordict["action"].float().clone()}
            return TensorDict({**out, "done": self.count >= 5}, self.batch_size, device=self.device)

        def _set_seed(self, seed):
            self.seeded = seed

    class InInit(Counting):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Bounded(-1, 1, (1,))
            self.reward_spec = Unbounded((1,))
            self.done_spec = flag()

    class BeforeSuper(Counting):
        def __init__(self, batch_size=()):
            self.observation_spec = Composite(observation=Unbounded((*batch_size, 1)), shape=batch_size)
            self.action_spec = Bounded(-1, 1, (*batch_size, 1))
            self.reward_spec = Unbounded((*batch_size, 1))
            super().__init__(batch_size=batch_size)

    class FullSetters(Counting):
        def __init__(self):
            super().__init__(device="cpu")
            self.full_observation_spec = Composite(observation=Unbounded((1,)))
            self.full_action_spec = Composite(action=Bounded(-1, 1, (1,)))
            self.full_reward_spec = Composite(reward=Unbounded((1,)))
            self.full_done_spec = Composite(done=flag(), terminated=flag())
            self.full_state_spec = Composite()

    class UnbatchedSetters(Counting):
        def __init__(self):
            super().__init__(batch_size=[3])
            self.observation_spec_unbatched = Composite(observation=Unbounded((1,)))
            self.action_spec_unbatched = Bounded(-1, 1, (1,))
            self.reward_spec_unbatched = Unbounded((1,))
            self.done_spec_unbatched = flag()

    class FullUnbatchedSetters(Counting):
        def __init__(self):
            super().__init__(batch_size=torch.Size([2]))
            self.full_observation_spec_unbatched = Composite(observation=Unbounded((1,)))
            self.full_action_spec_unbatched = Composite(action=Bounded(-1, 1, (1,)))
            self.full_reward_spec_unbatched = Composite(reward=Unbounded((1,)))
            self.full_done_spec_unbatched = Composite(done=flag())

    class OfTheClass(Counting):
        def __new__(cls, *args, _batch_locked=True, **kwargs):
            cls._output_spec = Composite(
                full_observation_spec=Composite(observation=Unbounded((1,))),
                full_reward_spec=Composite(reward=Unbounded((1,))),
                full_done_spec=Composite(done=flag(), terminated=flag()),
            )
            cls._input_spec = Composite(
                full_action_spec=Composite(action=Bounded(-1, 1, (1,))), full_state_spec=Composite()
            )
            return super().__new__(cls, *args, _batch_locked=_batch_locked, **kwargs)

    class ResetsItself(Counting):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Bounded(-1, 1, (1,))

        def _step(self, tensordict):
            out = super()._step(tensordict)
            if bool(out["done"].all()):
                self.count = self.count * 0
                out["observation"] = self.count.clone()
            return out

    class WithoutReward(Counting):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Bounded(-1, 1, (1,))
            self.reward_spec = Composite()

        def _step(self, tensordict):
            return super()._step(tensordict).exclude("reward")

    class Masked(Counting):
        """Declares a mask as state only, and returns it from resets and steps all the same."""

        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Categorical(4)
            self.state_spec = Composite(action_mask=Binary(4, dtype=torch.bool))
            self.reward_spec = Unbounded(1)

        def _reset(self, tensordict=None):
            out = super()._reset(tensordict)
            return out.set("action_mask", torch.ones(4, dtype=torch.bool))

        def _step(self, tensordict):
            mask = tensordict["action_mask"].clone()
            self.count = self.count + 1
            out = TensorDict({"observation": self.count.clone(), "reward": self.count.clone()}, [])
            return out.set("action_mask", mask).set("done", self.count >= 5)

    class Stateless(Base):
        """Keeps its state in the TensorDicts: positions and parameters, in observation and state."""

        def __init__(self):
            super().__init__(batch_size=[])
            self.observation_spec = Composite(
                place=Unbounded(()), params=Composite(step=Unbounded(())), shape=()
            )
            self.state_spec = self.observation_spec.clone()
            self.action_spec = Bounded(-1, 1, (1,))
            self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict=None):
            size = self.batch_size if tensordict is None else tensordict.batch_size
            if tensordict is None or tensordict.get("params", None) is None:
                params = TensorDict({"step": torch.full(size, 0.5)}, size)
            else:
                params = tensordict["params"]
            return TensorDict({"place": torch.zeros(size), "params": params}, size)

        def _step(self, tensordict):
            place = tensordict["place"] + tensordict["params", "step"] * tensordict["action"].squeeze(-1)
            out = {"place": place, "params": tensordict["params"], "reward": -place.abs().unsqueeze(-1)}
            return TensorDict(
                {**out, "done": torch.zeros_like(place, dtype=torch.bool).unsqueeze(-1)}, tensordict.shape
            )

        def _set_seed(self, seed):
            self.rng = torch.manual_seed(seed)

    class Unlocked(Stateless):
        batch_locked = False

    class ExtraState(Counting):
        """Has a state key that is no observation: each step reads the present value and returns the next one."""

        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.state_spec = Composite(memory=Unbounded((2,)))
            self.action_spec = Bounded(-1, 1, (1,))

        def _reset(self, tensordict=None, **kwargs):
            return super()._reset(tensordict).set("memory", torch.zeros(2))

        def _step(self, tensordict):
            return super()._step(tensordict).set("memory", tensordict["memory"] + 1)

    class SeedTells(InInit):
        def _set_seed(self, seed):
            return seed

    class ScalarFlags(Counting):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Bounded(-1, 1, ())
            self.reward_spec = Unbounded(())
            self.done_spec = Binary(n=1, shape=(1,), dtype=torch.bool)

        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("done", out["done"].squeeze(-1)).set("reward", out["reward"])

    class Grouped(Counting):
        """Has two agents with their keys in a group, and flags at the root."""

        def __init__(self):
            super().__init__()
            agents = Composite(observation=Unbounded((2, 1)), shape=(2,))
            self.observation_spec = Composite(agents=agents)
            self.action_spec = Composite(agents=Composite(action=Bounded(-1, 1, (2, 1)), shape=(2,)))
            self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
            self.done_spec = flag()

        def _reset(self, tensordict=None, **kwargs):
            self.count = torch.zeros(1)
            return TensorDict({"agents": TensorDict({"observation": torch.zeros(2, 1)}, [2])}, [])

        def _step(self, tensordict):
            self.count = self.count + 1
            agents = {"observation": self.count.expand(2, 1).clone(), "reward": torch.ones(2, 1)}
            return TensorDict({"agents": TensorDict(agents, [2]), "done": self.count >= 5}, [])

    class WithTruncated(InInit):
        def __init__(self):
            super().__init__()
            self.done_spec = Composite(done=flag(), terminated=flag(), truncated=flag())

        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("terminated", out["done"]).set("truncated", torch.zeros(1, dtype=torch.bool))

    class LateSpecs(Counting):
        """Has unlocked specs, which change after the construction."""

        def __init__(self):
            super().__init__(spec_locked=False)
            self.observation_spec = Composite(observation=Unbounded((1,)))
            self.action_spec = Bounded(-1, 1, (1,))

    class InPlaceSpecs(Counting):
        """Changes its composite specs in place."""

        def __init__(self):
            super().__init__()
            self.observation_spec["observation"] = Unbounded((1,))
            self.action_spec = Bounded(-1, 1, (1,))

    class Sized(Counting):
        """Sets its batch size itself."""

        def __init__(self):
            super().__init__()
            self.batch_size = torch.Size([2])
            self.observation_spec = Composite(observation=Unbounded((2, 1)), shape=[2])
            self.action_spec = Bounded(-1, 1, (2, 1))
            self.reward_spec = Unbounded((2, 1))

    class WritesRoot(InInit):
        """Writes a key into the TensorDict that `_step` receives."""

        def _step(self, tensordict):
            tensordict.set("noise", torch.ones(1))
            return super()._step(tensordict)

    class Undeclared(InInit):
        """Returns a key that no spec declares."""

        def _step(self, tensordict):
            return super()._step(tensordict).set("extra", torch.ones(1))

    class UndeclaredReset(InInit):
        """Returns a key that no spec declares, for example a mask, from resets too."""

        def _reset(self, tensordict=None, **kwargs):
            return super()._reset(tensordict).set("extra", torch.zeros(1))

        def _step(self, tensordict):
            return super()._step(tensordict).set("extra", self.count.clone())

    class Functions(Base):
        """Takes its methods from module functions, as in a tutorial, and seeds itself."""

        def __init__(self, params=None, seed=None, device="cpu"):
            super().__init__(device=device, batch_size=[])
            self._make_spec(params)
            self.set_seed(torch.empty((), dtype=torch.int64).random_().item() if seed is None else seed)

        @staticmethod
        def gen_params(batch_size=()):
            return TensorDict(
                {"params": TensorDict({"size": torch.ones(batch_size)}, batch_size)}, batch_size
            )

        def _make_spec(self, params):
            params = self.gen_params() if params is None else params
            inner = {
                key: Unbounded(value.shape, dtype=value.dtype) for key, value in params["params"].items()
            }
            self.observation_spec = Composite(
                place=Unbounded(()), params=Composite(inner, shape=()), shape=()
            )
            self.state_spec = self.observation_spec.clone()
            self.action_spec = Bounded(-1, 1, (1,), dtype=torch.float32)
            self.reward_spec = Unbounded((*params.shape, 1))

        def _reset(self, tensordict):
            if tensordict is None or tensordict.is_empty() or tensordict.get("_reset", None) is not None:
                tensordict = self.gen_params(self.batch_size)
            place = torch.rand(tensordict.shape, generator=self.rng)
            return TensorDict({"place": place, "params": tensordict["params"]}, tensordict.shape)

        @staticmethod
        def _step(tensordict):
            place = tensordict["place"] + tensordict["action"].squeeze(-1) * tensordict["params", "size"]
            return TensorDict(
                {
                    "place": place,
                    "params": tensordict["params"],
                    "reward": place.unsqueeze(-1),
                    "done": torch.zeros_like(place.unsqueeze(-1), dtype=torch.bool),
                },
                tensordict.shape,
            )

        def _set_seed(self, seed):
            self.rng = torch.Generator().manual_seed(seed)

    return {
        "in_init": InInit,
        "before_super": BeforeSuper,
        "before_super_batched": lambda: BeforeSuper((2,)),
        "full_setters": FullSetters,
        "unbatched_setters": UnbatchedSetters,
        "full_unbatched_setters": FullUnbatchedSetters,
        "of_the_class": OfTheClass,
        "auto_reset": lambda: ResetsItself(auto_reset=True),
        "without_reward": WithoutReward,
        "masked": Masked,
        "stateless": Stateless,
        "unlocked": Unlocked,
        "extra_state": ExtraState,
        "seed_tells": SeedTells,
        "scalar_flags": ScalarFlags,
        "grouped": Grouped,
        "truncated": WithTruncated,
        "spec_locked_false": LateSpecs,
        "in_place_specs": InPlaceSpecs,
        "sized": Sized,
        "writes_root": WritesRoot,
        "undeclared": Undeclared,
        "undeclared_reset": UndeclaredReset,
        "functions": lambda: Functions(seed=0),
    }
