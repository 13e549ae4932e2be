"""What a policy puts out: read off its keys, or learned by one call of it on the first root."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
    Path,
    TensorDictBuilder,
    as_key,
    as_path,
    flatten,
    group_sizes,
    is_private,
)
from gleanrl._rollout.actors import missing_output
from gleanrl._rollout.env_traits import Env
from gleanrl._rollout.policies import OwnActions, only_draws
from gleanrl._rollout.policy_modules import Values, calls_of
from gleanrl._rollout.protocol import Stepper
from gleanrl._state.rng import torch_kept
from gleanrl.errors import PolicyError


class OutputProbe:
    """One call of the policy on the first root, to learn what it puts out.

    Args:
        stepper: has the root.
        env: the environment.
        device: where the policy wants its input; None for where the root is.
        act_now: whether the call counts: its outputs, `first`, are those of the rollout's first step. If not, a copy
            of the policy is called, and torch's random state stays.
        primed: what the policy may write below ``"next"``.
    """

    def __init__(
        self, stepper: Stepper, env: Env, device: torch.device | None, act_now: bool, primed: frozenset[Path]
    ) -> None:
        self.stepper, self.env, self.device = stepper, env, device
        self.act_now, self.primed = act_now, primed
        self.first: Values | None = None

    def root(self) -> TensorDictBase:
        """Return the first root."""
        leaves = self.stepper.root()
        dims = len(self.stepper.batch_size)
        fields = {path: Field.of(leaf, dims) for path, leaf in leaves.items()}
        lists = [path for path, leaf in leaves.items() if isinstance(leaf, ObjectColumn)]
        layout = TensorDictBuilder(leaves, sizes_of_groups(self.env, dims, fields), lists)
        device = said_of(self.stepper.device, self.env.device)
        return layout.build(list(leaves.values()), self.stepper.batch_size, device)

    def given(self) -> TensorDictBase:
        """Return the first root, where the policy wants it."""
        return self.root() if self.device is None else self.root().to(self.device)

    def run(self, policy: Any, actions: Mapping[Path, Field]) -> dict[Path, Field]:
        """Return the columns that `policy` writes."""
        with self._aside():
            return self._probed(policy if self.act_now else spare(policy), self.given(), actions)

    def run_wrapped(
        self, module: TensorDictModule, actions: Mapping[Path, Field]
    ) -> tuple[TensorDictModule, dict[Path, Field]]:
        """Call what `module` wraps, once.

        Returns:
            The module with out_keys ``output1``, ``output2``, … for the outputs beyond its actions, and its
            columns.
        """
        names, root = module._kwargs, self.given().clone()  # in-place changes must not reach the carry
        inputs = [root.get(key, None) for key in module.in_keys]
        with self._aside():
            call = module.module if self.act_now else spare(module.module)
            out = call(*inputs) if names is None else call(**dict(zip(names, inputs, strict=True)))
        if out is None:
            raise PolicyError(f"policy: expected {list(module.out_keys)}, it returned None")
        extra = (len(out) if isinstance(out, tuple) else 1) - len(module.out_keys)
        out_keys = [*module.out_keys, *(f"output{i + 1}" for i in range(extra))]
        in_keys: Any = module.in_keys if names is None else dict(zip(names, module.in_keys, strict=True))
        replay = TensorDictModule(lambda *args, **kwargs: out, in_keys=in_keys, out_keys=out_keys)
        fields = self._probed(replay, root, actions)
        return TensorDictModule(module.module, in_keys=in_keys, out_keys=out_keys), fields

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.act_now else torch_kept()

    def _probed(self, policy: Any, root: TensorDictBase, actions: Mapping[Path, Field]) -> dict[Path, Field]:
        fields, first = probe(policy, root, actions, self.primed)
        if self.act_now:
            self.first = first
        return fields


def outputs_of(
    wrapped: Any, given: Any, trial: OutputProbe, actions: dict[Path, Field]
) -> tuple[Any, dict[Path, Field]]:
    """Return the policy and the columns that it writes; it's called only if they can't be known otherwise."""
    if only_draws(wrapped) or isinstance(wrapped, OwnActions):
        return wrapped, actions
    promised = promised_by(wrapped)
    if any(path[0] == "next" and path not in trial.primed for path in promised):
        raise PolicyError(
            f"policy: out_keys {list(wrapped.out_keys)} contain 'next': a policy writes actions, and below 'next' only "
            "a state of its own"
        )
    # Only modules that are taken apart are certain to write their out_keys and nothing else.
    if calls_of(wrapped, torch.Size()):
        missing = [as_key(path) for path in actions if path not in promised]
        if missing:
            raise PolicyError(
                f"policy: out_keys {list(wrapped.out_keys)} lack the environment's action keys {missing}"
            )
        if wrapped is not given and isinstance(wrapped, TensorDictModule):
            return trial.run_wrapped(wrapped, actions)
        if set(promised) == set(actions) and not torch.is_grad_enabled() and not is_unmade(wrapped):
            return wrapped, actions
    return wrapped, trial.run(wrapped, actions)


def promised_by(policy: Any) -> list[Path]:
    """Return what a policy says that it writes; nothing of one that doesn't say."""
    try:
        return [as_path(key) for key in policy.out_keys or ()]
    except AttributeError:  # neither the class nor its constructor set them
        return []


def sizes_of_groups(env: Env, dims: int, fields: Mapping[Path, Field]) -> dict[Path, tuple[int, ...]]:
    """Return the dimensions that groups declare beyond the batch's, where all of their columns have them."""
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
    """Call `policy` once on `root`; return the columns that it writes, actions first, and what it wrote.

    Gradients flow if grad mode is on.

    Raises:
        PolicyError: if an action key is missing, or the output contains ``"next"``.
    """
    given = root.clone()
    before = {path: (leaf, leaf.clone()) for path, leaf in flatten(given).items()}
    out = policy(given)
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


def _changed(before: tuple[Leaf, Leaf] | None, leaf: Leaf, copied: bool) -> bool:
    """Return whether the entry is another than before; an equal one counts as the same if it may be `copied`."""
    if before is None:
        return True
    if isinstance(leaf, ObjectColumn):
        return not leaf.equal(before[1])
    return not torch.equal(before[1], leaf) or (before[0] is not leaf and not copied)


def is_unmade(policy: Any) -> bool:
    """Return whether a policy has parameters that its first call makes."""
    return isinstance(policy, torch.nn.Module) and any(is_lazy(part) for part in policy.parameters())


def place_of_policy(policy: Any) -> torch.device | None:
    """Return where the parameters of a policy are; None if it has none, or none with memory."""
    parameters = policy.parameters() if isinstance(policy, torch.nn.Module) else ()
    return next((part.device for part in parameters if part.device.type != "meta"), None)


def spare(policy: Any) -> Any:
    """Return a copy of `policy` to try out; itself if it can't be copied, or if the call makes its parameters."""
    if not isinstance(policy, torch.nn.Module) or is_unmade(policy):
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:  # whatever a user's module raises when copied: then the original is tried
        return policy
