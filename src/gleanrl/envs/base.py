"""`EnvBase`: what every environment offers, and what a subclass writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.arguments import integer
from gleanrl.devices import as_device
from gleanrl.envs.env_specs import EnvSpecs, complete_flags
from gleanrl.envs.module_state import adopt_entries, parse_entries
from gleanrl.envs.registration import GymRegistration
from gleanrl.envs.resets import due_resets, is_partial, merge_reset, own_request, reset_masks, reset_rows
from gleanrl.envs.rollout import RolloutOptions, run_rollout
from gleanrl.envs.spec_properties import SpecProperties
from gleanrl.envs.state import load_state
from gleanrl.errors import (
    ClosedError,
    EnvironmentContractError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)
from gleanrl.overrides import overridden
from gleanrl.rollouts.policies import RandomPolicy
from gleanrl.rollouts.protocol import FREELY, EpisodeRules, Stepper
from gleanrl.rollouts.steppers import TensorDictStepper
from gleanrl.rollouts.stepping import advance
from gleanrl.rollouts.traits import EnvTraits, has_mask
from gleanrl.rollouts.usage import Usage
from gleanrl.tree import NestedKey, Path, as_key, as_path

# How an environment is put behind a transform; `envs.transforms` fills this in, as the base class can't import those
# who derive from it.
BEHIND_TRANSFORM: list[Callable[[Any, Any], Any]] = []


REPLACED = ("step", "reset", "maybe_reset", "step_and_maybe_reset", "_step", "_reset")
"""The methods that a stepper with means of its own replaces: it is chosen only where they are a class's own."""


