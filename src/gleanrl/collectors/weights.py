"""The collector's own policy and the weights that are pushed into it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.devices import same_device
from gleanrl.errors import InvalidTypeError, PolicyError, SchemaError
from gleanrl.tree import as_key, flatten


class PolicyWeights:
    """Holds the policy that a collector runs, and knows where its weights come from.

    A policy that is where it has to run is run itself: hooks, steps of exploration and updates of its weights show
    at once. One that has to move is copied; its current weights then go to the copy at every batch hand-over
    (`hand_over`), until the user pushes some (`push`), and from then on by pushing only.

    Args:
        policy: what the user gave.
        device: where it runs; None for where it is.
    """

    def __init__(self, policy: Any, device: torch.device | None) -> None:
        self.policy = self._source = policy
        self._by_hand = False
        if device is None or not isinstance(policy, torch.nn.Module) or _is_on(policy, device):
            return
        try:
            self.policy = copy.deepcopy(policy).to(device)
        except Exception as cause:
            raise PolicyError(
                f"policy: {type(policy).__name__} can't be copied to {device}: {cause}; "
                "pass policy_device=None (and no device) to run the module itself"
            ) from cause

    def hand_over(self) -> None:
        """Give a copy the current weights of the user's module, unless the user pushes them."""
        if self.policy is not self._source and not self._by_hand:
            self._copy(TensorDict.from_module(self._source))

    def taken_back(self) -> None:
        """Give the user's module the weights of the copy, which were loaded, unless the user pushes them."""
        if self.policy is not self._source and not self._by_hand:
            self._source.load_state_dict(self.policy.state_dict())

    def push(self, weights: TensorDictBase | None = None) -> None:
        """Copy weights into the collector's policy, in place, all or nothing; a copy gets no others from now on.

        Args:
            weights: what `TensorDict.from_module` gives; None for the current weights of the user's module.

        Raises:
            SchemaError: if the keys, shapes or dtypes aren't those of the policy; nothing was copied then.
        """
        if not isinstance(self.policy, torch.nn.Module):
            if weights is not None:
                raise PolicyError("update_policy_weights_: the policy isn't a module and has no weights")
            return
        if weights is not None or self.policy is not self._source:
            self._copy(TensorDict.from_module(self._source) if weights is None else weights)
        self._by_hand = True

    def _copy(self, weights: TensorDictBase) -> None:
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


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    return all(same_device(tensor.device, device) for tensor in chain(module.parameters(), module.buffers()))


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
