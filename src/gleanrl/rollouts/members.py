"""Taking policies apart into the modules that they run one after the other.

A sequence is taken apart into its members, whatever they are: those that can't be called on tensors get the TensorDict.
What the sequence itself does beside (another `forward`, hooks, selected outputs) leaves it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictSequential,
    set_interaction_type,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch.nn.modules.module import _has_any_global_hook

from gleanrl.overrides import is_native
from gleanrl.rollouts.compiling import Compiler
from gleanrl.rollouts.modules import (
    CALL,
    HasKeys,
    ModuleCall,
    ProbabilisticCall,
    Values,
    call_of,
    inputs_of,
    is_hooked,
    keys_of,
)
from gleanrl.tree import Path, leaf_at, put_leaf


class Member:
    """One step of a policy: a module that isn't taken apart any further.

    Args:
        module: what runs on a TensorDict.
        call: does the same on tensors; None if that can't be known.
        kind: the interaction type that it runs with; None for the one that is set.
    """

    def __init__(
        self, module: Callable[..., Any], call: ModuleCall | None = None, kind: InteractionType | None = None
    ) -> None:
        self.module, self.call, self.kind = module, call, kind

    def on_values(self) -> Callable[[Values], Any]:
        """Return what reads the inputs from tensors by path and adds the outputs."""
        return self._typed(self._settled())

    def on_batch(self) -> Callable[[Any], Any]:
        """Return what runs on a TensorDict, past its checks where `call` is known, and returns it."""
        return self._typed(self.module if self.call is None else partial(self._run, self._settled()))

    def _settled(self) -> Callable[[Values], Any]:
        """Return the call, with the interaction type that it runs with looked up: that takes as long as a draw."""
        assert self.call is not None
        if isinstance(self.call, ProbabilisticCall):
            return self.call.of_type(self.kind or interaction_type())
        return self.call

    def _run(self, run: Callable[[Values], Any], batch: Any) -> Any:
        call, values = self.call, {}
        assert call is not None
        for path in call.inputs:
            leaf = leaf_at(batch, path)
            if leaf is None:  # text, or nothing yet: the module knows what to make of that
                return self.module(batch)
            values[path] = leaf
        run(values)
        for path in call.outputs:
            put_leaf(batch, path, values[path])
        return batch

    def _typed(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self.kind is None:
            return run

        def run_typed(values: Any) -> Any:
            with set_interaction_type(self.kind):
                return run(values)

        return run_typed


class InTurn:
    """Runs the members of a policy one after the other on a TensorDict.

    Args:
        members: the steps.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._run = [member.on_batch() for member in members]

    def __call__(self, batch: Any) -> Any:
        """Return what the last member returns."""
        for run in self._run:
            batch = run(batch)
        return batch


def members_of(policy: Any, batch_size: torch.Size, compiler: Compiler | None = None) -> list[Member]:
    """Return the steps that do together what `policy` does on a row, in this context: the policy itself at the least.

    Args:
        policy: what a rollout calls on a TensorDict.
        batch_size: the batch size of a row.
        compiler: see `PlainCall`.
    """
    if skip_existing() or _has_any_global_hook():
        return [Member(policy)]
    return _members(policy, batch_size, compiler)


def reads_of(members: Sequence[Member]) -> list[Path] | None:
    """Return the paths that members find in a row, not in what one before them wrote; None if that can't be known."""
    keys: list[HasKeys | None] = [member.call or keys_of(member.module) for member in members]
    return None if None in keys else inputs_of([one for one in keys if one is not None])


def calls_of(
    policy: Any, batch_size: torch.Size, compiler: Compiler | None = None
) -> list[ModuleCall] | None:
    """Return the calls that do what `policy` does, or None if some member of it needs a TensorDict."""
    found = [member.call for member in members_of(policy, batch_size, compiler)]
    return [call for call in found if call is not None] if None not in found else None


def _members(policy: Any, batch_size: torch.Size, compiler: Compiler | None) -> list[Member]:
    call = call_of(policy, batch_size, compiler)
    if call is None and not is_hooked(policy):
        return _of_sequence(policy, batch_size, compiler)
    return [Member(policy, call)]


def _of_sequence(policy: Any, batch_size: torch.Size, compiler: Compiler | None) -> list[Member]:
    own = (*CALL, "_run_module", "_module_iter")
    draws = is_native(policy, *own, "get_dist_params", of=ProbabilisticTensorDictSequential)
    if (
        not (draws or is_native(policy, *own, of=TensorDictSequential))
        or policy.inplace not in (None, True)  # both write into the input
        or policy.partial_tolerant
        or policy._select_before_return
        or (draws and (policy.return_composite or not policy._requires_sample))
    ):
        return [Member(policy)]
    modules = list(policy._module_iter())
    found = [_members(module, batch_size, compiler) for module in modules]
    if draws and interaction_type() is None:  # all but the last run with the last type that a member names
        kinds = [m.default_interaction_type for m in modules if hasattr(m, "default_interaction_type")]
        found[:-1] = [[Member(m.module, m.call, kinds[-1]) for m in members] for members in found[:-1]]
    if draws and isinstance(modules[-1], ProbabilisticTensorDictModule) and found[-1][0].call is None:
        found[-1] = [Member(partial(modules[-1], _requires_sample=True))]
    return [member for members in found for member in members]
