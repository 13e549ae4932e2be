"""The policy that a collector runs, and checked, repeated copying of its weights."""

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
    """Return the policy that the user passed, or the one that the user's callable makes.

    Raises:
        InvalidTypeError: both were passed, or `factory` is not callable.
    """
    if factory is None:
        return policy
    if policy is not None:
        raise InvalidTypeError("policy_factory: the policy was given already; pass only one of the two")
    return optional_callable("policy_factory", factory)()


class PolicyWeights:
    """Hold the policy that a collector runs, and copy weights into it.

    A policy that is already on the right device is run itself. Its hooks, exploration steps and weight updates take
    effect at once.

    A policy that has to move is copied. Its current weights are copied before every batch (`refresh`), until the user
    pushes weights (`push`). From then on the copy gets pushed weights only.

    A policy with all parameters on the meta device has no values. The collector runs a copy with real memory, which
    needs pushed weights first.

    Args:
        policy: the policy that the user passed.
        device: device that it runs on; None for its current device.

    Raises:
        PolicyError: the policy has to move, but can't be copied.
    """

    version = 0
    """How often the policy got new weights. The code that sets weights increments it."""

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
        """Whether the copy gets the current weights of the user's module before each batch."""
        return self.policy is not self._source and not self._by_hand

    def refresh(self) -> None:
        """Copy the current weights of the user's module into the copy, if there is one, until the first `push`.

        Raises:
            PolicyError: the policy has no weights yet: its parameters were on the meta device, and none were pushed.
            SchemaError: the user's module has other keys, shapes or dtypes than the copy.
        """
        if self._lacking:
            raise PolicyError(
                "policy: its parameters are on the meta device, without values; give it weights first, "
                "collector.update_policy_weights_(weights)"
            )
        if self._follows:
            copy_weights(TensorDict.from_module(self._source), TensorDict.from_module(self.policy))

    def loaded(self) -> None:
        """Copy loaded weights from the copy back into the user's module, if there is a copy, until the first `push`.

        Otherwise the next `refresh` would overwrite the loaded weights with the old ones.
        """
        if self._follows:
            self._source.load_state_dict(self.policy.state_dict())

    def stop_following(self) -> None:
        """Stop copying the weights of the user's module. From now on only `push` changes the copy."""
        self._by_hand = True

    def push(self, weights: Any = None) -> None:
        """Copy weights into the collector's policy, in place, all or none. A copy gets only pushed weights from now on.

        Args:
            weights: a result of `TensorDict.from_module`, for the policy or for a module around it; such a module; its
                state dictionary. None takes the current weights of the user's module; it has no effect if the policy is
                not a module.

        Raises:
            PolicyError: weights were passed, but the policy is not a module.
            InvalidTypeError: `weights` has another type.
            SchemaError: the keys, shapes or dtypes differ from the policy's. Nothing was copied.
        """
        if not isinstance(self.policy, torch.nn.Module):
            if weights is not None:
                raise PolicyError("update_policy_weights_: the policy isn't a module and has no weights")
            return
        if weights is not None or self.policy is not self._source:
            new_weights = weights_of(self._source if weights is None else weights)
            copy_weights(new_weights, TensorDict.from_module(self.policy))
        self.received()

    def received(self) -> None:
        """Record that the policy has weights, and that only `push` changes them from now on."""
        self._by_hand, self._lacking = True, False


