"""Outputs of a policy: taken from its keys, or inferred from one call on the first root."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch.nn.parameter import is_lazy

from gleanrl._arrays.devices import said_of
from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import (
    NestedKey,
    Path,
    TensorDictBuilder,
    as_key,
    as_path,
    flatten,
    group_sizes,
    is_private,
)
from gleanrl._rollout.actors import explain_input, missing_output
from gleanrl._rollout.env_traits import Env
from gleanrl._rollout.policies import OwnActions, only_draws
from gleanrl._rollout.policy_modules import Values, calls_of
from gleanrl._rollout.protocol import Stepper
from gleanrl._state.rng import torch_rng_preserved
from gleanrl.errors import PolicyError


class OutputProbe:
    """One call of the policy on the first root, which shows its outputs.

    Args:
        stepper: provides the root.
        env: the environment.
        device: device of the policy's input; None for the root's device.
        act_now: whether the outputs of this call are used for the rollout's first step (as `first`). If False, a copy
            of the policy is called if possible (see `spare`), and torch's random state is restored.
        primed: paths that the policy may write below ``"next"``.
    """

    def __init__(
        self, stepper: Stepper, env: Env, device: torch.device | None, act_now: bool, primed: frozenset[Path]
    ) -> None:
        self.stepper, self.env, self.device = stepper, env, device
        self.act_now, self.primed = act_now, primed
        self.first: Values | None = None

    def root(self) -> TensorDictBase:
        """Return the first root; a stepper without a carry resets the environment."""
        leaves = self.stepper.root()
        dims = len(self.stepper.batch_size)
        fields = {path: Field.of(leaf, dims) for path, leaf in leaves.items()}
        lists = [path for path, leaf in leaves.items() if isinstance(leaf, ObjectColumn)]
        layout = TensorDictBuilder(leaves, sizes_of_groups(self.env, dims, fields), lists)
        device = said_of(self.stepper.device, self.env.device)
        return layout.build(list(leaves.values()), self.stepper.batch_size, device)

    def policy_input(self) -> TensorDictBase:
        """Return the first root on the device of the policy's input."""
        return self.root() if self.device is None else self.root().to(self.device)

    def run(self, policy: Any, actions: Mapping[Path, Field]) -> dict[Path, Field]:
        """Call `policy` once and return the columns that it writes; with `act_now` also set `first`.

        Raises:
            PolicyError: see `probe`.
        """
        with self._aside():
            return self._probed(policy if self.act_now else spare(policy), self.policy_input(), actions)

    def run_wrapped(
        self, module: TensorDictModule, actions: Mapping[Path, Field]
    ) -> tuple[TensorDictModule, dict[Path, Field]]:
        """Call the function that `module` wraps, once; with `act_now` also set `first`.

        Returns:
            A module with out_keys ``output1``, ``output2``, … for the outputs beyond its actions, and its columns.

        Raises:
            PolicyError: if the function returns None or torch can't compute it; see also `probe`.
        """
        names, root = (
            module._kwargs,
            self.policy_input().clone(),
        )  # an in-place change must not reach the carry
        inputs = [root.get(key, None) for key in module.in_keys]
        with self._aside():
            call = module.module if self.act_now else spare(module.module)
            try:
                out = call(*inputs) if names is None else call(**dict(zip(names, inputs, strict=True)))
            except RuntimeError as cause:
                explain_input(call, _fields_of(root, module.in_keys), cause)
                raise
        if out is None:
            raise PolicyError(f"policy: expected {list(module.out_keys)}, it returned None")
        extra = (len(out) if isinstance(out, tuple) else 1) - len(module.out_keys)
        out_keys = [*module.out_keys, *(f"output{i + 1}" for i in range(extra))]
        in_keys: Any = module.in_keys if names is None else dict(zip(names, module.in_keys, strict=True))
        keys: Any = {"in_keys": in_keys, "out_keys": out_keys, "out_to_in_map": True if names else None}
        replay = TensorDictModule(lambda *args, **kwargs: out, **keys)
        fields = self._probed(replay, root, actions)
        return TensorDictModule(module.module, **keys), fields

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.act_now else torch_rng_preserved()

    def _probed(self, policy: Any, root: TensorDictBase, actions: Mapping[Path, Field]) -> dict[Path, Field]:
        fields, first = probe(policy, root, actions, self.primed)
        if self.act_now:
            self.first = first
        return fields


def outputs_of(
    wrapped: Any, policy: Any, trial: OutputProbe, actions: dict[Path, Field]
) -> tuple[Any, dict[Path, Field]]:
    """Return the policy and the columns that it writes.

    The policy is called if its keys don't determine the columns, in grad mode, or if it has lazy parameters.

    Raises:
        PolicyError: if its keys lack an action, or include one below ``"next"`` that isn't primed; see also `probe`.
    """
    if only_draws(wrapped) or isinstance(wrapped, OwnActions):
        return wrapped, actions
    promised = promised_by(wrapped)
    if any(path[0] == "next" and path not in trial.primed for path in promised):
        raise PolicyError(
            f"policy: out_keys {list(wrapped.out_keys)} contain 'next': a policy writes actions, and below 'next' only "
            "its state; declare that in the environment, for example with TensorDictPrimer"
        )
    # Only modules that are called directly are certain to write all of their out_keys and nothing else.
    if calls_of(wrapped, torch.Size()):
        missing = [as_key(path) for path in actions if path not in promised]
        if missing:
            raise PolicyError(
                f"policy: out_keys {list(wrapped.out_keys)} lack the environment's action keys {missing}"
            )
        if wrapped is not policy and isinstance(wrapped, TensorDictModule):
            return trial.run_wrapped(wrapped, actions)
        if set(promised) == set(actions) and not torch.is_grad_enabled() and not is_unmade(wrapped):
            return wrapped, actions
    return wrapped, trial.run(wrapped, actions)


