"""The spec properties of `EnvBase`: specs, keys, batch size and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from gleanrl._arrays.devices import as_device
from gleanrl._arrays.tensordicts import NestedKey, as_key, as_path
from gleanrl.data.specs import Composite, TensorSpec
from gleanrl.envs.env_specs import EnvSpecs
from gleanrl.errors import UnsupportedError

_Env = TypeVar("_Env", bound="SpecProperties")


def _spec(role: str, get: Callable[[EnvSpecs, str], Any], doc: str) -> Any:
    """Return a property that reads and replaces the spec of a role."""

    def read(self: SpecProperties) -> Any:
        return get(self._specs, role)

    def write(self: SpecProperties, spec: TensorSpec | None) -> None:
        self._specs.set(role, spec)

    return property(read, write, doc=doc)


def _unbatched(role: str, get: Callable[[EnvSpecs, str], Any]) -> Any:
    """Return a property like that of `_spec`, without the environment's batch dimensions."""

    def read(self: SpecProperties) -> Any:
        return self._specs.without_batch(get(self._specs, role))

    def write(self: SpecProperties, spec: TensorSpec | None) -> None:
        self._specs.set_unbatched(role, spec)

    return property(read, write, doc="The same without the environment's batch dimensions.")


def as_size(batch_size: Any) -> torch.Size:
    """Return a batch size given as None, a number or a sequence as a `torch.Size`."""
    return torch.Size(() if batch_size is None else np.atleast_1d(batch_size).tolist())


