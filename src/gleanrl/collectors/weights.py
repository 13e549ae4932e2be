"""The collector's own policy and the weights that are pushed into it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.errors import InvalidTypeError, PolicyError, SchemaError
from gleanrl.tree import as_key, flatten


class PolicyWeights:
    """Holds the policy that a collector runs, and knows where its weights come from.

    With a device the policy is a copy on that device, whose weights change only by `push`; without one it's
    the user's own module, whose weights are always the current ones.

    Args:
        policy: what the user gave.
        device: where the copy runs; None to run the policy itself.
    """

    def __init__(self, policy: Any, device: torch.device | None) -> None:
        self._source = policy if isinstance(policy, torch.nn.Module) else None
        if self._source is not None and device is not None:
            try:
                self.policy: Any = copy.deepcopy(policy).to(device)
            except Exception as cause:
                raise PolicyError(
                    f"policy: {type(policy).__name__} can't be copied to {device}: {cause}; "
                    "pass policy_device=None (and no device) to run the module itself"
                ) from cause
        else:
            self.policy = policy

    def push(self, weights: TensorDictBase | None = None) -> None:
        """Copy weights into the collector's policy, in place, all or nothing.

        Args:
            weights: what `TensorDict.from_module` gives; None for the current weights of the user's module.

        Raises:
            SchemaError: if the keys, shapes or dtypes aren't those of the policy; nothing was copied then.
        """
        if not isinstance(self.policy, torch.nn.Module):
            if weights is not None:
                raise PolicyError("update_policy_weights_: the policy isn't a module and has no weights")
            return
        if weights is None:
            if self._source is self.policy or self._source is None:
                return
            weights = TensorDict.from_module(self._source)
        if not isinstance(weights, TensorDictBase):
            raise InvalidTypeError(
                f"update_policy_weights_: expected a TensorDict of weights, got {type(weights).__name__}"
            )
        own, given = flatten(TensorDict.from_module(self.policy)), flatten(weights)
        if set(own) != set(given):
            raise SchemaError(
                f"update_policy_weights_: missing {sorted(set(own) - set(given))}, "
                f"unexpected {sorted(set(given) - set(own))}"
            )
        for path, target in own.items():
            value = given[path]
            if target.shape != value.shape or target.dtype is not value.dtype:
                raise SchemaError(
                    f"update_policy_weights_: {as_key(path)!r} expected shape {tuple(target.shape)} "
                    f"{target.dtype}, got {tuple(value.shape)} {value.dtype}; nothing is cast or broadcast"
                )
        with torch.no_grad():
            for path, target in own.items():
                target.copy_(given[path])


@contextmanager
def unchanged_on_error(*parts: Any) -> Iterator[None]:
    """Load state into modules inside: if that raises, their weights are as before. What isn't a module is passed over.

    `torch.nn.Module.load_state_dict` copies whatever fits before it complains about the rest.

    Raises:
        SchemaError: in place of torch's RuntimeError about keys or shapes.
    """
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    before = [copy.deepcopy(module.state_dict()) for module in modules]
    try:
        yield
    except Exception as cause:
        for module, state in zip(modules, before, strict=True):
            module.load_state_dict(state)
        if type(cause) is RuntimeError:
            raise SchemaError(f"load_state_dict: {cause}") from cause
        raise
