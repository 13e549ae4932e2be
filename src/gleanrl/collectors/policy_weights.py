"""Weights of a module that are copied again and again.

The collector's own policy and the weights that are pushed into it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch.nn.parameter import is_lazy

from gleanrl._arrays.devices import same_device
from gleanrl._arrays.tensordicts import as_key, flatten
from gleanrl._os.interrupts import to_the_end
from gleanrl._util import optional_callable
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, PolicyError, SchemaError

Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]


def made_policy(policy: Any, factory: Callable[[], Any] | None) -> Any:
    """Return the policy that a user gave, or that the user's callable makes."""
    if factory is None:
        return policy
    if policy is not None:
        raise InvalidTypeError("policy_factory: the policy was given already; give one of the two")
    return optional_callable("policy_factory", factory)()


class PolicyWeights:
    """Holds the policy that a collector runs, and knows where its weights come from.

    A policy that is where it has to run is run itself: hooks, steps of exploration and updates of its weights show
    at once. One that has to move is copied; its current weights then go to the copy before every batch (`refresh`),
    until the user pushes some (`push`), and from then on by pushing only. One whose parameters are all on the meta
    device has no weights: a copy with memory of its own runs, once some were pushed.

    Args:
        policy: what the user gave.
        device: where it runs; None for where it is.
    """

    version = 0
    """How often the policy got other weights; whoever gives it some counts it up."""

    def __init__(self, policy: Any, device: torch.device | None) -> None:
        self.policy = self._source = policy
        self._by_hand = self._lacking = False
        if isinstance(policy, torch.nn.Module) and on_meta(policy):
            self._by_hand = self._lacking = True
            self.policy = copy.deepcopy(policy).to_empty(device="cpu" if device is None else device)
            for tensor in chain(self.policy.parameters(), self.policy.buffers()):
                tensor.detach().zero_()
            return
        if device is None or not isinstance(policy, torch.nn.Module) or _is_on(policy, device):
            return
        try:
            self.policy = _moved(copy.deepcopy(policy), device)
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
        """Give a copy the current weights of the user's module, unless the user pushes them.

        Raises:
            PolicyError: there are no weights yet.
        """
        if self._lacking:
            raise PolicyError(
                "policy: its parameters are on the meta device, without values; give it weights first, "
                "collector.update_policy_weights_(weights)"
            )
        if self._follows:
            copy_weights(TensorDict.from_module(self._source), TensorDict.from_module(self.policy))

    def loaded(self) -> None:
        """Give the user's module the weights that were loaded into its copy, unless the user pushes them."""
        if self._follows:
            self._source.load_state_dict(self.policy.state_dict())

    def stop_following(self) -> None:
        """Give a copy other weights by `push` only."""
        self._by_hand = True

    def push(self, weights: Any = None) -> None:
        """Copy weights into the collector's policy, in place, all or nothing; a copy gets no others from now on.

        Args:
            weights: what `TensorDict.from_module` gives, of the policy or of a module around it; such a module; its
                state dictionary; None for the current weights of the user's module.

        Raises:
            InvalidTypeError: anything else.
            SchemaError: if the keys, shapes or dtypes aren't those of the policy; nothing was copied then.
        """
        if not isinstance(self.policy, torch.nn.Module):
            if weights is not None:
                raise PolicyError("update_policy_weights_: the policy isn't a module and has no weights")
            return
        if weights is not None or self.policy is not self._source:
            given = weights_of(self._source if weights is None else weights)
            copy_weights(given, TensorDict.from_module(self.policy))
        self.received()

    def received(self) -> None:
        """Note that the policy has got weights, and gets others by pushing only."""
        self._by_hand, self._lacking = True, False


def chosen_weights(policy_or_weights: Any, named: Mapping[str, Any]) -> Any:
    """Return the weights that `update_policy_weights_` was given, by whichever of their names.

    Raises:
        InvalidArgumentError: by several; or of several policies.
        InvalidTypeError: a name isn't one of them.
    """
    unknown = named.keys() - {"policy_weights", "weights", "policy", "weights_dict", "model_id"}
    if unknown:
        raise InvalidTypeError(f"update_policy_weights_: got an unexpected keyword argument {min(unknown)!r}")
    several = named.get("weights_dict")
    models = {named.get("model_id") or "policy"} if several is None else set(several)
    if models != {"policy"}:
        raise InvalidArgumentError(
            f"update_policy_weights_: a collector has one policy, 'policy', got {sorted(models)}"
        )
    forms = (policy_or_weights, *(named.get(name) for name in ("policy_weights", "weights", "policy")))
    given = [form for form in (*forms, several and several["policy"]) if form is not None]
    if len(given) > 1:
        raise InvalidArgumentError("update_policy_weights_: the weights were given twice; give them once")
    return given[0] if given else None


