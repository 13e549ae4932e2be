"""The collector's own policy and the weights that are pushed into it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.parameter import is_lazy

from gleanrl.devices import same_device
from gleanrl.errors import InvalidTypeError, PolicyError, SchemaError
from gleanrl.system.interrupts import to_the_end
from gleanrl.tree import as_key, flatten


class PolicyWeights:
    """Holds the policy that a collector runs, and knows where its weights come from.

    A policy that is where it has to run is run itself: hooks, steps of exploration and updates of its weights show
    at once. One that has to move is copied; its current weights then go to the copy before every batch (`refresh`),
    until the user pushes some (`push`), and from then on by pushing only.

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

    @property
    def _follows(self) -> bool:
        """Whether a copy gets the weights of the user's module by itself."""
        return self.policy is not self._source and not self._by_hand

    def refresh(self) -> None:
        """Give a copy the current weights of the user's module, unless the user pushes them."""
        if self._follows:
            self._copy(TensorDict.from_module(self._source))

    def loaded(self) -> None:
        """Give the user's module the weights that were loaded into its copy, unless the user pushes them."""
        if self._follows:
            self._source.load_state_dict(self.policy.state_dict())

    def push(self, weights: TensorDictBase | None = None) -> None:
        """Copy weights into the collector's policy, in place, all or nothing; a copy gets no others from now on.

        Args:
            weights: what `TensorDict.from_module` gives, of the policy or of a module around it; None for the
                current weights of the user's module.

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
        if all(path[0] == "module" for path in given) and not any(path[0] == "module" for path in own):
            given = {path[1:]: value for path, value in given.items()}
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

        def change() -> None:
            with torch.no_grad():
                for path, target in own.items():
                    target.copy_(given[path])

        to_the_end(change)


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    return all(same_device(tensor.device, device) for tensor in chain(module.parameters(), module.buffers()))


def check_loads(
    module: torch.nn.Module, state: Any, strict: bool, arguments: Mapping[str, Any] | None = None
) -> None:
    """Raise `SchemaError` unless `module.load_state_dict(state, strict)` would find all it needs, in the right shapes.

    Torch copies whatever fits before it complains about the rest. `arguments` that it doesn't take are an
    `InvalidTypeError`.
    """
    try:
        inspect.signature(module.load_state_dict).bind(state, strict=strict, **(arguments or {}))
    except TypeError as error:
        raise InvalidTypeError(f"load_state_dict of {type(module).__name__}: {error}") from error
    own = module.state_dict()
    if not isinstance(state, Mapping):
        raise SchemaError(
            f"load_state_dict: expected the weights of {type(module).__name__}, got {type(state).__name__}"
        )
    missing, unexpected = [key for key in own if key not in state], [key for key in state if key not in own]
    if strict and (missing or unexpected):
        raise SchemaError(f"load_state_dict: missing {missing}, unexpected {unexpected}")
    for key in own.keys() & state.keys():
        if not _fits(own[key], state[key]):
            raise SchemaError(
                f"load_state_dict: {key!r} expected {_shape(own[key])}, got {_shape(state[key])}"
            )


def _fits(own: Any, given: Any) -> bool:
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return True
    return isinstance(given, torch.Tensor) and own.shape == given.shape


def _shape(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
