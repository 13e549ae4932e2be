"""Transforms that users derive from the public class, in the ways that other releases of this API allow."""

from __future__ import annotations

import torch
from gleanrl.envs.transforms.transforms import _apply_to_composite

from gleanrl.data import Bounded, Categorical, Composite, Unbounded
from gleanrl.envs.transforms import Transform, TransformedEnv

KINDS = []


def kind(cls):
    KINDS.append(cls)
    return cls


class Kind(Transform):
    """A transform that can check the batches that it was applied to."""

    def check(self, batch):
        raise NotImplementedError


# ------------------------------------------------------------- one entry at a time
@kind
class MapsAnEntry(Kind):
    def __init__(self):
        super().__init__(in_keys=["observation"], out_keys=["observation"])

    def _apply_transform(self, observation):
        return observation + 10

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def check(self, batch):
        assert (batch["observation"][..., 0] >= 10).all()
        assert torch.equal(batch["next", "observation"][..., 2] % 1, torch.zeros(batch.shape))


@kind
class MapsAnEntryElsewhere(Kind):
    """Has a spec method for one leaf, under the decorator that the documents show."""

    def __init__(self):
        super().__init__(in_keys=["observation"], out_keys=["angle"])

    def _apply_transform(self, observation):
        return observation.sin()

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    @_apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return Bounded(-1, 1, observation_spec.shape, observation_spec.device, observation_spec.dtype)

    def check(self, batch):
        assert torch.equal(batch["angle"], batch["observation"].sin())
        assert torch.equal(batch["next", "angle"], batch["next", "observation"].sin())


@kind
class MapsRewards(Kind):
    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])

    def _apply_transform(self, reward):
        return reward.sign()

    def transform_reward_spec(self, reward_spec):
        assert "reward" in reward_spec.keys()
        return reward_spec

    def check(self, batch):
        assert torch.equal(batch["next", "reward"], batch["next", "reward"].sign())


# ------------------------------------------------------------------ whole steps
@kind
class AddsAnEntry(Kind):
    """Overrides `_call`, which runs at steps and resets, and a spec method."""

    def _call(self, next_tensordict):
        return next_tensordict.set("twice", next_tensordict["observation"] * 2)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec):
        observation_spec["twice"] = observation_spec["observation"].clone()
        return observation_spec

    def check(self, batch):
        assert torch.equal(batch["twice"], batch["observation"] * 2)
        assert torch.equal(batch["next", "twice"], batch["next", "observation"] * 2)


@kind
class AddsAnEntryByOutputSpec(AddsAnEntry):
    def transform_observation_spec(self, observation_spec):
        return observation_spec

    def transform_output_spec(self, output_spec):
        output_spec = super().transform_output_spec(output_spec)
        leaf = output_spec["full_observation_spec", "observation"]
        output_spec["full_observation_spec", "twice"] = leaf.clone()
        return output_spec


@kind
class ChangesRewardsInCall(Kind):
    """Overrides `_call`, which doesn't run at resets here, because a reset has no reward."""

    def __init__(self):
        super().__init__(in_keys=["observation"], out_keys=["observation"])

    def _call(self, next_tensordict):
        next_tensordict["reward"] = next_tensordict["reward"] * 0 + next_tensordict["observation"][..., 2:]
        return next_tensordict

    def check(self, batch):
        assert torch.equal(batch["next", "reward"], batch["next", "observation"][..., 2:])


@kind
class ShapesRewards(Kind):
    def _step(self, tensordict, next_tensordict):
        gain = next_tensordict["observation"] - tensordict["observation"]
        next_tensordict["reward"] = gain.sum(-1, keepdim=True)
        return next_tensordict

    def check(self, batch):
        assert (batch["next", "reward"] == 1).all()


@kind
class KeepsAMeanInTheRoot(Kind):
    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("mean", (tensordict["mean"] + next_tensordict["observation"]) / 2)

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("mean", tensordict_reset["observation"].clone())

    def transform_observation_spec(self, observation_spec):
        observation_spec["mean"] = observation_spec["observation"].clone()
        return observation_spec

    def check(self, batch):
        assert torch.equal(batch["next", "mean"], (batch["mean"] + batch["next", "observation"]) / 2)
        first = batch["observation"][..., 2] == 0
        assert torch.equal(batch["mean"][first], batch["observation"][first])