def chosen_weights(policy_or_weights: Any, named: Mapping[str, Any]) -> Any:
    """Return the weights that were passed to `update_policy_weights_`, under any of the keyword's names; None for none.

    Raises:
        InvalidArgumentError: weights were passed under several names, or for another policy than ``"policy"``.
        InvalidTypeError: a keyword is unknown.
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
    passed = [form for form in (*forms, several and several["policy"]) if form is not None]
    if len(passed) > 1:
        raise InvalidArgumentError(
            "update_policy_weights_: the weights were passed under several names; pass them once"
        )
    return passed[0] if passed else None


def weights_of(source: Any) -> TensorDictBase:
    """Return the weights of a module, a state dictionary or a TensorDict as a TensorDict of the same tensors.

    Raises:
        InvalidTypeError: `source` has another type.
    """
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
    """Copy weights into other tensors, in place, all or none.

    Args:
        weights: weights of the same module as `target`, or of a module around it.
        target: a result of `TensorDict.from_module`.

    Raises:
        SchemaError: the keys, shapes or dtypes differ, or a weight on the meta device has no values. Nothing was
            copied.
    """
    copy_pairs(matched_weights(weights, target))


def copy_pairs(pairs: Pairs) -> None:
    """Copy the second tensor of each pair into the first, in place, all or none."""

    def change() -> None:
        for target, value in pairs:
            target.detach().copy_(
                value.detach()
            )  # not `torch.no_grad`: an interrupt could leave gradients off

    to_the_end(change)


def matched_weights(weights: TensorDictBase, target: TensorDictBase) -> Pairs:
    """Return pairs of each tensor of `target` and its new value; see `copy_weights`.

    If only the given paths begin with ``"module"``, that part is dropped: wrappers such as `TensorDictModule` add it.
    """
    own, values = flatten(target), flatten(weights)
    if all(path[0] == "module" for path in values) and not any(path[0] == "module" for path in own):
        values = {path[1:]: value for path, value in values.items()}
    if set(own) != set(values):
        raise SchemaError(
            f"update_policy_weights_: missing {sorted(set(own) - set(values))}, "
            f"unexpected {sorted(set(values) - set(own))}"
        )
    for path, own_leaf in own.items():
        value = values[path]
        if value.is_meta and not own_leaf.is_meta:
            raise SchemaError(
                f"update_policy_weights_: {as_key(path)!r} is on the meta device and has no values"
            )
        if own_leaf.shape != value.shape or own_leaf.dtype is not value.dtype:
            raise SchemaError(
                f"update_policy_weights_: {as_key(path)!r} expected shape {tuple(own_leaf.shape)} "
                f"{own_leaf.dtype}, got {tuple(value.shape)} {value.dtype}; nothing is cast or broadcast"
            )
    return [(own_leaf, values[path]) for path, own_leaf in own.items()]


def on_meta(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters, none of them with a value. A policy may not use all parameters."""
    places = {weight.is_meta for weight in module.parameters()}
    return places == {True}


def _moved(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a module to a device, in place.

    Tensors without values, which the module does not use, stay on the meta device.
    """
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        return module._apply(lambda leaf: leaf if leaf.is_meta else leaf.to(device))
    return module.to(device)


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    with_values = (weight for weight in module.parameters() if not weight.is_meta)
    return all(same_device(tensor.device, device) for tensor in chain(with_values, module.buffers()))


def check_loads(
    module: torch.nn.Module, state: Any, strict: bool, arguments: Mapping[str, Any] | None = None
) -> None:
    """Raise `SchemaError` unless `module.load_state_dict(state, strict)` would find all keys in the right shapes.

    This check comes first because torch copies all fitting tensors before it raises an error about the rest.
    Dtypes may differ, and missing or unexpected keys are errors only if `strict`. `InvalidTypeError` is raised for
    `arguments` that the method does not accept.
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


def _fits(own: Any, value: Any) -> bool:
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return True
    return isinstance(value, torch.Tensor) and own.shape == value.shape


def _shape(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


class WeightCopier:
    """Copy a module's weights to and from records, again and again. One thread at a time.

    The checks of `copy_weights` run once for each record. They run again when a tensor of the module is replaced, or
    changes its shape, dtype or device.

    Args:
        module: the module. It may change between calls.
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
        """Copy the module's weights into a record, except weights without values; see `copy_weights`."""
        copy_pairs([(there, here) for here, there in self._pairs(record) if not here.is_meta])

    def read(self, record: TensorDictBase) -> None:
        """Copy a record's values into the module; see `copy_weights`."""
        copy_pairs(self._pairs(record))

    def _pairs(self, record: TensorDictBase) -> Pairs:
        """Return the checked pairs of a record. The record is kept, so that its id stays unique."""
        self._look()
        known = self._records.get(id(record))
        if known is None:
            known = self._records[id(record)] = (
                record,
                matched_weights(record, TensorDict.from_module(self._module)),
            )
        return known[1]

    def _look(self) -> None:
        """Forget all checked records unless the module is known to be unchanged."""
        names, found = self._entries()
        same = len(found) == len(self._found) and all(map(is_, found, self._found)) and names == self._names
        if same and self._tensors and [_form(tensor) for tensor in self._tensors] == self._forms:
            return
        self._records.clear()
        self._modules = list(self._module.modules())
        self._names, self._found = self._entries()
        leaves = list(flatten(TensorDict.from_module(self._module)).values())
        entries = {id(entry) for entry in self._found}
        # A tensor that is no entry of a module could be replaced unnoticed. Then nothing is cached.
        self._tensors = leaves if all(id(leaf) in entries for leaf in leaves) else []
        self._forms = [_form(tensor) for tensor in self._tensors]

    def _entries(self) -> tuple[list[str], list[Any]]:
        """Return the names and values of the modules' tables: tensors and submodules."""
        tables = [
            table
            for module in self._modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        return list(chain.from_iterable(tables)), [entry for table in tables for entry in table.values()]


def _form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device
