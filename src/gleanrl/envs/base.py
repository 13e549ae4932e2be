"""`EnvBase`, the abstract environment: specs, `step`, `reset`, rollouts, random actions, saved state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.devices import as_device
from gleanrl._arrays.tensordicts import NestedKey, leaf_at
from gleanrl._rollout.env_traits import EnvTraits, has_mask
from gleanrl._rollout.native_policies import Backend
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
from gleanrl.envs.gym_registration import register
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
    with_unstepped_rows,
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

# Builds a `TransformedEnv`. `envs.transforms` registers the builder here: importing it would be a cycle, since it
# derives from `EnvBase`.
BEHIND_TRANSFORM: list[Callable[[Any, Any], Any]] = []


_ACTION_SPECS = ("live_action_spec", "full_action_spec", "action_spec")
REPLACED = ("step", "reset", "maybe_reset", "step_and_maybe_reset", "_step", "_reset")
"""Methods that specialised steppers bypass. They may do so only if no subclass overrides one of these methods."""


class EnvBase(SpecProperties, TellingModule, metaclass=EnvType):
    """Abstract environment: TensorDict in, TensorDict out. Not thread-safe.

    A subclass sets `observation_spec` and `action_spec` in its constructor. It also sets `reward_spec`, `done_spec` and
    `state_spec` if the defaults don't fit. It writes three methods:

    - ``_reset(tensordict=None, **kwargs)`` returns a new TensorDict with the first observations. A ``"_reset"`` mask in
      `tensordict` limits the reset to the environments where it is True. The other environments continue, and their
      rows of the result are ignored.
    - ``_step(tensordict)`` returns a new TensorDict with the next observations, the reward and the flags, without a
      ``"next"`` level.
    - ``_set_seed(seed)`` seeds the simulator.

    The library completes missing flags. If only done is returned, ``terminated := done``. If only terminated (and
    truncated) is returned, ``done := terminated | truncated``. If no flag is returned, all are False.

    Args:
        device: device of the environment's TensorDicts; None for TensorDicts without a device.
        batch_size: batch dimensions of an environment that steps several together; ``()`` for one.
        run_type_checks: whether to check that each step's outcome is in the domains of its specs; if not, a `SpecError`
            is raised.
        allow_done_after_reset: whether a reset may return done.
        spec_locked: whether to lock the composite specs after construction. Every subclass accepts `spec_locked` and
            `auto_reset`, even if its own constructor doesn't name them.
        auto_reset: whether the environment resets itself in the step that ends a trajectory. If so, the constructor
            returns an `AutoResetEnv` around it.
    """

    any_size = False
    """Whether the environment accepts TensorDicts of any batch size; a class sets it by `batch_locked`."""
    _input_spec: Composite | None = None
    _output_spec: Composite | None = None
    primed_keys: Sequence[NestedKey] = ()
    """Keys of the policy's state: a policy may write them below ``"next"`` and reads them in the next root."""

    def __new__(cls, *args: Any, _batch_locked: bool = True, **kwargs: Any) -> Any:
        """Create the instance with default specs, so that specs can be set before `__init__` runs.

        Specs that the class declares in its body (`_input_spec`, `_output_spec`) are set here. With `_batch_locked`
        False, the instance accepts TensorDicts of any batch size.
        """
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
            # The subclass may have set the batch size or the device before it called this constructor.
            size = self._specs.batch_size if batch_size is None else as_size(batch_size)
            self._specs.settle(size, self._specs.device if device is None else as_device(device))
        self.run_type_checks = run_type_checks
        self.allow_done_after_reset = allow_done_after_reset
        self.wants_lock, self.resets_itself = spec_locked, auto_reset
        self.is_closed = False
        self.usage = Usage()

    @property
    def batch_locked(self) -> bool:
        """Whether TensorDicts must have the environment's batch size.

        If False, the batch size of the TensorDict is the number of environments to step. Assigning to it raises
        `UnsupportedError`: a class whose environments accept any batch size declares ``batch_locked = False`` in its
        body.
        """
        return not self.any_size

    @batch_locked.setter
    def batch_locked(self, locked: bool) -> None:
        raise UnsupportedError(
            f"batch_locked is a read-only property, {self.batch_locked} for this {type(self).__name__}; a class whose "
            "environments take any batch size declares batch_locked = False in its body"
        )

    @property
    def was_closed(self) -> bool:
        """Whether the environment was closed.

        `is_closed` isn't enough: for a batch of environments it is also True before the members are made.
        """
        return self.is_closed

    def _check_open(self) -> None:
        if self.was_closed:
            raise ClosedError(f"{type(self).__name__} was closed; make a new one")

    def _reopen(self) -> None:
        """Reopen a closed environment if its class can. `reset` and `rollout` call this; the default does nothing."""

    def _blank(self) -> TensorDictBase:
        """Return an empty TensorDict for this environment; overridden where data can only be stacked lazily."""
        return TensorDict({}, self.batch_size, device=self.device)

    def state_request(self, set_state: bool) -> dict[str, bool]:
        """Return the keyword arguments that pass a caller's `set_state` on to ``_reset``.

        An environment supports `set_state` if its ``_reset`` has a parameter of that name. If not, the result is empty.

        Raises:
            UnsupportedError: if `set_state` is True and the environment doesn't support it.
        """
        if "set_state" in inspect.signature(self._reset).parameters:
            return {"set_state": bool(set_state)}
        if set_state:
            raise UnsupportedError(
                f"set_state: a {type(self).__name__} can't begin in a given state; give its _reset a parameter "
                "set_state"
            )
        return {}

    def set_state(self) -> None:
        """Raise `UnsupportedError`: pass the state to `reset` with ``set_state=True`` instead."""
        raise UnsupportedError("set_state: pass the state to reset(tensordict, set_state=True)")

    # ------------------------------------------------------------------- run
    def live_action_spec(self) -> Any:
        """Return the full action spec with the current action masks.

        Random actions are drawn from it. It equals `full_action_spec` unless the masks are set in another environment:
        in the members of a batch, or in the base environment of a transformed one.
        """
        return self.full_action_spec

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions into `tensordict` (a new one if None) and return it.

        They are drawn from `live_action_spec` by torch's global generator. Masks in `tensordict` have no effect.
        """
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
        """Take random actions: `rand_action`, then `step`. Return the result of `step`."""
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
        policy_backend: Backend = "auto",
    ) -> TensorDictBase:
        """Run `policy` for at most `max_steps` steps and return the trajectories, ``[*batch, T]``.

        Gradients flow if grad mode is on and either the policy or an environment written in torch requires them. Such a
        rollout is slower than one under `torch.no_grad`, which writes its steps into memory allocated in advance.

        With `auto_reset`, a closed environment that can make itself anew is reopened first, as by `reset`.

        Args:
            max_steps: maximum number of steps, at least 1.
            policy: any policy that the collectors accept; None draws random actions.
            callback: called as ``callback(env, step)`` after every step with that step's TensorDict; its result is
                ignored.
            auto_reset: whether to reset first. If False, the rollout starts from `tensordict`, after a reset of the
                environments that are done there.
            auto_cast_to_device: whether to move the policy's input to the policy's device.
            break_when_any_done: whether to stop as soon as one trajectory ends (done, terminated or truncated). If
                False, an environment is reset when it is done. None means True unless `break_when_all_done` is set.
            return_contiguous: whether to return one TensorDict; if False, a lazy stack of steps.
            tensordict: the root to start from; with `auto_reset`, the argument of `reset`. If the environment isn't
                batch-locked, its batch size is the number of environments to step together.
            set_truncated: whether to mark the last step as truncated and done.
            out: a TensorDict of the result's batch size, into which the result is copied; it is returned then.
            break_when_all_done: whether to stop once every environment has ended a trajectory. An environment that ends
                earlier is reset and stepped further, but the result repeats its last step instead.
            trust_policy: whether to call the policy on TensorDicts, regardless of its signature.
            policy_backend: see `SyncDataCollector`. Rollouts with gradients are computed by torch.

        Returns:
            The steps; the last dimension is called ``"time"``.

        Raises:
            EnvironmentFailure: if a step or a reset raised. The error holds the cause and can also be caught as the
                cause's type. A reset from `tensordict` raises the cause itself.
            EnvironmentContractError, PolicyError: if the environment or the policy breaks its specs.
            InvalidArgumentError: if both `break_when_any_done` and `break_when_all_done` are True, or `max_steps` isn't
                a positive integer, or `policy_backend` isn't one of the names.
            MissingArgumentError: if `auto_reset` is False and `tensordict` is None.
            UnsupportedError: for `set_truncated` without a truncated flag. Also for `out`, `set_truncated` or
                `break_when_all_done`, if data can only be stacked lazily. Also for ``policy_backend="native"``, if
                torch has to compute the policy, or it draws random actions.
            ClosedError: if the environment was closed and isn't reopened.
        """
        if auto_reset:
            self._reopen()
        self._check_open()
        if break_when_any_done and break_when_all_done:
            raise InvalidArgumentError(
                "rollout: expected break_when_any_done or break_when_all_done, got both; pass one of them"
            )
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
            policy_backend,
        )
        env: Any = self
        return run_rollout(env, max_steps, policy, tensordict, options, out)

    def step_mdp(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Return the root of the next step from `next_tensordict`, the result of `step`; see the function `step_mdp`.

        The root keeps the action and every entry that the next step doesn't replace, but no rewards. Its entries aren't
        copied.

        Raises:
            MissingKeyError: if there is no ``"next"`` entry (also a KeyError).
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
        """Return the TensorDict of one step, as in a rollout but without the time dimension, filled with zeros."""
        out = TensorDict({}, self.batch_size, device=self.device)
        for role in ("state", "observation", "action", "done"):
            out.update(getattr(self, f"full_{role}_spec").zero())
        after = TensorDict({}, self.batch_size, device=self.device)
        for role in ("observation", "reward", "done"):
            after.update(getattr(self, f"full_{role}_spec").zero())
        return out.set("next", after)

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Return whether any trajectory ended in the root `tensordict`.

        If one did, this also writes ``"_reset"`` masks into `tensordict`: True where a trajectory ended, that is, where
        it is done, terminated or truncated.

        Raises:
            MissingKeyError: if `tensordict` has none of these flags.
        """
        return terminated_or_truncated(tensordict, self.full_done_spec)

    def all_actions(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Return the possible actions, stacked along a new first dimension, except actions that a mask forbids.

        All environments of a batch take the same choice.

        Args:
            tensordict: passed to `reset` first, for environments whose actions depend on the state. None for no reset.

        Raises:
            UnsupportedError: if there are infinitely many or more than `MOST_ROWS` actions, or masks differ within the
                batch.
        """
        if tensordict is not None:
            self.reset(tensordict)
        actions: TensorDictBase = self.live_action_spec().enumerate(use_mask=True)
        return actions

    def cardinality(self, tensordict: TensorDictBase | None = None) -> int | float:
        """Return the number of actions, infinity for real-valued ones. Masks don't reduce it.

        Args:
            tensordict: unused here; for subclasses whose actions depend on the state.
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
        """Check the outputs of a reset and some random steps against the specs; see the function `check_env_specs`."""
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
        """Step once with `policy`, and declare the specs from that step: shapes and dtypes, without bounds.

        Args:
            policy: maps a root to the same root with an action.
            tensordict: the root to start from; the step is written into it. None for a reset.
            action_key: keys of the actions.
            done_key: keys of the flags; None for all flags in the outcome.
            observation_key: keys of the observations. Other entries of the root, except flags, are declared as states.
            reward_key: keys of the rewards.

        Returns:
            The environment.

        Raises:
            MissingKeyError: if the step's outcome has an entry that no argument names, or lacks one that an argument
                names.
        """
        keys = {"action": action_key, "done": done_key, "observation": observation_key, "reward": reward_key}
        start = self.reset() if tensordict is None else tensordict
        for role, spec in learn_specs(self, policy, start, keys).items():
            setattr(self, f"full_{role}_spec", spec)
        return self

    # -------------------------------------------------------- for subclasses
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _reset")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _step")

    def _set_seed(self, seed: int | None) -> Any:
        raise UnsupportedError(f"{type(self).__name__} doesn't define _set_seed")

    def _seed_all(self, seed: int, static_seed: bool) -> None:
        """Pass `seed` to ``_set_seed``, regardless of `static_seed`. Environments with members override this."""
        self._set_seed(seed)

    @property
    def traits(self) -> EnvTraits:
        """The environment's optional abilities, as rollouts use them; subclasses with other abilities override it."""
        return EnvTraits(
            actions_vary=has_mask(self),
            own_actions=bool(overridden(self, "rand_action", of=EnvBase)),
            allow_done_after_reset=self.allow_done_after_reset,
            notes_masks=not overridden(self, *_ACTION_SPECS, of=EnvBase),
            primed_keys=tuple(self.primed_keys),
        )

    def host_stepper(self, rules: EpisodeRules = FREELY) -> Stepper | None:
        """Return a stepper that writes its rows on the CPU; None if this environment has none.

        A hook for environments that compute on the CPU, regardless of `device`. Collectors then move a whole batch to
        the device at once. Without it, each step would copy its rows.

        Args:
            rules: when trajectories end and whether they are reset.
        """
        return None

    def make_stepper(self, rules: EpisodeRules = FREELY) -> Stepper:
        """Return a stepper that steps this environment into the rows of a block (a hook for fast environments).

        Args:
            rules: when trajectories end and whether they are reset.
        """
        # `DirectStep` bypasses `step` and `maybe_reset`, so it is used only if no subclass overrides them.
        plain = is_native(self, "step", "maybe_reset", of=EnvBase)
        return TensorDictStepper(
            self, rules, DirectStep(self._raw_outcome, self._completed_outcome) if plain else None
        )

    def to(self, *args: Any, **kwargs: Any) -> EnvBase:
        """Move specs and module state to a device, in place; return the environment. A dtype converts no specs."""
        super().to(*args, **kwargs)
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            self._specs.settle(self._specs.batch_size, as_device(device))
        return self

    def empty_cache(self) -> None:
        """Do nothing, since this class caches no specs. Environments with derived specs override it."""

    def append_transform(self, transform: Any) -> Any:
        """Return a `TransformedEnv`: this environment with `transform` (a transform or a callable) applied to it."""
        return BEHIND_TRANSFORM[0](self, transform)

    # ------------------------------------------------------------------ step
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take the actions in `tensordict` and write the outcome under its ``"next"``.

        Earlier entries of ``"next"`` are kept if the environment doesn't return them. A rollout in progress loses its
        lease. Errors of ``_step`` itself are raised unchanged. `tensordict` is written only after all checks.

        Args:
            tensordict: root of the step with its action, ``[*batch]``; changed in place. A ``"_step"`` mask (bool,
                ``[*batch]``) selects the rows to step: the outcome of each other row is its root, with zero rewards.
                `SerialEnv` and `ParallelEnv` don't step the other members. An environment that steps its rows together
                receives the mask and may skip the other rows, too.

        Returns:
            `tensordict`.

        Raises:
            SchemaError: if the batch size isn't the environment's.
            MissingKeyError: if ``_step`` failed and an action is missing (also a KeyError).
            EnvironmentContractError: if ``_step`` returns its input, or the outcome lacks a reward. Also if it has done
                and truncated without terminated.
            SpecError: with `run_type_checks`, if a value is outside its spec's domain.
            ClosedError: if the environment was closed.
        """
        self._check_batch("step", tensordict)
        outcome = self._completed_outcome(self._raw_outcome(tensordict), tensordict)
        before = tensordict.get("next", None)
        if before is not None:
            outcome = before.copy().update(outcome)
        return tensordict.set("next", outcome)

    def _raw_outcome(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call ``_step`` on `tensordict` and return its outcome; end the lease of a rollout. See `step` for errors."""
        self._check_open()
        self.usage.direct()
        try:
            outcome = self._step(tensordict)
        except (AttributeError, KeyError, TypeError) as cause:
            # A missing action may be the cause. Checking for that only after an error keeps it out of the fast path.
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
        """Complete the outcome of a step from the root `tensordict`, check it with `run_type_checks`, and return it.

        Rollouts skip this method for complete outcomes (see `TensorDictStepper`). If you add work here, make that class
        do it, too.
        """
        outcome = complete_outcome(outcome, self._specs)
        mask = leaf_at(tensordict, ("_step",))
        if mask is not None:
            outcome = with_unstepped_rows(outcome, tensordict, mask, self._specs)
        if self.run_type_checks:
            check_outcome(outcome, self._specs)
        return outcome

    def reset(
        self, tensordict: TensorDictBase | None = None, *, set_state: bool | None = None, **kwargs: Any
    ) -> TensorDictBase:
        """Reset the environment and return the first observations of new trajectories.

        A closed environment that can make itself anew is reopened first. A rollout in progress loses its lease. Errors
        of ``_reset`` itself are raised unchanged. `tensordict` is written only after all checks.

        Args:
            tensordict: receives the first observations and flags as new tensors and is returned; None for a new
                TensorDict. A ``"_reset"`` mask (bool, shape of the group's done) limits the reset to the environments
                where it is True. The other rows keep their values, and the masks are removed. If `tensordict` lacks an
                entry, a warning is issued, and the other rows of that entry hold the values that ``_reset`` returned.
            set_state: whether the trajectory begins in the state that `tensordict` holds; None for the environment's
                default.
            **kwargs: passed to ``_reset``.

        Raises:
            UnsupportedError: if `set_state` is True and the environment doesn't support it.
            SchemaError: if the batch size isn't the environment's.
            EnvironmentContractError: if a reset row is done, unless `allow_done_after_reset`. Also if ``_reset``
                returns its input, or done and truncated without terminated.
            ClosedError: if the environment was closed and isn't reopened.
        """
        self._reopen()
        self._check_open()
        if tensordict is not None:
            self._check_batch("reset", tensordict)
        self.usage.direct()
        masks = reset_masks(tensordict, self._specs.groups())
        request = own_request(tensordict, masks)
        # The environment may overwrite tensors that it returned earlier, so the rows to keep are copied.
        before = tensordict.clone() if tensordict is not None and is_partial(masks) else None
        if set_state is not None:
            kwargs.update(self.state_request(set_state))
        root = self._reset(request, **kwargs)
        if root is request and request is not None:
            raise EnvironmentContractError("_reset returned its input; return a new TensorDict")
        reset_keys = self.reset_keys
        root = self.completed_root(without_masks(root, reset_keys) if masks else root)
        if before is not None:
            root = merge_reset(root, before, masks)
        if not self.allow_done_after_reset:
            # If the masks select every row, all rows are checked, as without masks.
            check_not_done(root, masks if before is not None else {}, self._specs, type(self).__name__)
        if tensordict is None:
            return root
        return put_root(tensordict, root, reset_keys)

    def completed_root(self, root: TensorDictBase) -> TensorDictBase:
        """Add missing flags to `root`, the result of ``_reset``, and move it to the environment's device; return it.

        For wrappers that call ``_reset`` themselves.
        """
        if root.device is None and self.device is not None:
            root = root.to(self.device)
        return complete_root(root, self._specs)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset the environments that are done in the root `tensordict`; return the root of the next step.

        `tensordict` isn't changed. It is returned itself if no environment is done. Only done flags count.

        If the environment has flags at its top level, these alone decide: all of its agents are reset together, and
        agents that are done earlier wait. Otherwise each group of agents is reset by its own flags.
        """
        due = due_resets(tensordict, self._specs.groups())
        if not any(bool(mask.any()) for mask in due.values()):
            return tensordict
        return self.reset(request_of(tensordict, due))

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, then reset the environments that are done; see `step` and `maybe_reset`.

        Returns:
            ``(stepped, root)``. `stepped` is `tensordict` with its ``"next"``; if a trajectory ended, that holds its
            true last observation. `root` is the root of the next step.
        """
        stepped = self.step(tensordict)
        return stepped, self.maybe_reset(advance(stepped, self))

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment and return the last seed used.

        Without `static_seed`, that is ``seed + n - 1`` for a batch of n environments. A class that steps a batch
        without members passes only `seed` to its ``_set_seed``.

        Args:
            seed: seed of the first environment; environment i of a batch with members gets ``seed + i``.
            static_seed: whether all environments get `seed` itself.

        Raises:
            InvalidArgumentError: if `seed` isn't an integer.
            ClosedError: if the environment was closed.
        """
        self._check_open()
        seed = integer("seed", seed)
        self._seed_all(seed, static_seed)
        return seed if static_seed else seed + self.numel() - 1

    @classmethod
    def register_gym(
        cls,
        id: str,
        *,
        entry_point: Callable[..., Any] | None = None,
        transform: Any = None,
        info_keys: Sequence[NestedKey] | None = None,
        backend: str | None = None,
        to_numpy: bool = False,
        **kwargs: Any,
    ) -> None:
        """Register the class with gymnasium, so that ``gymnasium.make(id, ...)`` makes its environments.

        Args:
            id: the environment's id, for example ``"Walk-v0"``.
            entry_point: a callable that makes the environment from the keyword arguments of `gymnasium.make`; None for
                the class.
            transform: a transform for each environment, which gets a copy.
            info_keys: entries of the outcome that are returned in info instead of the observation.
            backend: ``"gymnasium"`` or None, which are the same.
            to_numpy: whether observations are arrays; if False, tensors.
            **kwargs: `max_episode_steps`, `reward_threshold`, `nondeterministic`, `order_enforce`,
                `disable_env_checker`, `additional_wrappers`, `vector_entry_point` and `kwargs` are passed to gymnasium.
                All others, and the contents of `kwargs`, are passed to `entry_point`. `disable_env_checker` is True by
                default, but False with `to_numpy`.

        Raises:
            InvalidArgumentError: if the id is already registered.
            UnsupportedError: for another backend.
        """
        register(entry_point or cls, id, transform, info_keys, backend, to_numpy, kwargs)

    def close(self, **kwargs: Any) -> None:
        """Close the environment; later steps raise `ClosedError`. Classes with a simulator also release it."""
        self.is_closed = True

    # ----------------------------------------------------------------- state
    def parse_state(self, state: Any, strict: bool = True) -> Any:
        """Check a saved state and return the value for `adopt_state`; change nothing.

        Raises:
            SchemaError: if the state doesn't fit; the message names the entry.
        """
        return parse_entries(self, state, strict)

    def adopt_state(self, value: Any) -> None:
        """Take over a value that `parse_state` returned. Can't fail."""
        adopt_entries(self, value)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Restore a saved state, which is copied; return None. The state of a simulator isn't part of it.

        Args:
            state_dict: the result of `state_dict`.
            strict: whether missing and unexpected entries are errors; if False, they are ignored.
            assign: no effect.

        Raises:
            SchemaError: if the state doesn't fit; then nothing has changed.
        """
        load_state(self, state_dict, strict)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call `step`, so that the environment can be called like a module."""
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
