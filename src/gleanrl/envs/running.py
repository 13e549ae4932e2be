"""What every environment offers on top of its `step` and `reset`: random actions, rollouts, questions."""

from __future__ import annotations

import inspect
from typing import Any

from tensordict import TensorDict, TensorDictBase

from gleanrl.envs.check import check_env_specs
from gleanrl.envs.data_specs import learn_specs
from gleanrl.envs.resets import terminated_or_truncated
from gleanrl.envs.rollout import RolloutOptions, run_rollout
from gleanrl.envs.spec_properties import SpecProperties
from gleanrl.errors import ClosedError, InvalidArgumentError, UnsupportedError
from gleanrl.rollouts.policies import RandomPolicy
from gleanrl.rollouts.stepping import step_mdp
from gleanrl.tree import NestedKey


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
