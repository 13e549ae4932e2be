"""`EnvBase`: what every environment offers, and what a subclass writes.

What every environment offers on top of its `step` and `reset`: random actions, rollouts, questions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.devices import as_device
from gleanrl._arrays.tensordicts import NestedKey, leaf_at
from gleanrl._rollout.env_traits import EnvTraits, has_mask
from gleanrl._rollout.policies import RandomPolicy
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Stepper, Usage
from gleanrl._rollout.step_mdp import advance, step_mdp
from gleanrl._rollout.tensordict_stepper import DirectStep, TensorDictStepper
from gleanrl._util import integer, is_native, overridden
from gleanrl.compat.unserved import TellingModule
from gleanrl.data.specs import Composite
from gleanrl.envs.check import check_env_specs
from gleanrl.envs.env_specs import EnvSpecs, EnvType, learn_specs
from gleanrl.envs.env_state import load_state
from gleanrl.envs.gym_registration import GymRegistration
from gleanrl.envs.module_state import adopt_entries, parse_entries
from gleanrl.envs.outcomes import (
    check_not_done,
    check_outcome,
    complete_outcome,
    complete_root,
    due_resets,
    is_partial,
    merge_reset,
    own_request,
    put_root,
    request_of,
    reset_masks,
    terminated_or_truncated,
    with_rows_held,
    without_masks,
)
from gleanrl.envs.rollout import RolloutOptions, run_rollout
from gleanrl.envs.spec_properties import SpecProperties, as_size
from gleanrl.errors import (
    ClosedError,
    EnvironmentContractError,
    InvalidArgumentError,
    MissingKeyError,
    SchemaError,
    UnsupportedError,
)


class Running(SpecProperties):
    """The methods of `EnvBase` that need nothing but its `step`, its `reset` and its specs."""

    batch_locked: Any
    is_closed: bool
    step: Any
    reset: Any
    _reset: Any

    @property
    def was_closed(self) -> bool:
        """Whether the environment was closed; `is_closed` of a batch is also True before its members are made."""
        return self.is_closed

    def _check_open(self) -> None:
        if self.was_closed:
            raise ClosedError(f"{type(self).__name__} was closed; make a new one")

    def _reopen(self) -> None:
        """Begin anew if the environment was closed, where that is possible; for resets."""

    def _blank(self) -> TensorDictBase:
        """Return a TensorDict without entries; environments whose data are stacked lazily override it."""
        return TensorDict({}, self.batch_size, device=self.device)

    def state_request(self, set_state: bool) -> dict[str, bool]:
        """Return what ``_reset`` is told where a reset is asked to begin in the state that it is given, or not to.

        An environment can if its ``_reset`` has a parameter `set_state`.

        Raises:
            UnsupportedError: if it is asked to and can't.
        """
        if "set_state" in inspect.signature(self._reset).parameters:
            return {"set_state": bool(set_state)}
        if set_state:
            raise UnsupportedError(
                f"set_state: a {type(self).__name__} can't begin in a given state: its _reset chooses one"
            )
        return {}

    def set_state(self) -> None:
        """Raise `UnsupportedError`, as in other releases: a state to begin in is given to `reset`."""
        raise UnsupportedError("set_state: give the state to reset(tensordict, set_state=True)")

    # ------------------------------------------------------------------- run
    def live_action_spec(self) -> Any:
        """Return the full action spec with the masks that hold at present.

        Random actions are drawn from it. It is `full_action_spec`, except where masks are set elsewhere: in the members
        of a batch of environments, or in the base environment of a transformed one.
        """
        return self.full_action_spec

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions into `tensordict` (a new one if None) and return it."""
        if tensordict is None:
            tensordict = self._blank()
        return RandomPolicy(self._action_spec_for(tensordict))(tensordict)

    def _action_spec_for(self, tensordict: TensorDictBase) -> Any:
        """Return the spec of the actions that belong to the rows of `tensordict`."""
        spec = self.live_action_spec()
        if self.batch_locked:
            return spec
        return spec.expand(*tensordict.batch_size, *spec.shape[len(self.batch_size) :])

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Take random actions: `rand_action`, then `step`."""
        out: TensorDictBase = self.step(self.rand_action(tensordict))
        return out

    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        callback: Any = None,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool | None = None,
        return_contiguous: bool = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        *,
        break_when_all_done: bool | None = None,
        trust_policy: bool = False,
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
            break_when_any_done: whether to stop at the first end of any episode, done, terminated or truncated; if
                not, ended ones are reset where done says so. None for yes, unless `break_when_all_done`.
            return_contiguous: whether the result is one TensorDict; if not, a lazy stack of steps.
            tensordict: where to start from; with `auto_reset`, passed to `reset`. Of an environment that isn't
                batch-locked its batch size says how many are stepped at once.
            set_truncated: whether the last step is marked as truncated.
            out: a TensorDict to write the result into.
            break_when_all_done: whether to stop once every environment's episode has ended. Those that ended before
                repeat their last step in the result, while they are reset and stepped on.
            trust_policy: whether the policy is called on TensorDicts, whatever its signature says.

        Returns:
            The steps; the last dimension is called ``"time"``.

        Raises:
            EnvironmentFailure: if the environment raised; it carries the cause, and can be caught as its
                type too.
            InvalidArgumentError: if both ends are to stop it.
        """
        if auto_reset:
            self._reopen()
        self._check_open()
        if break_when_any_done and break_when_all_done:
            raise InvalidArgumentError("rollout: break_when_any_done and break_when_all_done: choose one")
        any_done = not break_when_all_done if break_when_any_done is None else break_when_any_done
        options = RolloutOptions(
            auto_reset,
            auto_cast_to_device,
            any_done,
            bool(break_when_all_done),
            return_contiguous,
            set_truncated,
            callback,
            trust_policy,
        )
        env: Any = self
        return run_rollout(env, max_steps, policy, tensordict, options, out)

    def step_mdp(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Return the root of the step that follows `next_tensordict`, the result of `step`; see `step_mdp`.

        Actions stay, as everything does that the next step doesn't replace; rewards don't.
        """
        return step_mdp(
            next_tensordict,
            exclude_action=False,
            reward_keys=self.reward_keys,
            done_keys=self.done_keys,
            action_keys=self.action_keys,
        )

    # ------------------------------------------------------------------- ask
    def fake_tensordict(self) -> TensorDict:
        """Return one step's TensorDict, zero everywhere, as `rollout` would return it (without time)."""
        out = TensorDict({}, self.batch_size, device=self.device)
        for role in ("state", "observation", "action", "done"):
            out.update(getattr(self, f"full_{role}_spec").zero())
        after = TensorDict({}, self.batch_size, device=self.device)
        for role in ("observation", "reward", "done"):
            after.update(getattr(self, f"full_{role}_spec").zero())
        return out.set("next", after)

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Return whether any episode ended in a root; where, is written as ``"_reset"``, as `maybe_reset` reads it."""
        return terminated_or_truncated(tensordict, self.full_done_spec)

    def all_actions(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Return every action that there is, stacked along a new first dimension; with a mask, those it allows.

        Args:
            tensordict: passed to `reset` first, where the actions follow from the state; None for no reset.

        Raises:
            UnsupportedError: if there are infinitely many.
        """
        if tensordict is not None:
            self.reset(tensordict)
        actions: TensorDictBase = self.live_action_spec().enumerate(use_mask=True)
        return actions

    def cardinality(self, tensordict: TensorDictBase | None = None) -> int | float:
        """Return how many actions there are, infinity for real ones.

        Args:
            tensordict: for environments that override this, whose actions follow from the state.
        """
        number: int | float = self.full_action_spec.cardinality()
        return number

    def check_env_specs(
        self,
        return_contiguous: bool = True,
        check_dtype: bool = True,
        seed: int | None = None,
        tensordict: TensorDictBase | None = None,
        break_when_any_done: bool = True,
    ) -> None:
        """Check the environment; see the function `check_env_specs`."""
        check_env_specs(self, return_contiguous, check_dtype, seed, tensordict, break_when_any_done)

    def auto_specs_(
        self,
        policy: Any,
        *,
        tensordict: TensorDictBase | None = None,
        action_key: NestedKey | list[NestedKey] = "action",
        done_key: NestedKey | list[NestedKey] | None = None,
        observation_key: NestedKey | list[NestedKey] = "observation",
        reward_key: NestedKey | list[NestedKey] = "reward",
    ) -> Any:
        """Declare what a step of `policy` shows: shapes and dtypes, without bounds.

        Args:
            policy: maps a root to one with an action.
            tensordict: where to start from; None for a reset.
            action_key: the actions.
            done_key: the flags; None for those that there are.
            observation_key: the observations. Entries of the root that aren't observations or flags are states.
            reward_key: the rewards.

        Returns:
            The environment.

        Raises:
            MissingKeyError: if a step returns what none of the keys names, or lacks one of them.
        """
        keys = {"action": action_key, "done": done_key, "observation": observation_key, "reward": reward_key}
        start = self.reset() if tensordict is None else tensordict
        for role, spec in learn_specs(self, policy, start, keys).items():
            setattr(self, f"full_{role}_spec", spec)
        return self


# How an environment is put behind a transform; `envs.transforms` fills this in, as the base class can't import those
# who derive from it.
BEHIND_TRANSFORM: list[Callable[[Any, Any], Any]] = []


_ACTION_SPECS = ("live_action_spec", "full_action_spec", "action_spec")
REPLACED = ("step", "reset", "maybe_reset", "step_and_maybe_reset", "_step", "_reset")
"""The methods that a stepper with means of its own replaces: it is chosen only where they are a class's own."""


class EnvBase(Running, GymRegistration, TellingModule, metaclass=EnvType):
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
        spec_locked: whether composite specs can't be written into once the environment stands. Every subclass takes
            this and the next, whether its own constructor does or not.
        auto_reset: whether the environment resets itself in the step that ends an episode; an `AutoResetEnv` around it
            is made then.
    """

    any_size = False
    """Whether TensorDicts of any batch size are taken, unless the class says by `batch_locked`."""
    _input_spec: Composite | None = None
    _output_spec: Composite | None = None
    primed_keys: Sequence[NestedKey] = ()
    """What a policy may write below ``"next"``: its state, which it finds in the root of the following step."""

    def __new__(cls, *args: Any, _batch_locked: bool = True, **kwargs: Any) -> Any:
        """Make an environment that can declare specs before its constructor runs, or in its class."""
        self = super().__new__(cls)
        self._specs = EnvSpecs()
        if not _batch_locked:
            self.any_size = True
        for groups in (cls._input_spec, cls._output_spec):
            if groups is not None:
                self._specs.set_groups(groups)
        return self

    def __init__(
        self,
        *,
        device: torch.device | str | int | None = None,
        batch_size: Any = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        spec_locked: bool = True,
        auto_reset: bool = False,
    ) -> None:
        super().__init__()
        if batch_size is not None or device is not None:
            # The subclass may have assigned one of them before.
            size = self._specs.batch_size if batch_size is None else as_size(batch_size)
            self._specs.settle(size, self._specs.device if device is None else as_device(device))
        self.run_type_checks = run_type_checks
        self.allow_done_after_reset = allow_done_after_reset
        self.wants_lock, self.resets_itself = spec_locked, auto_reset
        self.is_closed = False
        self.usage = Usage()

    @property
    def batch_locked(self) -> bool:
        """Whether TensorDicts must have the environment's batch size; if not, theirs says how many it steps at once.

        Read-only: a class says so for its environments by ``batch_locked = False`` in its body.
        """
        return not self.any_size

    @batch_locked.setter
    def batch_locked(self, locked: bool) -> None:
        raise UnsupportedError(
            f"batch_locked is a read-only property, {self.batch_locked} for this {type(self).__name__}; a class whose "
            "environments take any batch size declares batch_locked = False in its body"
        )

    # -------------------------------------------------------- for subclasses
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _reset")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _step")

    def _set_seed(self, seed: int | None) -> Any:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _set_seed")

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
            notes_masks=not overridden(self, *_ACTION_SPECS, of=EnvBase),
            primed_keys=tuple(self.primed_keys),
        )

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Return a stepper with rows on the CPU, wherever the environment says that its data are; None: it has none.

        A hook for environments that step on the CPU in any case, as simulators do: where a whole batch is moved
        to the device at once, a step needs no copies but those for the policy.

        Args:
            rules: what becomes of episodes.
        """
        return None

    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Return what steps this environment into the rows of a block (a hook for fast environments).

        Args:
            rules: what becomes of episodes.
        """
        plain = is_native(self, "step", "maybe_reset", of=EnvBase)
        return TensorDictStepper(
            self, rules, DirectStep(self._raw_outcome, self._completed_outcome) if plain else None
        )

    def to(self, *args: Any, **kwargs: Any) -> EnvBase:
        """Move specs and module state to a device, in place."""
        super().to(*args, **kwargs)
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self._specs.settle(self._specs.batch_size, as_device(device))
        return self

    def empty_cache(self) -> None:
        """Do nothing: specs aren't cached here; environments that derive theirs override this."""

    def append_transform(self, transform: Any) -> Any:
        """Return this environment behind `transform`, a transform or a callable: a `TransformedEnv`."""
        return BEHIND_TRANSFORM[0](self, transform)

    # ------------------------------------------------------------------ step
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take the actions in `tensordict` and write the outcome under its ``"next"``.

        Entries that ``"next"`` held before survive where the environment doesn't produce them.

        Args:
            tensordict: root of the step with its action, ``[*batch]``; changed in place. With a ``"_step"`` mask
                (bool, ``[*batch]``) the outcome of the other rows is their root, without a reward. `SerialEnv` and
                `ParallelEnv` leave their environments alone there; an environment that steps its rows together gets
                the mask, too, and may do the same.

        Returns:
            `tensordict`.

        Raises:
            SchemaError: if the batch size isn't the environment's.
            MissingKeyError: if an action is missing (also a KeyError).
            EnvironmentContractError: if the outcome breaks the environment's declaration.
            ClosedError: if the environment was closed.
        """
        self._check_batch("step", tensordict)
        outcome = self._completed_outcome(self._raw_outcome(tensordict), tensordict)
        before = tensordict.get("next", None)
        if before is not None:
            outcome = before.copy().update(outcome)
        return tensordict.set("next", outcome)

    def _raw_outcome(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what ``_step`` makes of the actions in `tensordict`."""
        self._check_open()
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
        return outcome

    def _completed_outcome(self, outcome: TensorDictBase, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the outcome of a step from the root `tensordict`, complete and checked.

        Rollouts pass by this where an outcome is in order: whatever else is done here, `TensorDictStepper` has to know.
        """
        outcome = complete_outcome(outcome, self._specs)
        mask = leaf_at(tensordict, ("_step",))
        if mask is not None:
            outcome = with_rows_held(outcome, tensordict, mask, self._specs)
        if self.run_type_checks:
            check_outcome(outcome, self._specs)
        return outcome

    def reset(
        self, tensordict: TensorDictBase | None = None, *, set_state: bool | None = None, **kwargs: Any
    ) -> TensorDictBase:
        """Return the first observations of new episodes.

        Args:
            tensordict: what is returned, with the first observations and flags among its entries, each a new tensor.
                With a ``"_reset"`` mask (bool, shape of the group's done), which is taken out, only those environments
                are reset and the other rows keep their values. None for a new one.
            set_state: whether an episode begins in the state that `tensordict` holds, for environments that can; None
                for what the environment does by itself.
            **kwargs: passed to ``_reset``.

        Raises:
            UnsupportedError: `set_state` of an environment that can't.
            EnvironmentContractError: if a reset row is done, unless `allow_done_after_reset`.
            ClosedError: if the environment was closed.
        """
        self._reopen()
        self._check_open()
        if tensordict is not None:
            self._check_batch("reset", tensordict)
        self.usage.direct()
        masks = reset_masks(tensordict, self._specs.groups())
        given = own_request(tensordict, masks)
        # The environment may overwrite the tensors that it returned before: the rows to keep are copied.
        before = tensordict.clone() if tensordict is not None and is_partial(masks) else None
        if set_state is not None:
            kwargs.update(self.state_request(set_state))
        fresh = self._reset(given, **kwargs)
        if fresh is given and given is not None:
            raise EnvironmentContractError("_reset returned its input; return a new TensorDict")
        reset_keys = self.reset_keys
        fresh = self.completed_root(without_masks(fresh, reset_keys) if masks else fresh)
        if before is not None:
            fresh = merge_reset(fresh, before, masks)
        if not self.allow_done_after_reset:
            # Masks that name every row are as none.
            check_not_done(fresh, masks if before is not None else {}, self._specs, type(self).__name__)
        if tensordict is None:
            return fresh
        return put_root(tensordict, fresh, reset_keys)

    def completed_root(self, fresh: TensorDictBase) -> TensorDictBase:
        """Return `fresh` with the flags that a reset left out, on the environment's device.

        For wrappers that call ``_reset`` themselves.
        """
        if fresh.device is None and self.device is not None:
            fresh = fresh.to(self.device)
        return complete_root(fresh, self._specs)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset the environments that are done in the root `tensordict`; returns the root to go on from.

        An environment with flags of its own is reset when those say so, with all of its agents; agents that are
        done before wait. Groups of agents without flags above them are reset each by its own.
        """
        due = due_resets(tensordict, self._specs.groups())
        if not any(bool(mask.any()) for mask in due.values()):
            return tensordict
        return self.reset(request_of(tensordict, due))

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, then reset what is done.

        Returns:
            ``(stepped, root)``: `tensordict` with its ``"next"``, whose observation is the true last one of
            an episode that ended, and the root of the following step.
        """
        stepped = self.step(tensordict)
        return stepped, self.maybe_reset(advance(stepped, self))

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
    def _check_batch(self, call: str, tensordict: TensorDictBase) -> None:
        if self.batch_locked and tensordict.batch_size != self.batch_size:
            raise SchemaError(
                f"{call}: expected batch size {tuple(self.batch_size)}, got {tuple(tensordict.batch_size)}"
            )
