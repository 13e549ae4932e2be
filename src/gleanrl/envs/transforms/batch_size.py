"""`BatchSizeTransform`: an environment, or a buffer's batches, with another batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.data.specs import Composite
from gleanrl.envs.construction import OF_ANY_SIZE
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.env import TransformedEnv
from gleanrl.envs.transforms.rows import Record
from gleanrl.errors import InvalidArgumentError


class BatchSizeTransform(Transform):
    """Gives what comes out another batch size, and takes what goes in back to the environment's.

    Args:
        batch_size: the batch size, of an environment that steps as many at once as it is given
            (``batch_locked=False``), or of one whose entries have these dimensions though its batch size hasn't.
        reshape_fn: instead: a function of a TensorDict that changes its batch dimensions (`flatten`, `reshape`,
            `squeeze`, …) and leaves the order of records as it is.
        reset_func: called as ``reset_func(tensordict, tensordict_reset)`` at a reset; what it returns takes the place
            of what the environment's reset returned.
        env_kwarg: whether `reset_func` gets the environment, with this transform, as ``env=``, too.

    Raises:
        InvalidArgumentError: unless exactly one of `batch_size` and `reshape_fn` is given.
    """

    def __init__(
        self,
        *,
        batch_size: Sequence[int] | None = None,
        reshape_fn: Callable[[Any], Any] | None = None,
        reset_func: Callable[..., Any] | None = None,
        env_kwarg: bool = False,
    ) -> None:
        if (batch_size is None) == (reshape_fn is None):
            raise InvalidArgumentError("BatchSizeTransform: give batch_size or reshape_fn, and not both")
        super().__init__()
        self.batch_size = None if batch_size is None else torch.Size(batch_size)
        self.reshape_fn, self.reset_func, self.env_kwarg = reshape_fn, reset_func, env_kwarg

    def _call(self, tensordict: Record) -> Record:
        if self.reshape_fn is not None:
            return self.reshape_fn(tensordict)
        tensordict.batch_size = self.batch_size
        return tensordict

    def _reset(self, tensordict: Record, tensordict_reset: Record) -> Record:
        if self.reset_func is not None:
            also = {"env": self.container} if self.env_kwarg else {}
            tensordict_reset = self.reset_func(tensordict, tensordict_reset, **also)
        return self._call(tensordict_reset)

    def _inv_call(self, tensordict: Record) -> Record:
        parent = self.parent
        if parent is None:
            return tensordict
        if self.reshape_fn is not None:
            return tensordict.reshape(parent.batch_size)
        if parent.batch_locked:
            tensordict.batch_size = parent.batch_size
        return tensordict

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        """Return the batch size on the user's side."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.reshape_fn is not None
        return self.reshape_fn(TensorDict({}, batch_size)).batch_size

    def _transformed(self, specs: Composite, *roles: str) -> Composite:
        before, after = specs.shape, self.transform_env_batch_size(specs.shape)
        out = Composite({}, shape=after, device=specs.device)
        for name in specs.keys():
            part = Composite({}, shape=after, device=specs.device)
            for key in specs[name].keys(True, True):
                leaf = specs[name][key]
                rest = leaf.shape[len(before) :]
                if leaf.shape[: len(after)] != after or self.reshape_fn is not None:
                    same = before.numel() == after.numel() and self.reshape_fn is not None
                    leaf = leaf.reshape((*after, *rest)) if same else leaf.expand((*after, *rest))
                part[key] = leaf
            out[name] = part
        return out


OF_ANY_SIZE.append(lambda env, size: TransformedEnv(env, BatchSizeTransform(batch_size=size)))
