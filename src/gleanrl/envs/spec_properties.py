"""The spec properties of `EnvBase`: what an environment declares, by role and by key."""

from __future__ import annotations

from typing import TypeVar

from gleanrl.data.specs import Composite, TensorSpec
from gleanrl.envs.env_specs import EnvSpecs
from gleanrl.tree import NestedKey, as_key, as_path

_Env = TypeVar("_Env", bound="SpecProperties")


class SpecProperties:
    """Reads and writes an `EnvSpecs` under the names of the public API; `EnvBase` derives from it."""

    _specs: EnvSpecs

    @property
    def observation_spec(self) -> Composite:
        """What `reset` and `step` return beside reward and flags."""
        return self._specs.full("observation")

    @observation_spec.setter
    def observation_spec(self, spec: Composite) -> None:
        self._specs.set("observation", spec)

    @property
    def action_spec(self) -> TensorSpec:
        """The action's spec: a leaf if there is one action, a composite otherwise."""
        return self._specs.short("action")

    @action_spec.setter
    def action_spec(self, spec: TensorSpec) -> None:
        self._specs.set("action", spec)

    @property
    def reward_spec(self) -> TensorSpec:
        """The reward's spec: a leaf if there is one reward, a composite otherwise."""
        return self._specs.short("reward")

    @reward_spec.setter
    def reward_spec(self, spec: TensorSpec) -> None:
        self._specs.set("reward", spec)

    @property
    def done_spec(self) -> TensorSpec:
        """The flags' spec, completed with done and terminated."""
        return self._specs.short("done")

    @done_spec.setter
    def done_spec(self, spec: TensorSpec) -> None:
        self._specs.set("done", spec)

    @property
    def state_spec(self) -> Composite:
        """What `step` reads beside the action."""
        return self._specs.full("state")

    @state_spec.setter
    def state_spec(self, spec: Composite | None) -> None:
        self._specs.set("state", spec)

    full_observation_spec = property(lambda self: self._specs.full("observation"))
    full_action_spec = property(lambda self: self._specs.full("action"))
    full_reward_spec = property(lambda self: self._specs.full("reward"))
    full_done_spec = property(lambda self: self._specs.full("done"))
    full_state_spec = property(lambda self: self._specs.full("state"))

    @property
    def input_spec(self) -> Composite:
        """What `step` reads: ``full_action_spec`` and ``full_state_spec``."""
        return self._group("action", "state")

    @property
    def output_spec(self) -> Composite:
        """What `step` returns: ``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec``."""
        return self._group("observation", "reward", "done")

    @property
    def specs(self) -> Composite:
        """`input_spec` and `output_spec` under those names."""
        parts = {"input_spec": self.input_spec, "output_spec": self.output_spec}
        return Composite(parts, shape=self._specs.batch_size, device=self._specs.device)

    def _group(self, *roles: str) -> Composite:
        parts = {f"full_{role}_spec": self._specs.full(role) for role in roles}
        return Composite(parts, shape=self._specs.batch_size, device=self._specs.device)

    action_keys = property(lambda self: self._specs.keys("action"))
    reward_keys = property(lambda self: self._specs.keys("reward"))
    done_keys = property(lambda self: self._specs.keys("done"))
    state_keys = property(lambda self: self._specs.keys("state"))
    action_key = property(lambda self: self._specs.only_key("action"))
    reward_key = property(lambda self: self._specs.only_key("reward"))
    done_key = property(lambda self: self._specs.only_key("done"))

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The ``"_reset"`` mask of each group of flags."""
        return [as_key((*group, "_reset")) for group in self._specs.groups()]

    @property
    def done_keys_groups(self) -> list[list[NestedKey]]:
        """The flags, grouped by where they stand."""
        keys = [as_path(key) for key in self.done_keys]
        return [[as_key(p) for p in keys if p[:-1] == group] for group in self._specs.groups()]

    def add_truncated_keys(self: _Env) -> _Env:
        """Add a truncated flag to every group of flags that has none; returns the environment."""
        self._specs.add_truncated()
        return self
