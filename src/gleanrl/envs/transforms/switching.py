"""Steps that are skipped, or taken by another policy: `ConditionalSkip`, `ConditionalPolicySwitch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gleanrl.envs.resets import any_of
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.rows import Record, reset_rows, trailing
from gleanrl.errors import UnsupportedError
from gleanrl.rollouts.stepping import advance
from gleanrl.tree import as_path

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
