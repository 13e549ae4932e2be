"""Transforms that control an environment's steps and resets.

`FrameSkipTransform`, `NoopResetEnv`, `EndOfLifeTransform`, `TimeMaxPool`, `ConditionalSkip`, `ConditionalPolicySwitch`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import NestedKey, as_path
from gleanrl._rollout.step_mdp import advance, ended, step_on
from gleanrl._state.rng import OwnedTorchGenerator
from gleanrl._util import non_negative, positive
from gleanrl.data.specs import Categorical, Composite, Unbounded
from gleanrl.envs.outcomes import any_of
from gleanrl.envs.transforms.base import Keys, Transform
from gleanrl.envs.transforms.episodic import EnvTransform, Following
from gleanrl.envs.transforms.row_view import Record, reset_rows, trailing
from gleanrl.errors import EnvironmentContractError, UnsupportedError


class FrameSkipTransform(EnvTransform):
    """Repeats each action and sums the rewards, until the episode ends.

    It steps the environment with the transforms before it. If a member of a batch ends early, it isn't stepped any
    more: the ``"_step"`` mask of `EnvBase.step` leaves it out.

    Args:
        frame_skip: number of times that the action is taken, at least 1.

    Raises:
        UnsupportedError: at a step, if a member ends early in a batch that can't leave members out, such as
            gymnasium's vector environments.
    """

    def __init__(self, frame_skip: int = 1) -> None:
        super().__init__()
        self.frame_skip = positive("frame_skip", frame_skip)
        self._entered: TensorDictBase | None = None

    def _inv_call(self, tensordict: Record) -> Record:
        # The root on this transform's input side: the parent environment is stepped with it again.
        self._entered = tensordict.copy()
        return tensordict

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        parent, root = _environment(self), self._entered
        assert root is not None
        actions = {key: root.get(key) for key in parent.action_keys}
        rewards = {key: next_tensordict.get(key) for key in parent.reward_keys}
        for _ in range(self.frame_skip - 1):
            root, next_tensordict, going = step_on(root, next_tensordict, actions, parent)
            if not bool(going.any()):
                break
            rewards = {key: total + next_tensordict.get(key) for key, total in rewards.items()}
        for key, total in rewards.items():
            next_tensordict.set(key, total)
        return next_tensordict


class NoopResetEnv(Transform):
    """Takes random actions after each reset of a single environment.

    In a batch of environments give each member its own. If an episode ends during these actions, the environment is
    reset and they start again.

    Args:
        noops: number of actions.
        random: whether the number is drawn from 1 to `noops`, both included.
        seed: seed of the number and of the actions; None draws one from torch's global generator at the first reset.

    Raises:
        UnsupportedError: at a reset of more than one environment.
        EnvironmentContractError: at a reset, if `TRIALS` episodes in a row ended within these actions.
    """

    generator: OwnedTorchGenerator

    TRIALS = 10

    def __init__(self, noops: int = 30, random: bool = True, seed: int | None = None) -> None:
        super().__init__()
        self.noops, self.random = non_negative("noops", noops), random
        self.generator = OwnedTorchGenerator(seed)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        parent, count = _one_environment(self), self.noops
        if self.random and count:
            count = int(torch.randint(1, count + 1, (), device="cpu", generator=self.generator.get()))
        for _ in range(self.TRIALS):
            root = tensordict_reset
            for _ in range(count):
                with self.generator.as_global():  # `rand_action` accepts no generator
                    root = parent.rand_action(root)
                stepped = parent.step(root)
                if bool(ended(stepped.get("next"), parent).any()):
                    tensordict_reset = parent.reset()
                    break
                root = advance(stepped, parent)
            else:
                return root
        raise EnvironmentContractError(
            f"NoopResetEnv: {self.TRIALS} episodes in a row ended within {count} random steps; take fewer noops"
        )


class EndOfLifeTransform(EnvTransform):
    """Adds a flag for the loss of a life, which doesn't end the episode.

    It is for environments that count lives, such as Atari's. Losses read `eol_key` as their done key.

    Args:
        eol_key: key of the flag: whether a life was lost or the episode ended, bool, in the shape of done.
        lives_key: key of the number of lives, int64.
        done_key: key of the done flag.
        eol_attribute: path of the base environment's attribute with the number of lives, or with a function that
            returns it.

    Raises:
        UnsupportedError: at a reset or step, if the base environment lacks the attribute.
    """

    def __init__(
        self,
        eol_key: NestedKey = "end-of-life",
        lives_key: NestedKey = "lives",
        done_key: NestedKey = "done",
        eol_attribute: str = "unwrapped.ale.lives",
    ) -> None:
        super().__init__()
        self.eol_key, self.lives_key, self.done_key = eol_key, lives_key, done_key
        self.eol_attribute = eol_attribute

    def _lives(self) -> Tensor:
        try:
            found: Any = reduce(getattr, self.eol_attribute.split("."), self.parent.base_env)
        except AttributeError as cause:
            raise UnsupportedError(
                "EndOfLifeTransform: eol_attribute: expected an attribute of the base environment, which has no "
                f"{self.eol_attribute!r}"
            ) from cause
        lives = torch.as_tensor(found() if callable(found) else found, dtype=torch.int64)
        return lives.reshape(self.parent.batch_size).clone()

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        lives = self._lives().to(next_tensordict.device)
        done = next_tensordict.get(self.done_key)
        lost = trailing(lives < tensordict.get(self.lives_key), done).expand(done.shape)
        next_tensordict.set(self.eol_key, lost | done)
        return next_tensordict.set(self.lives_key, lives)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        tensordict_reset.set(self.eol_key, torch.zeros_like(tensordict_reset.get(self.done_key)))
        return tensordict_reset.set(self.lives_key, self._lives().to(tensordict_reset.device))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the specs of the flag and of the number of lives."""
        out = observation_spec.clone()
        done = self.parent.full_done_spec[self.done_key]
        out[self.eol_key] = Categorical(2, shape=done.shape, dtype=torch.bool, device=done.device)
        out[self.lives_key] = Unbounded(self.parent.batch_size, device=done.device, dtype=torch.int64)
        return out

    def register_keys(self, loss_or_advantage: Any) -> None:
        """Set the flag as the done and terminated keys of a loss or advantage module."""
        loss_or_advantage.set_keys(done=self.eol_key, terminated=self.eol_key)


