"""How a policy acts on a block row.

An actor reads the root columns of row t and writes its own columns, the action's and whatever else the
policy puts out. The choice among the three is made once, when the rollout is planned (`make_actor`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.block import Block, Field, Schema, numpy_twin, numpy_view
from gleanrl.errors import PolicyError
from gleanrl.rollouts.modules import Stage, Values, stages
from gleanrl.rollouts.policies import RandomPolicy
from gleanrl.tree import Layout, Path, as_key, flatten, is_private


class RandomActor:
    """Draws the actions of all T steps in one call.

    Args:
        policy: what to draw from.
        fields: the actor's columns; those that the policy doesn't draw (another policy's extras) are zero.
    """

    def __init__(self, policy: RandomPolicy, fields: Mapping[Path, Field]) -> None:
        self._policy = policy
        self._fields = fields

    def bind(self, block: Block) -> bool:
        """Write all T actions into `block`."""
        drawn = self._policy.draw((block.num_steps,))
        for path in self._fields:
            column = block.column(path)
            action = drawn.pop(path, None)
            if action is None:
                column.zero_()
                continue
            rows = column.movedim(block.time_dim, 0)
            _check(path, action, rows.shape, column.dtype)
            rows.copy_(action)
        if drawn:
            raise PolicyError(f"policy: {[as_key(p) for p in drawn]} aren't action keys of the environment")
        return True

    def act(self, t: int) -> None:
        """Do nothing: the action of row t was written by `bind`."""


class ModuleActor:
    """Calls the modules inside a TensorDict module on tensor views of the row; no TensorDict is built.

    Args:
        chain: the stages of the policy.
        fields: the actor's columns.
        policy_device: where the modules want their inputs; None for where the block lives.
    """

    def __init__(
        self, chain: list[Stage], fields: Mapping[Path, Field], policy_device: torch.device | None
    ) -> None:
        self._stages = chain
        self._fields = fields
        self._device = policy_device
        made: set[Path] = set()
        self._inputs: list[Path] = []
        for stage in chain:
            self._inputs += [p for p in stage.inputs if p not in made and p not in self._inputs]
            made.update(stage.outputs)

    def bind(self, block: Block) -> bool:
        """Read from and write into `block` from now on."""
        unknown = [as_key(path) for path in self._inputs if path not in block.schema]
        if unknown:
            offered = [as_key(p) for p in block.schema.paths if p[0] not in ("next", "collector")]
            raise PolicyError(
                f"policy: in_keys {unknown} aren't offered by the environment, which has {offered}"
            )
        self._rows = [(path, block.rows(path)) for path in self._inputs]
        self.write = _RowWriter(block, self._fields).write
        return False

    def act(self, t: int) -> None:
        """Run the stages on row t."""
        device = self._device
        if device is None:
            values: Values = {path: rows[t] for path, rows in self._rows}
        else:
            values = {path: rows[t].to(device) for path, rows in self._rows}
        for stage in self._stages:
            stage(values)
        self.write(t, values)


class TensorDictActor:
    """Hands any TensorDict policy a fresh TensorDict over the row's root tensors.

    Args:
        policy: a callable of one TensorDict that returns it, or another one, with the actions set.
        fields: the actor's columns.
        roots: the root paths that the policy sees.
        device: what the TensorDict says of its device.
        policy_device: where the policy wants its input; None for where the block lives.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        fields: Mapping[Path, Field],
        roots: list[Path],
        device: torch.device | None,
        policy_device: torch.device | None,
    ) -> None:
        self._policy = policy
        self._fields = fields
        self._layout = Layout(roots)
        self._device = device
        self._policy_device = policy_device
        self._num_keys = -1

    def bind(self, block: Block) -> bool:
        """Read from and write into `block` from now on."""
        self._rows = [block.rows(path) for path in self._layout.paths]
        self._batch_size = torch.Size(block.batch_size[:-1])
        self._keys = [(path, as_key(path)) for path in self._fields]
        self.write = _RowWriter(block, self._fields).write
        return False

    def act(self, t: int) -> None:
        """Call the policy on row t."""
        root: TensorDictBase = self._layout.build(
            [rows[t] for rows in self._rows], self._batch_size, self._device
        )
        if self._policy_device is not None:
            root = root.to(self._policy_device)
        out = self._policy(root)
        try:
            if len(out.keys()) != self._num_keys:
                self._check_keys(out)
            values: Values = {path: out.get(key) for path, key in self._keys}
        except (AttributeError, KeyError) as cause:
            raise _missing_output(out, self._fields) from cause
        self.write(t, values)

    def _check_keys(self, out: TensorDictBase) -> None:
        """Raise if `out` holds what no column was made for; else remember that so many keys are fine."""
        known = {*self._fields, *self._layout.paths}
        unknown = [as_key(path) for path in flatten(out) if path not in known and not is_private(path)]
        if unknown:
            raise PolicyError(
                f"policy: it put out {unknown}, which it didn't when it was first called; "
                "the columns of a batch are fixed then"
            )
        self._num_keys = len(out.keys())