@kind
class MarksFirstSteps(Kind):
    """Writes an entry into the root after a reset, and below next after a step."""

    def _call(self, next_tensordict):
        return next_tensordict.set("first", torch.zeros_like(next_tensordict["done"]))

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("first", torch.ones_like(tensordict_reset["done"]))

    def transform_observation_spec(self, observation_spec):
        shape = (*observation_spec.shape, 1)
        observation_spec["first"] = Categorical(2, shape=shape, dtype=torch.bool)
        return observation_spec

    def check(self, batch):
        assert torch.equal(batch["first"], batch["observation"][..., 2:] == 0)


@kind
class EndsEpisodes(Kind):
    def _step(self, tensordict, next_tensordict):
        over = next_tensordict["observation"][..., 2:] >= 2
        for flag in ("terminated", "done"):
            next_tensordict[flag] = next_tensordict[flag] | over
        return next_tensordict

    def check(self, batch):
        assert (batch["observation"][..., 2] < 2).all()


@kind
class ReturnsAnotherTensorDict(Kind):
    def _call(self, tensordict):
        flags = tensordict.select("reward", "done", "terminated", "truncated", strict=False)
        return flags.set("clock", tensordict["observation"][..., 2:])

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec):
        shape = observation_spec.shape
        return Composite(clock=Unbounded((*shape, 1)), shape=shape)

    def check(self, batch):
        assert "observation" not in batch.keys() and "observation" not in batch["next"].keys()
        assert torch.equal(batch["next", "clock"], batch["clock"] + 1)


# ------------------------------------------------------------------------ inputs
@kind
class ChangesInputs(Kind):
    def _inv_call(self, tensordict):
        tensordict["action"] = tensordict["action"].clamp(-0.25, 0.25)
        return tensordict

    def check(self, batch):
        assert (batch["action"] == 0.5).all()  # the user's tensor is unchanged

    def check_env(self, env):
        assert all((action == 0.25).all() for action in env.actions)


@kind
class MapsInputs(ChangesInputs):
    invertible = True
    _inv_call = Transform._inv_call

    def __init__(self):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

    def _inv_apply_transform(self, action):
        return action / 2


@kind
class OverridesInv(ChangesInputs):
    _inv_call = Transform._inv_call

    def inv(self, tensordict):
        return tensordict.clone(False).set("action", tensordict["action"] * 0 + 0.25)


@kind
class HasOtherActions(Kind):
    """Has a spec of the user's action, and a spec of all inputs."""

    def __init__(self):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["move"])

    def _inv_apply_transform(self, move):
        return torch.nn.functional.one_hot(move, 2).float()

    def transform_input_spec(self, input_spec):
        input_spec = input_spec.clone()
        batch = input_spec.shape
        del input_spec["full_action_spec", "action"]
        input_spec["full_action_spec", "move"] = Categorical(2, shape=batch)
        return input_spec

    def check(self, batch):
        assert batch["move"].dtype == torch.int64

    def check_env(self, env):
        assert all(torch.equal(action.sum(-1), torch.ones(action.shape[:-1])) for action in env.actions)


@kind
class InvertsResetsToo(Kind):
    """Inverts the input of a reset as well, because the class enables it."""

    enable_inv_on_reset = True

    def __init__(self):
        super().__init__()
        self.asked = 0

    def _inv_call(self, tensordict):
        self.asked += "_reset" in tensordict.keys()
        return tensordict

    def check(self, batch):
        ends = int(batch["next", "done"][..., :-1, :].sum())
        assert ends == 0 or self.asked > 0


@kind
class SeesTheRequest(Kind):
    """Overrides `_reset_env_preprocess`, which runs before the environment's reset; it gets None for a plain reset."""

    def __init__(self):
        super().__init__()
        self.requests = []

    def _reset_env_preprocess(self, tensordict):
        self.requests.append(None if tensordict is None else "_reset" in tensordict.keys())
        return tensordict

    def check(self, batch):
        assert self.requests[0] is None and all(self.requests[1:])


# ------------------------------------------------------------------ parents and containers
@kind
class LooksAround(Kind):
    def _reset(self, tensordict, tensordict_reset):
        assert self.parent.base_env is self.container.base_env
        assert self.container.transform is not None and isinstance(self.container, TransformedEnv)
        assert "step_count" not in self.container.base_env.observation_spec.keys()
        self.seen = sorted(self.parent.observation_spec.keys())
        return tensordict_reset

    def check(self, batch):
        assert "observation" in self.seen


@kind
class FindsTheCollector(Kind):
    def __init__(self):
        super().__init__()
        self.found = []

    def _step(self, tensordict, next_tensordict):
        self.found.append(type(self.collector).__name__)
        return next_tensordict

    def check(self, batch):
        assert set(self.found) <= {"NoneType", "SyncDataCollector"}