class TimeMaxPool(Following):
    """Takes the elementwise maximum of the last T observations of an episode.

    Args:
        in_keys: observations; None for ``["observation"]``.
        out_keys: keys of the results; None for in place.
        T: number of observations, the newest included, at least 1.
        reset_key: the ``"_reset"`` mask that begins a new episode; None for any of the environment's.

    Raises:
        InvalidArgumentError: if `T` is below 1.
        UnsupportedError: at a step before the first reset.
    """

    on_rows = True

    def __init__(
        self,
        in_keys: Keys | None = None,
        out_keys: Keys | None = None,
        T: int = 1,
        reset_key: NestedKey | None = None,
    ) -> None:
        super().__init__(["observation"] if in_keys is None else in_keys, out_keys)
        self.T, self.reset_key = positive("T", T), reset_key

    def carries(self) -> dict[NestedKey, Field]:
        """Return fields of the last T observations, ``(T, *batch, *leaf)``, the newest last."""
        spec = self.surroundings().full_observation_spec
        return {
            key: Field(torch.Size((self.T, *spec[key].shape)), spec[key].dtype) for key, _ in self.pairs()
        }

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        for in_key, out_key in self.pairs():
            frame = next_tensordict.get(in_key)
            if in_key not in self.carried:
                raise UnsupportedError("TimeMaxPool: reset the environment before the first step")
            self.carried[in_key] = torch.cat([self.carried[in_key][1:], frame.unsqueeze(0)])
            next_tensordict.set(out_key, self.carried[in_key].amax(0))
        return next_tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows = self.reset_mask(tensordict)
        for in_key, out_key in self.pairs():
            frame = tensordict_reset.get(in_key)
            last = frame.expand((self.T, *frame.shape)).clone()
            last = self.renewed(in_key, last, None if rows is None else trailing(rows, frame))
            tensordict_reset.set(out_key, last.amax(0))
        return tensordict_reset


def _environment(transform: Transform) -> Any:
    """Return the transform's parent environment.

    Raises:
        UnsupportedError: if it is in no environment.
    """
    if transform.parent is None:
        raise UnsupportedError(
            f"{type(transform).__name__}: expected to be part of an environment; put it into a TransformedEnv"
        )
    return transform.parent