def weights_of(source: Any) -> TensorDictBase:
    """Return the weights that a module has, or that a TensorDict or a state dictionary holds."""
    if isinstance(source, torch.nn.Module):
        return TensorDict.from_module(source)
    if isinstance(source, Mapping):
        return TensorDict(dict(source)).unflatten_keys(".")
    if not isinstance(source, TensorDictBase):
        raise InvalidTypeError(
            f"update_policy_weights_: expected a TensorDict of weights, a state dictionary or a module, "
            f"got {type(source).__name__}"
        )
    return source


def copy_weights(weights: TensorDictBase, target: TensorDictBase) -> None:
    """Copy weights into others, in place, all or nothing.

    Args:
        weights: of the same module as `target`, or of a module around it.
        target: what `TensorDict.from_module` gave.

    Raises:
        SchemaError: if the keys, shapes or dtypes differ; nothing was copied then.
    """
    copy_pairs(matched_weights(weights, target))


def copy_pairs(pairs: Pairs) -> None:
    """Copy the second tensor of each pair into the first, in place, all or nothing."""

    def change() -> None:
        for mine, given in pairs:
            mine.detach().copy_(
                given.detach()
            )  # an interrupt could leave gradients off behind `torch.no_grad`

    to_the_end(change)


def matched_weights(weights: TensorDictBase, target: TensorDictBase) -> Pairs:
    """Return each tensor of `target` and what is to be copied there; see `copy_weights`."""
    own, given = flatten(target), flatten(weights)
    if all(path[0] == "module" for path in given) and not any(path[0] == "module" for path in own):
        given = {path[1:]: value for path, value in given.items()}
    if set(own) != set(given):
        raise SchemaError(
            f"update_policy_weights_: missing {sorted(set(own) - set(given))}, "
            f"unexpected {sorted(set(given) - set(own))}"
        )
    for path, mine in own.items():
        value = given[path]
        if value.is_meta and not mine.is_meta:
            raise SchemaError(
                f"update_policy_weights_: {as_key(path)!r} is on the meta device and has no values"
            )
        if mine.shape != value.shape or mine.dtype is not value.dtype:
            raise SchemaError(
                f"update_policy_weights_: {as_key(path)!r} expected shape {tuple(mine.shape)} "
                f"{mine.dtype}, got {tuple(value.shape)} {value.dtype}; nothing is cast or broadcast"
            )
    return [(mine, given[path]) for path, mine in own.items()]


def on_meta(module: torch.nn.Module) -> bool:
    """Return whether no parameter has a value; a policy with values in some may not use the others."""
    places = {weight.is_meta for weight in module.parameters()}
    return places == {True}


def _moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a module on a device; tensors without values, which it doesn't use, stay on the meta device."""
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        return module._apply(lambda leaf: leaf if leaf.is_meta else leaf.to(device))
    return module.to(device)


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    with_values = (weight for weight in module.parameters() if not weight.is_meta)
    return all(same_device(tensor.device, device) for tensor in chain(with_values, module.buffers()))


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


class WeightCopier:
    """A module's weights, which go to records of them or come from there, again and again. One thread at a time.

    What `copy_weights` checks is checked once for each record, and again whenever the module has other tensors, or
    these another shape, dtype or place.

    Args:
        module: whose weights they are; it may change.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._modules: list[torch.nn.Module] = []
        self._names: list[str] = []
        self._found: list[Any] = []
        self._forms: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._records: dict[int, tuple[TensorDictBase, Pairs]] = {}

    @property
    def lacking(self) -> bool:
        """Whether the weights have no values: all parameters are on the meta device."""
        return on_meta(self._module)

    def write(self, record: TensorDictBase) -> None:
        """Copy the module's weights into a record, but for those without values; see `copy_weights`."""
        copy_pairs([(there, here) for here, there in self._pairs(record) if not here.is_meta])

    def read(self, record: TensorDictBase) -> None:
        """Copy a record's into the module; see `copy_weights`."""
        copy_pairs(self._pairs(record))

    def _pairs(self, record: TensorDictBase) -> Pairs:
        self._look()
        known = self._records.get(id(record))
        if known is None:
            known = self._records[id(record)] = (
                record,
                matched_weights(record, TensorDict.from_module(self._module)),
            )
        return known[1]

    def _look(self) -> None:
        """Forget what was checked if the module isn't as it was."""
        names, found = self._entries()
        same = len(found) == len(self._found) and all(map(is_, found, self._found)) and names == self._names
        if same and self._tensors and [_form(tensor) for tensor in self._tensors] == self._forms:
            return
        self._records.clear()
        self._modules = list(self._module.modules())
        self._names, self._found = self._entries()
        leaves = list(flatten(TensorDict.from_module(self._module)).values())
        entries = {id(entry) for entry in self._found}
        # Tensors that are no entries of modules could be exchanged unseen: they are looked up every time.
        self._tensors = leaves if all(id(leaf) in entries for leaf in leaves) else []
        self._forms = [_form(tensor) for tensor in self._tensors]

    def _entries(self) -> tuple[list[str], list[Any]]:
        """Return what the modules hold: tensors and other modules, and their names."""
        tables = [
            table
            for module in self._modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        return list(chain.from_iterable(tables)), [entry for table in tables for entry in table.values()]


def _form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device