class _RowWriter:
    """Writes a policy's outputs into the columns of a row, after checking shape and dtype."""

    def __init__(self, block: Block, fields: Mapping[Path, Field]) -> None:
        batch = block.batch_size[:-1]
        on_cpu = not block.columns or block.columns[0].device.type == "cpu"
        self._targets: list[tuple[Path, torch.Size, torch.dtype, np.ndarray[Any, Any] | None, Any]] = []
        for path, field in fields.items():
            shape = torch.Size((*batch, *field.shape))
            column = block.column(path).movedim(block.time_dim, 0)  # (T, *batch, *leaf)
            array = numpy_view(column) if on_cpu and numpy_twin(field.dtype) is field.dtype else None
            self._targets.append((path, shape, field.dtype, array, column))

    def write(self, t: int, values: Values) -> None:
        """Write `values` into row t.

        Raises:
            PolicyError: on a missing output, or one of another shape or dtype.
        """
        for path, shape, dtype, array, column in self._targets:
            value = values.get(path)
            if not isinstance(value, torch.Tensor):
                came = "nothing" if value is None else type(value).__name__
                raise PolicyError(f"policy: expected a tensor under {as_key(path)!r}, got {came}")
            if value.shape != shape or value.dtype is not dtype:
                _check(path, value, shape, dtype)
            if array is not None and value.device.type == "cpu":
                array[t] = value.detach().numpy() if value.requires_grad else value.numpy()
            else:
                column[t].copy_(value)


def _check(path: Path, value: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if value.shape != shape or value.dtype is not dtype:
        raise PolicyError(
            f"policy: {as_key(path)!r} expected shape {tuple(shape)} {dtype}, got {tuple(value.shape)} "
            f"{value.dtype}; nothing is cast or broadcast: make the policy's output match the action spec"
        )


def _missing_output(out: Any, fields: Mapping[Path, Field]) -> PolicyError:
    expected = [as_key(path) for path in fields]
    if not isinstance(out, TensorDictBase):
        return PolicyError(f"policy: expected a TensorDict with {expected}, got {type(out).__name__}")
    return PolicyError(f"policy: expected the keys {expected}, got {sorted(map(str, out.keys(True, True)))}")


class PrimedActor:
    """An actor whose policy was already called on the first row; that call's output is written there.

    Args:
        actor: acts from the second row on.
        first: the output for the first row.
    """

    def __init__(self, actor: ModuleActor | TensorDictActor, first: Values) -> None:
        self._actor = actor
        self._first: Values | None = first

    def bind(self, block: Block) -> bool:
        """Write into `block` from now on."""
        return self._actor.bind(block)

    def act(self, t: int) -> None:
        """Write the output that is there already, once; then act."""
        if self._first is None:
            self._actor.act(t)
        else:
            first, self._first = self._first, None
            self._actor.write(t, first)


def probe(
    policy: Callable[[TensorDictBase], TensorDictBase], root: TensorDictBase, actions: Mapping[Path, Field]
) -> tuple[dict[Path, Field], Values]:
    """Call `policy` once on `root`; return the columns that it writes, actions first, and what it wrote.

    Raises:
        PolicyError: if an action key is missing, or the output contains ``"next"``.
    """
    given = root.clone()
    before = {path: (leaf, leaf.clone()) for path, leaf in flatten(given).items()}
    with torch.no_grad():
        out = policy(given)
    if not isinstance(out, TensorDictBase):
        raise _missing_output(out, actions)
    if "next" in out.keys():
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
    found: dict[Path, Field] = dict(actions)
    for path, leaf in after.items():
        if path not in actions and not is_private(path) and _changed(before.get(path), leaf):
            found[path] = Field(leaf.shape[dims:], leaf.dtype)
    return found, after


def _changed(before: tuple[torch.Tensor, torch.Tensor] | None, leaf: torch.Tensor) -> bool:
    return before is None or before[0] is not leaf or not torch.equal(before[1], leaf)


def spare(policy: Any) -> Any:
    """Return a copy of `policy` to try out; itself if it can't be copied."""
    if not isinstance(policy, torch.nn.Module):
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:  # whatever a user's module raises when copied: then the original is tried
        return policy


def make_actor(
    policy: Any,
    fields: Mapping[Path, Field],
    schema: Schema,
    batch_size: torch.Size,
    device: torch.device | None,
    policy_device: torch.device | None,
) -> RandomActor | ModuleActor | TensorDictActor:
    """Return the fastest actor that does what `policy` does.

    Args:
        policy: the result of `wrap_policy`.
        fields: the columns that the policy writes.
        schema: the environment's columns.
        batch_size: the environments' batch dimensions.
        device: the device of the environment's TensorDicts.
        policy_device: where the policy runs if that isn't where the block lives; None otherwise.
    """
    if isinstance(policy, RandomPolicy):
        return RandomActor(policy, fields)
    chain = stages(policy, batch_size)
    if chain is not None:
        return ModuleActor(chain, fields, policy_device)
    roots = [path for path in schema.paths if path[0] != "next"]
    return TensorDictActor(policy, fields, roots, device, policy_device)