def promised_by(policy: Any) -> list[Path]:
    """Return the paths of the policy's out_keys; empty if it has none."""
    try:
        return [as_path(key) for key in policy.out_keys or ()]
    except AttributeError:  # neither the class nor its constructor sets them
        return []


def sizes_of_groups(env: Env, dims: int, fields: Mapping[Path, Field]) -> dict[Path, tuple[int, ...]]:
    """Return the batch dimensions of groups beyond the environment's, for groups whose columns all have them."""
    found: dict[Path, tuple[int, ...]] = {}
    for role in ("observation", "action", "reward", "done"):
        sizes = group_sizes(getattr(env, f"full_{role}_spec"), dims)
        found |= sizes | {("next", *group): size for group, size in sizes.items()}
    return {
        group: size
        for group, size in found.items()
        if all(f.shape[: len(size)] == size for path, f in fields.items() if path[: len(group)] == group)
    }


def probe(
    policy: Callable[[TensorDictBase], TensorDictBase],
    root: TensorDictBase,
    actions: Mapping[Path, Field],
    primed: frozenset[Path] = frozenset(),
) -> tuple[dict[Path, Field], Values]:
    """Call `policy` once on a copy of `root`; return the columns that it writes and the leaves of its result.

    The columns of actions come first.
    An entry counts as written if it is new or differs from the root's; see also `_changed`. Private entries are no
    columns. Gradients flow if grad mode is on.

    Raises:
        PolicyError: if the result is no TensorDict, lacks an action key, or contains an entry below ``"next"`` that
            isn't `primed`. Also if torch can't compute the policy (see `explain_input`).
    """
    inputs = root.clone()
    before = {path: (leaf, leaf.clone()) for path, leaf in flatten(inputs).items()}
    try:
        out = policy(inputs)
    except RuntimeError as cause:
        explain_input(policy, _fields_of(root, getattr(policy, "in_keys", None)), cause)
        raise
    if not isinstance(out, TensorDictBase):
        raise missing_output(out, actions)
    if "next" in out.keys() and not primed.issuperset(flatten(out.select("next"))):
        raise PolicyError(
            "policy: its output contains 'next': a policy writes actions, it doesn't step the environment"
        )
    after = flatten(out)
    missing = [as_key(path) for path in actions if path not in after]
    if missing:
        made = [as_key(path) for path in after if path not in before]
        raise PolicyError(
            f"policy: no {missing} among its outputs {made}; the environment needs them as actions"
        )
    dims = len(root.batch_size)
    promised, copies = promised_by(policy), isinstance(out, LazyStackedTensorDict)
    found: dict[Path, Field] = dict(actions)
    for path, leaf in after.items():
        unsaid = bool(promised) and path not in promised
        if (
            path not in actions
            and not is_private(path)
            and _changed(before.get(path), leaf, unsaid or copies)
        ):
            found[path] = Field.of(leaf, dims)
    return found, after


def _fields_of(root: TensorDictBase, keys: Iterable[NestedKey] | None) -> dict[Path, Field]:
    """Return the fields of a root's entries at `keys` and below; of all entries for None."""
    read = None if keys is None else [as_path(key) for key in keys]
    return {
        path: Field.of(leaf, len(root.batch_size))
        for path, leaf in flatten(root).items()
        if read is None or any(path[: len(one)] == one for one in read)
    }


def _changed(before: tuple[Leaf, Leaf] | None, leaf: Leaf, copied: bool) -> bool:
    """Return whether the entry was written: it is new or has another value.

    An equal value in another tensor counts as written, unless the policy may have `copied` its input.
    """
    if before is None:
        return True
    if isinstance(leaf, ObjectColumn):
        return not leaf.equal(before[1])
    return not torch.equal(before[1], leaf) or (before[0] is not leaf and not copied)


def is_unmade(policy: Any) -> bool:
    """Return whether a policy has lazy parameters, which its first call creates."""
    return isinstance(policy, torch.nn.Module) and any(is_lazy(part) for part in policy.parameters())


def device_of_policy(policy: Any) -> torch.device | None:
    """Return the device of a policy's parameters; None if it has none, or only parameters on the meta device."""
    parameters = policy.parameters() if isinstance(policy, torch.nn.Module) else ()
    return next((part.device for part in parameters if part.device.type != "meta"), None)


def spare(policy: Any) -> Any:
    """Return a copy of `policy` for a trial call.

    The policy itself is returned if it can't be copied, or if the call creates its parameters.
    """
    if not isinstance(policy, torch.nn.Module) or is_unmade(policy):
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:  # a user's module may raise any error when it is copied
        return policy