class EnvBase(SpecProperties, GymRegistration, nn.Module):
    """Abstract environment: TensorDict in, TensorDict out.

    A subclass sets its specs (`observation_spec`, `action_spec`, and where the defaults don't fit
    `reward_spec`, `done_spec`, `state_spec`) in its constructor and writes three methods:

    - ``_reset(tensordict=None, **kwargs)`` returns a new TensorDict with the first observations. With a
      ``"_reset"`` mask in `tensordict` only the environments where it is True are reset: the others go on,
      and their rows of the result are ignored.
    - ``_step(tensordict)`` returns a new TensorDict with the next observations, the reward and the flags,
      not nested.
    - ``_set_seed(seed)`` seeds the simulator.

    Missing flags are completed: only done gives ``terminated := done``, only terminated gives
    ``done := terminated | truncated``, none gives False. Not thread-safe.

    Args:
        device: device of the environment's TensorDicts; None for TensorDicts without a device.
        batch_size: batch dimensions of an environment that steps many at once, ``()`` for one.
        run_type_checks: whether every step's output is checked against the specs.
        allow_done_after_reset: whether a reset may return done.
    """

    batch_locked = True
    primed_keys: Sequence[NestedKey] = ()
    """What a policy may write below ``"next"``: its state, which it finds in the root of the following step."""

    def __init__(
        self,
        *,
        device: torch.device | str | int | None = None,
        batch_size: Any = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
    ) -> None:
        super().__init__()
        size = () if batch_size is None else (batch_size,) if isinstance(batch_size, int) else batch_size
        self._batch_size = torch.Size(size)
        self._device = as_device(device)
        self.run_type_checks = run_type_checks
        self.allow_done_after_reset = allow_done_after_reset
        self.is_closed = False
        self.usage = Usage()
        self._specs = EnvSpecs(self._batch_size, self._device)

    # -------------------------------------------------------- for subclasses
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _reset")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _step")

    def _set_seed(self, seed: int | None) -> Any:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _set_seed")

    def _blank(self) -> TensorDictBase:
        """Return a TensorDict without entries; environments whose data are stacked lazily override it."""
        return TensorDict({}, self.batch_size, device=self.device)

    def _seed_all(self, seed: int, static_seed: bool) -> None:
        """Seed the simulators; environments made of others override it."""
        self._set_seed(seed)

    @property
    def traits(self) -> EnvTraits:
        """What this environment does otherwise than others; subclasses that differ override it."""
        return EnvTraits(
            actions_vary=has_mask(self),
            own_actions=bool(overridden(self, "rand_action", of=EnvBase)),
            allow_done_after_reset=self.allow_done_after_reset,
            primed_keys=tuple(self.primed_keys),
        )

    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Return what steps this environment into the rows of a block (a hook for fast environments).

        Args:
            rules: what becomes of episodes.
        """
        return TensorDictStepper(self, rules)

    # ------------------------------------------------------------ properties
    @property
    def batch_size(self) -> torch.Size:
        """Batch dimensions, ``()`` for one environment."""
        return self._batch_size

    @property
    def shape(self) -> torch.Size:
        """The same as `batch_size`."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    def ndimension(self) -> int:
        """Return the number of batch dimensions."""
        return len(self.batch_size)

    def numel(self) -> int:
        """Return the number of environments, at least one."""
        return max(1, self.batch_size.numel())

    @property
    def device(self) -> torch.device | None:
        """Device of the environment's TensorDicts; None if they have none."""
        return self._device

    def to(self, *args: Any, **kwargs: Any) -> EnvBase:
        """Move specs and module state to a device, in place."""
        super().to(*args, **kwargs)
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self._device = device
            self._specs.move(device)
        return self

    def empty_cache(self) -> None:
        """Do nothing: specs aren't cached here; environments that derive theirs override this."""

    def fake_tensordict(self) -> TensorDict:
        """Return one step's TensorDict, zero everywhere, as `rollout` would return it (without time)."""
        root = [self._specs.full(role).zero() for role in ("state", "observation", "action", "done")]
        out = TensorDict({}, self.batch_size, device=self.device)
        for part in root:
            out.update(part)
        after = TensorDict({}, self.batch_size, device=self.device)
        for role in ("observation", "reward", "done"):
            after.update(self._specs.full(role).zero())
        return out.set("next", after)

    def append_transform(self, transform: Any) -> Any:
        """Return this environment behind `transform`, a transform or a callable: a `TransformedEnv`."""
        return BEHIND_TRANSFORM[0](self, transform)

    # ------------------------------------------------------------------ step
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take the actions in `tensordict` and write the outcome under its ``"next"``.

        Entries that ``"next"`` held before survive where the environment doesn't produce them.

        Args:
            tensordict: root of the step with its action, ``[*batch]``; changed in place.

        Returns:
            `tensordict`.

        Raises:
            SchemaError: if the batch size isn't the environment's.
            MissingKeyError: if an action is missing (also a KeyError).
            EnvironmentContractError: if the outcome breaks the environment's declaration.
            ClosedError: if the environment was closed.
        """
        self._check_open()
        self._check_batch(tensordict)
        self.usage.direct()
        try:
            outcome = self._step(tensordict)
        except (AttributeError, KeyError, TypeError) as cause:
            missing = [key for key in self.action_keys if tensordict.get(key, None) is None]
            if not missing:
                raise
            raise MissingKeyError(
                f"step: the action {missing} is missing; got {sorted(map(str, tensordict.keys(True)))}"
            ) from cause
        if outcome is tensordict:
            raise EnvironmentContractError("_step returned its input; return a new TensorDict")
        outcome = self._completed(outcome, with_reward=True)
        if self.run_type_checks:
            self._check_outcome(outcome)
        before = tensordict.get("next", None)
        if before is not None:
            outcome = before.copy().update(outcome)
        return tensordict.set("next", outcome)

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Return the first observations of new episodes.

        Args:
            tensordict: with a ``"_reset"`` mask (bool, shape of the group's done), only those environments
                are reset and the other rows keep the values of `tensordict`. The mask itself isn't changed
                or returned.
            **kwargs: passed to ``_reset``.

        Raises:
            EnvironmentContractError: if a reset row is done, unless `allow_done_after_reset`.
            ClosedError: if the environment was closed.
        """
        self._check_open()
        self.usage.direct()
        masks = reset_masks(tensordict, self._specs.groups())
        given = own_request(tensordict, masks)
        # The environment may overwrite the tensors that it returned before: the rows to keep are copied.
        before = tensordict.clone() if tensordict is not None and is_partial(masks) else None
        fresh = self._reset(given, **kwargs)
        if fresh is given and given is not None:
            raise EnvironmentContractError("_reset returned its input; return a new TensorDict")
        fresh = self._completed(fresh.exclude(*self.reset_keys) if masks else fresh, with_reward=False)
        if before is not None:
            fresh = merge_reset(fresh, before, masks)
        if not self.allow_done_after_reset:
            self._check_not_done(fresh, masks)
        return fresh

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset the environments that are done in the root `tensordict`; returns the root to go on from.

        An environment with flags of its own is reset when those say so, with all of its agents; agents that are
        done before wait. Groups of agents without flags above them are reset each by its own.
        """
        due = due_resets(tensordict, self._specs.groups())
        if not any(bool(mask.any()) for mask in due.values()):
            return tensordict
        request = tensordict.copy()
        for group, mask in due.items():
            request.set(as_key((*group, "_reset")), mask)
        return self.reset(request)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, then reset what is done.

        Returns:
            ``(stepped, root)``: `tensordict` with its ``"next"``, whose observation is the true last one of
            an episode that ended, and the root of the following step.
        """
        stepped = self.step(tensordict)
        return stepped, self.maybe_reset(advance(stepped, self))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions into `tensordict` (a new one if None) and return it."""
        if tensordict is None:
            tensordict = self._blank()
        return RandomPolicy(self.full_action_spec)(tensordict)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Take random actions: `rand_action`, then `step`."""
        return self.step(self.rand_action(tensordict))

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        callback: Any = None,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool = True,
        return_contiguous: bool = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Run `policy` for at most `max_steps` steps and return the trajectories, ``[*batch, T]``.

        Gradients flow where grad mode is on and the policy, or an environment written in torch, requires them. That
        costs more than a rollout under `torch.no_grad`, whose steps are written into memory allocated beforehand.

        Args:
            max_steps: the most steps.
            policy: as in the collectors; None draws random actions.
            callback: called as ``callback(env, step)`` after every step with that step's TensorDict.
            auto_reset: whether to reset first; if not, the rollout starts from `tensordict`, after a reset of the
                environments that are done there.
            auto_cast_to_device: whether to move what the policy reads to the policy's device.
            break_when_any_done: whether to stop at the first end of any episode; if not, ended ones are
                reset.
            return_contiguous: whether the result is one TensorDict; if not, a lazy stack of steps.
            tensordict: where to start from; with `auto_reset`, passed to `reset`.
            set_truncated: whether the last step is marked as truncated.
            out: a TensorDict to write the result into.

        Returns:
            The steps; the last dimension is called ``"time"``.

        Raises:
            EnvironmentFailure: if the environment raised; it carries the cause, and can be caught as its
                type too.
        """
        self._check_open()
        options = RolloutOptions(
            auto_reset, auto_cast_to_device, break_when_any_done, return_contiguous, set_truncated, callback
        )
        return run_rollout(self, max_steps, policy, tensordict, options, out)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment and return the last seed that was used.

        Args:
            seed: the seed of the first environment; number i of a batch gets ``seed + i``.
            static_seed: whether all get `seed` itself.
        """
        self._check_open()
        seed = integer("seed", seed)
        self._seed_all(seed, static_seed)
        return seed if static_seed else seed + self.numel() - 1

    def close(self, **kwargs: Any) -> None:
        """Release the simulator; calling it again does nothing."""
        self.is_closed = True

    # ----------------------------------------------------------------- state
    def parse_state(self, state: Any, strict: bool = True) -> Any:
        """Return the value of a saved state for `adopt_state`; nothing changes.

        Raises:
            SchemaError: if it doesn't fit, naming the entry.
        """
        return parse_entries(self, state, strict)

    def adopt_state(self, value: Any) -> None:
        """Go on from a value that `parse_state` returned; can't fail."""
        adopt_entries(self, value)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Go on from a saved state, which is copied; what a simulator holds isn't part of it.

        Args:
            state_dict: what `state_dict` returned.
            strict: whether entries that are missing or unexpected are errors.
            assign: no effect.

        Raises:
            SchemaError: a state that doesn't fit; nothing changed.
        """
        load_state(self, state_dict, strict)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Step: an environment is a module that maps a root to its outcome."""
        return self.step(tensordict)

    def __repr__(self) -> str:
        """Show the class, batch size and device."""
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"

    # ---------------------------------------------------------------- checks
    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError(f"{type(self).__name__} was closed; make a new one")

    def _check_batch(self, tensordict: TensorDictBase) -> None:
        if self.batch_locked and tensordict.batch_size != self.batch_size:
            raise SchemaError(
                f"step: expected batch size {tuple(self.batch_size)}, got {tuple(tensordict.batch_size)}"
            )

    def _completed(self, batch: TensorDictBase, with_reward: bool) -> TensorDictBase:
        """Add missing flags, and the trailing dimension that rewards and flags may come without."""
        for group in self._specs.groups():
            zeros = {
                as_path(key)[-1]: self._specs.full("done")[key].zero()
                for key in self.done_keys
                if as_path(key)[:-1] == group
            }
            keys = {name: as_key((*group, name)) for name in zeros}
            came = {name: batch.get(key, None) for name, key in keys.items()}
            given = {n: _with_last_dim(v, zeros[n].shape) for n, v in came.items() if v is not None}
            for name, value in complete_flags(given, zeros).items():
                batch.set(keys[name], value)
        if with_reward:
            for key in self.reward_keys:
                value = batch.get(key, None)
                if value is None:
                    raise EnvironmentContractError(
                        f"_step returned no {key!r}; got {sorted(map(str, batch.keys(True)))}"
                    )
                spec = self._specs.full("reward")[key]
                batch.set(key, _with_last_dim(value, spec.shape).to(spec.dtype))
        return batch

    def _check_outcome(self, outcome: TensorDictBase) -> None:
        for role in ("observation", "reward", "done"):
            spec = self._specs.full(role)
            for key in spec.keys(True, True):
                spec[key].assert_is_in(outcome.get(key))

    def _check_not_done(self, fresh: TensorDictBase, masks: dict[Path, torch.Tensor]) -> None:
        for group in self._specs.groups():
            done = fresh.get(as_key((*group, "done")))
            if masks:
                mask = masks[group] if group in masks else reset_rows(masks, self.batch_size)
                done = done & mask.reshape((*mask.shape, *[1] * (done.ndim - mask.ndim)))
            if bool(done.any()):
                raise EnvironmentContractError(
                    f"reset of {type(self).__name__} returned done; "
                    "pass allow_done_after_reset=True if that is meant"
                )


def _with_last_dim(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Add the last dimension of size 1 that `value` may have come without."""
    if value.shape != shape and len(shape) and shape[-1] == 1 and value.shape == shape[:-1]:
        return value.unsqueeze(-1)
    return value
