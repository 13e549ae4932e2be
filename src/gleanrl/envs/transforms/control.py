"""Transforms that steer an environment: `FrameSkipTransform`, `NoopResetEnv`, `EndOfLifeTransform`, `TimeMaxPool`.

Steps that are skipped, or taken by another policy: `ConditionalSkip`, `ConditionalPolicySwitch`.
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
from gleanrl.envs.transforms.episodic import Following, OfEnvironment
from gleanrl.envs.transforms.row_view import Record, reset_rows, trailing
from gleanrl.errors import EnvironmentContractError, UnsupportedError


class FrameSkipTransform(OfEnvironment):
    """Repeats each action; rewards are added up, and the end of an episode ends the step.

    It steps the environment with the transforms before it. In a batch, members whose episode ends meanwhile are stepped
    no further, by the ``"_step"`` mask of `EnvBase.step`.

    Args:
        frame_skip: how often the action is taken, at least 1.

    Raises:
        UnsupportedError: where a member ends in a batch that can't leave members out: gymnasium's vector environments.
    """

    def __init__(self, frame_skip: int = 1) -> None:
        super().__init__()
        self.frame_skip = positive("frame_skip", frame_skip)
        self._entered: TensorDictBase | None = None

    def _inv_call(self, tensordict: Record) -> Record:
        # The root as the environment with the transforms before this one gets it.
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
    """Takes random actions after each reset. For one environment; in a batch of them each member gets its own.

    If an episode ends meanwhile, the environment is reset and it begins anew.

    Args:
        noops: how many.
        random: whether their number is drawn from 1 to `noops`.
        seed: of the number and the actions; None for one drawn from torch's global generator at the first reset.
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
                with self.generator.lent():
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


class EndOfLifeTransform(OfEnvironment):
    """Tells the loss of a life, which isn't the end of the episode.

    Losses read `eol_key` as their done key. For environments that count lives (Atari's).

    Args:
        eol_key: where the flag stands: whether a life was lost or the episode ended, bool, of done's shape.
        lives_key: where the number of lives stands, int64.
        done_key: the done flag to go by.
        eol_attribute: where the environment has the number, or a function that returns it.
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
                f"EndOfLifeTransform: the environment has no {self.eol_attribute!r}; name another eol_attribute"
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
        """Add the flag and the number."""
        out = observation_spec.clone()
        done = self.parent.full_done_spec[self.done_key]
        out[self.eol_key] = Categorical(2, shape=done.shape, dtype=torch.bool, device=done.device)
        out[self.lives_key] = Unbounded(self.parent.batch_size, device=done.device, dtype=torch.int64)
        return out

    def register_keys(self, loss_or_advantage: Any) -> None:
        """Make a loss or advantage module take the flag as done and terminated."""
        loss_or_advantage.set_keys(done=self.eol_key, terminated=self.eol_key)


class TimeMaxPool(Following):
    """Takes the greatest number of the last T observations, element by element, within an episode.

    Args:
        in_keys: observations.
        out_keys: where the results stand; None for in place.
        T: how many, the newest counted, at least 1.
        reset_key: the ``"_reset"`` mask to go by; None for any of the environment's.
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
        """Return the last observations, ``(T, *batch, *leaf)``, the newest last."""
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
        rows = self.asked(tensordict)
        for in_key, out_key in self.pairs():
            frame = tensordict_reset.get(in_key)
            last = frame.expand((self.T, *frame.shape)).clone()
            last = self.renewed(in_key, last, None if rows is None else trailing(rows, frame))
            tensordict_reset.set(out_key, last.amax(0))
        return tensordict_reset


def _environment(transform: Transform) -> Any:
    """Return the transform's parent."""
    if transform.parent is None:
        raise UnsupportedError(f"{type(transform).__name__}: expected to be part of an environment")
    return transform.parent


def _one_environment(transform: Transform) -> Any:
    """Return the transform's parent, which must be a single environment."""
    parent = _environment(transform)
    if parent.batch_size and parent.batch_size.numel() != 1:
        raise UnsupportedError(
            f"{type(transform).__name__}: some of the {parent.batch_size.numel()} environments of a batch may end "
            "before others; give each member its own transform"
        )
    return parent


Condition = Callable[[TensorDictBase], bool | Tensor]


class ConditionalSkip(Transform):
    """Leaves steps out: where a condition holds the outcome of a step is its root, with a reward of zero.

    That goes for the environment that the transform is in, the transforms beside it included; those of an environment
    around it (``auto_unwrap=False``) see the step.

    Args:
        cond: a function of the root and its action; returns whether the step is skipped, for all environments or
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
        """Raise: it needs an environment."""
        raise UnsupportedError(
            "ConditionalSkip leaves out an environment's steps; it can't be used in a buffer"
        )


class ConditionalPolicySwitch(Transform):
    """Lets another policy take a step where a condition holds after a step, or after a reset; once, not repeatedly.

    The user sees what came before it as the root, and what came out of it as the outcome, as if it were one step. Where
    an episode has ended nothing is done. It uses the environment with the transforms before this one.

    Args:
        policy: writes actions into a root and returns it.
        condition: a function of an outcome, or of a reset's observations; returns whether `policy` is to act, for all
            environments or ``(*batch,)``.
    """

    policy: Callable[[TensorDictBase], TensorDictBase]

    def __init__(self, policy: Callable[[TensorDictBase], TensorDictBase], condition: Condition) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # a module of the user's isn't part of this one
        self.condition = condition

    def _step(self, tensordict: Record, next_tensordict: Record) -> Record:
        rows = self._holds(next_tensordict)
        if not bool(rows.any()):
            return next_tensordict
        root = advance(tensordict.copy().set("next", next_tensordict), self.parent)
        return _chosen(rows, self._acted(root, rows), next_tensordict)

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        rows, asked = self._holds(tensordict_reset), reset_rows(tensordict, self.parent.reset_keys)
        rows = rows if asked is None else rows & asked
        if not bool(rows.any()):
            return tensordict_reset
        outcome = self._acted(tensordict_reset.copy(), rows)
        return _chosen(rows, outcome.select(*tensordict_reset.keys(True, True)), tensordict_reset)

    def _holds(self, record: Record) -> Tensor:
        """Return where the condition holds and the episode goes on, ``(*batch,)`` bool."""
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
        """Raise: it needs an environment."""
        raise UnsupportedError("ConditionalPolicySwitch acts in an environment; it can't be used in a buffer")


def _chosen(rows: Tensor, fresh: TensorDictBase, before: TensorDictBase) -> TensorDictBase:
    """Return `fresh` in `rows` and `before` elsewhere."""
    if bool(rows.all()):
        return fresh
    out = before.copy()
    for key in before.keys(True, True):
        value = fresh.get(key)
        out.set(key, torch.where(trailing(rows, value), value, before.get(key)))
    return out