class SpecProperties:
    """Reads and writes an `EnvSpecs` under the names of the public API; `EnvBase` derives from it.

    Each role has a short spec and a full spec. The full spec is a composite. The short spec is the leaf if the role's
    name is the only key, else the composite. Both also exist without batch dimensions. Assigning any of the four
    replaces the role's spec.
    """

    _specs: EnvSpecs

    # ------------------------------------------------------------------ size
    @property
    def batch_size(self) -> torch.Size:
        """Batch dimensions, ``()`` for one environment.

        Assigning raises `EnvironmentContractError` if a declared spec lacks the new dimensions; then nothing changes.
        """
        return self._specs.batch_size

    @batch_size.setter
    def batch_size(self, size: Any) -> None:
        self._specs.settle(as_size(size), self._specs.device)

    @property
    def shape(self) -> torch.Size:
        """The same as `batch_size`."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    @property
    def batch_dims(self) -> int:
        """The same as `ndim`."""
        return len(self.batch_size)

    def ndimension(self) -> int:
        """Return the number of batch dimensions."""
        return len(self.batch_size)

    def numel(self) -> int:
        """Return the number of environments, at least one."""
        return max(1, self.batch_size.numel())

    @property
    def device(self) -> torch.device | None:
        """Device of the environment's TensorDicts; None if they have none.

        Assigning after `EnvBase.__init__` raises `UnsupportedError`.
        """
        return self._specs.device

    @device.setter
    def device(self, device: Any) -> None:
        if "usage" in vars(self):  # `EnvBase.__init__` has run: existing data is on the old device
            raise UnsupportedError(
                f"device: got {device!r} after the constructor; call env.to(device) instead"
            )
        self._specs.settle(self._specs.batch_size, as_device(device))

    # ----------------------------------------------------------------- specs
    observation_spec = _spec(
        "observation",
        EnvSpecs.full,
        "Spec of the observations: the entries that `reset` and `step` return, without rewards and flags.",
    )
    action_spec = _spec(
        "action",
        EnvSpecs.short,
        'Spec of the action: a leaf if ``"action"`` is its only key, otherwise a composite.',
    )
    reward_spec = _spec(
        "reward",
        EnvSpecs.short,
        'Spec of the reward: a leaf if ``"reward"`` is its only key, otherwise a composite.',
    )
    done_spec = _spec("done", EnvSpecs.short, "Spec of the flags, with done and terminated added if missing.")
    state_spec = _spec(
        "state", EnvSpecs.full, "Spec of the states: the entries that `step` reads, without the action."
    )

    full_observation_spec = _spec("observation", EnvSpecs.full, "The same as `observation_spec`.")
    full_action_spec = _spec("action", EnvSpecs.full, "Spec of the actions, by key.")
    full_reward_spec = _spec("reward", EnvSpecs.full, "Spec of the rewards, by key.")
    full_done_spec = _spec("done", EnvSpecs.full, "Spec of the flags, by key.")
    full_state_spec = _spec("state", EnvSpecs.full, "The same as `state_spec`.")

    observation_spec_unbatched = _unbatched("observation", EnvSpecs.full)
    action_spec_unbatched = _unbatched("action", EnvSpecs.short)
    reward_spec_unbatched = _unbatched("reward", EnvSpecs.short)
    done_spec_unbatched = _unbatched("done", EnvSpecs.short)
    state_spec_unbatched = _unbatched("state", EnvSpecs.full)

    full_observation_spec_unbatched = _unbatched("observation", EnvSpecs.full)
    full_action_spec_unbatched = _unbatched("action", EnvSpecs.full)
    full_reward_spec_unbatched = _unbatched("reward", EnvSpecs.full)
    full_done_spec_unbatched = _unbatched("done", EnvSpecs.full)
    full_state_spec_unbatched = _unbatched("state", EnvSpecs.full)

    @property
    def input_spec(self) -> Composite:
        """The inputs of `step`: ``full_action_spec`` and ``full_state_spec``."""
        return self._group("action", "state")

    @property
    def output_spec(self) -> Composite:
        """The outputs of `step`: ``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec``."""
        return self._group("observation", "reward", "done")

    @property
    def input_spec_unbatched(self) -> TensorSpec:
        """The same as `input_spec` without the environment's batch dimensions."""
        return self._specs.without_batch(self.input_spec)

    @property
    def output_spec_unbatched(self) -> TensorSpec:
        """The same as `output_spec` without the environment's batch dimensions."""
        return self._specs.without_batch(self.output_spec)

    @property
    def specs(self) -> Composite:
        """`input_spec` and `output_spec` in one composite, under these names."""
        parts = {"input_spec": self.input_spec, "output_spec": self.output_spec}
        return Composite(parts, shape=self._specs.batch_size, device=self._specs.device)

    def _group(self, *roles: str) -> Composite:
        parts = {f"full_{role}_spec": self._specs.full(role) for role in roles}
        return Composite(parts, shape=self._specs.batch_size, device=self._specs.device)

    def set_spec_lock_(self: _Env, mode: bool = True) -> _Env:
        """Forbid or allow writing into the composite specs. Assigning a whole spec is always allowed.

        Returns:
            The environment.
        """
        self._specs.lock(mode)
        return self

    @property
    def is_spec_locked(self) -> bool:
        """Whether writing into the composite specs is an error."""
        return self._specs.locked

    # ------------------------------------------------------------------ keys
    action_keys = property(lambda self: self._specs.keys("action"))
    observation_keys = property(lambda self: self._specs.keys("observation"))
    reward_keys = property(lambda self: self._specs.keys("reward"))
    done_keys = property(lambda self: self._specs.keys("done"))
    state_keys = property(lambda self: self._specs.keys("state"))
    action_key = property(lambda self: self._specs.only_key("action"))
    reward_key = property(lambda self: self._specs.only_key("reward"))
    done_key = property(lambda self: self._specs.only_key("done"))

    @property
    def reset_keys(self) -> list[NestedKey]:
        """The key of the ``"_reset"`` mask of each group of flags."""
        return [as_key((*group, "_reset")) for group in self._specs.groups()]

    @property
    def done_keys_groups(self) -> list[list[NestedKey]]:
        """The flags, one list for each group."""
        keys = [as_path(key) for key in self.done_keys]
        return [[as_key(p) for p in keys if p[:-1] == group] for group in self._specs.groups()]

    def add_truncated_keys(self: _Env) -> _Env:
        """Add a truncated flag to every group of flags that has none; return the environment."""
        self._specs.add_truncated()
        return self