def _one_environment(transform: Transform) -> Any:
    """Return the transform's parent, which must be a single environment.

    Raises:
        UnsupportedError: if it isn't.
    """
    parent = _environment(transform)
    if parent.batch_size and parent.batch_size.numel() != 1:
        raise UnsupportedError(
            f"{type(transform).__name__}: expected a single environment, got a batch of {parent.batch_size.numel()}, "
            "whose episodes may end at different steps; give each member its own transform"
        )
    return parent


Condition = Callable[[TensorDictBase], bool | Tensor]


class ConditionalSkip(Transform):
    """Skips steps: where a condition holds, the outcome of a step is its root, with a reward of zero.

    A skipped step skips the environment and all transforms of its `TransformedEnv`. The transforms of an outer
    environment (``auto_unwrap=False``) see the step.

    Args:
        cond: takes the root with its action, and returns whether the step is skipped: a bool for all environments, or
            ``(*batch,)``.
    """

    def __init__(self, cond: Condition) -> None:
        super().__init__()
        self.cond = cond

    def _inv_call(self, tensordict: Record) -> Record:
        skipped = (
            torch.as_tensor(self.cond(tensordict)).reshape(-1).expand(max(1, tensordict.batch_size.numel()))
        )
        return tensordict.set("_step", ~skipped.reshape(tensordict.batch_size))

    def forward(self, tensordict: Any) -> Any:
        """Raise `UnsupportedError`: the transform works in an environment only."""
        raise UnsupportedError(
            "ConditionalSkip leaves out an environment's steps; it can't be used in a buffer"
        )


class ConditionalPolicySwitch(Transform):
    """Lets another policy take one more step where a condition holds after a step or a reset.

    The condition isn't checked again after that step. The user sees both steps as one, with the root of the first and
    the outcome of the second. The first reward is lost. After a reset the user sees only the observations and flags of
    the step's outcome. Environments whose episode has ended aren't stepped. `policy` acts on the environment
    with the transforms before this one.

    Args:
        policy: writes actions into a root and returns it.
        condition: takes an outcome, or a reset's observations, and returns whether `policy` acts: a bool for all
            environments, or ``(*batch,)``.
    """

    policy: Callable[[TensorDictBase], TensorDictBase]

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase], condition: Condition) -> None:
        super().__init__()
        # Not by setattr: torch would register a user's module as a submodule of this one.
        self.__dict__["policy"] = policy
        self.condition = condition

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        rows = self._holds(next_tensordict)
        if not bool(rows.any()):
            return next_tensordict
        root = advance(tensordict.copy().set("next", next_tensordict), self.parent)
        return _chosen(rows, self._acted(root, rows), next_tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows, reset_mask = self._holds(tensordict_reset), reset_rows(tensordict, self.parent.reset_keys)
        rows = rows if reset_mask is None else rows & reset_mask
        if not bool(rows.any()):
            return tensordict_reset
        outcome = self._acted(tensordict_reset.copy(), rows)
        return _chosen(rows, outcome.select(*tensordict_reset.keys(True, True)), tensordict_reset)

    def _holds(self, record: Record) -> Tensor:
        """Return where the condition holds and the episode hasn't ended, ``(*batch,)`` bool."""
        size = record.batch_size
        rows = torch.as_tensor(self.condition(record)).reshape(-1).expand(max(1, size.numel())).reshape(size)
        done = [record.get(key) for key in self.parent.done_keys if as_path(key)[-1] == "done"]
        return rows & ~any_of(done, size)

    def _acted(self, root: TensorDictBase, rows: Tensor) -> TensorDictBase:
        acted = self.policy(root)
        if not bool(rows.all()):
            acted.set("_step", rows)
        return self.parent.step(acted).get("next")

    def forward(self, tensordict: Any) -> Any:
        """Raise `UnsupportedError`: the transform works in an environment only."""
        raise UnsupportedError("ConditionalPolicySwitch acts in an environment; it can't be used in a buffer")


def _chosen(rows: Tensor, after: TensorDictBase, before: TensorDictBase) -> TensorDictBase:
    """Return `after` in `rows` and `before` elsewhere."""
    if bool(rows.all()):
        return after
    out = before.copy()
    for key in before.keys(True, True):
        value = after.get(key)
        out.set(key, torch.where(trailing(rows, value), value, before.get(key)))
    return out
