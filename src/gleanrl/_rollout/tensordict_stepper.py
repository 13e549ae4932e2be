"""`TensorDictStepper`: steps any environment with the TensorDict protocol into the rows of a block.

The protocol is `reset`, `step`, `maybe_reset`, `step_and_maybe_reset` and the specs; torchrl's environments have it,
too. Environments that can write rows without a TensorDict have their own stepper (`make_stepper`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.devices import on_cpu
from gleanrl._arrays.ragged import Leaf, ObjectColumn, as_entry
from gleanrl._arrays.schema import Field, Schema, new_column
from gleanrl._arrays.tensordicts import (
    Path,
    TensorDictBuilder,
    as_key,
    as_path,
    flatten,
    is_private,
    iter_leaves,
    leaf_at,
    level_of,
    outermost,
    put_leaf,
    shallow_copy,
)
from gleanrl._rollout.env_traits import Env, extra, may_mask
from gleanrl._rollout.policies import AllowedRows
from gleanrl._rollout.protocol import FREELY, EpisodeRules, Lease, StepLimit, Stepper
from gleanrl._rollout.row_writers import batched_row_writer, is_batch_writable
from gleanrl._rollout.step_mdp import following_root, paths_of
from gleanrl._util import is_native
from gleanrl.errors import EnvironmentContractError


class Column:
    """Checks the shape and dtype of values and writes them into the rows of one column.

    Args:
        block: has the column.
        path: path of the column.
        inner: the environment's path of the entry, for messages.
        field: shape and dtype of the rows.
        accepted: the dtype in which values must come.
        casts: whether any floating-point dtype is accepted, too.
        root: the root column whose next row gets the same values; None for none.
    """

    def __init__(
        self,
        block: Block,
        path: Path,
        inner: Path,
        field: Field,
        accepted: torch.dtype | None,
        casts: bool,
        root: Column | None = None,
    ) -> None:
        self.field = field
        self._inner, self._accepted, self._casts = inner, accepted, casts
        self._block, self.path = block, path
        self._shape = torch.Size((*block.batch_size[:-1], *field.row_shape))
        self.arrays = block.row_arrays(path) if accepted is field.dtype else None
        self._root, self._last = root, block.num_steps - 1
        self._root_arrays = None if root is None else root.arrays
        self.root_path = None if root is None else root.path
        batched = self.arrays is not None and is_batch_writable(block, path)
        self.batched: bool = batched and (root is None or root.batched)
        """Whether `BatchedRowWriter` may write values in the declared form instead of this column."""

    def write(self, t: int, value: Any) -> None:
        """Write row `t`, and row ``t + 1`` of the root's column if there is one.

        Raises:
            EnvironmentContractError: if the value isn't as declared.
        """
        if (
            self.arrays is not None
            and isinstance(value, torch.Tensor)
            and value.dtype is self._accepted
            and value.shape == self._shape
            and value.is_cpu
            and not value.requires_grad
        ):
            self.arrays[t] = array = value.numpy()
            if self._root is None or t == self._last:
                return
            if self._root_arrays is not None:
                self._root_arrays[t + 1] = array
                return
        else:
            self._write(self._block.rows(self.path)[t], value)
        if self._root is not None and t < self._last:
            self._root.write(t + 1, value)

    def _write(self, row: torch.Tensor, value: Any) -> None:
        path, accepted = self._inner, self._accepted
        if self.field.is_list:
            row.copy_(_list_row(path, row, value, self.field))
            return
        if not isinstance(value, torch.Tensor) or value.shape != row.shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise EnvironmentContractError(
                f"key {as_key(path)!r} expected shape {tuple(row.shape)} {accepted}, got {got}"
            )
        if value.dtype is not accepted and not (self._casts and value.dtype.is_floating_point):
            raise EnvironmentContractError(
                f"key {as_key(path)!r} expected dtype {accepted}, got {value.dtype}"
            )
        row.copy_(value)


def _list_row(path: Path, row: Leaf, value: Any, field: Field) -> Leaf:
    """Return the value for a row of a list column; raise `EnvironmentContractError` if shape or dtype is wrong."""
    lists = isinstance(value, ObjectColumn)
    if field.dtype is None:
        if lists and value.blank is None and value.shape == row.shape:
            return value
        got = f"shape {tuple(value.shape)}" if lists else type(value).__name__
        raise EnvironmentContractError(
            f"key {as_key(path)!r} expected non-tensor data of shape {tuple(row.shape)}, got {got}"
        )
    if isinstance(value, torch.Tensor) and value.shape[: row.ndim] == row.shape:
        value = ObjectColumn.rows_of(value, row.shape)
    if not isinstance(value, ObjectColumn) or value.shape != row.shape:
        raise EnvironmentContractError(
            f"key {as_key(path)!r} expected tensors {field}, got {getattr(value, 'shape', type(value).__name__)}"
        )
    for item in value.array.flat:
        if not field.fits(item):
            found = Field(item.shape, item.dtype) if isinstance(item, torch.Tensor) else type(item).__name__
            raise EnvironmentContractError(f"key {as_key(path)!r} expected tensors {field}, got {found}")
    return value


def make_stepper(env: Env, rules: EpisodeRules = FREELY, on_host: bool = False) -> Stepper:
    """Return the stepper of `env`: its own if it has one, otherwise a `TensorDictStepper`.

    Args:
        env: the environment.
        rules: see `Stepper`.
        on_host: whether an environment on an accelerator may write its rows on the CPU, if it computes there anyway.
    """
    if on_host and not on_cpu(env.device) and _steps_on_host(env):
        stepper: Stepper | None = extra(env, "host_stepper")(rules)
        if stepper is not None:
            return stepper
    factory = extra(env, "make_stepper")
    return factory(rules) if factory is not None else TensorDictStepper(env, rules)


def _steps_on_host(env: Env) -> bool:
    """Return whether `env` has a `host_stepper`, and no subclass overrides `make_stepper` in its place."""
    owner = next((cls for cls in type(env).__mro__ if "host_stepper" in vars(cls)), None)
    return owner is not None and is_native(env, "make_stepper", of=owner)


class CastWarning(UserWarning):
    """Warns that an environment returns an entry in another dtype than it declares."""


class UndeclaredKeyWarning(UserWarning):
    """Warns that an environment returned a key that none of its specs declares."""


class DirectStep(NamedTuple):
    """The parts of an environment's `step`, if its class doesn't override `step`.

    Attributes:
        make: returns the outcome of a root with actions.
        complete: called with that outcome and the root; adds missing entries, checks the outcome and returns it. It can
            be skipped if rewards and flags have their declared form and no mask leaves environments out.
    """

    make: Callable[[TensorDictBase], TensorDictBase]
    complete: Callable[[TensorDictBase, TensorDictBase], TensorDictBase]


class TensorDictStepper(Stepper):
    """Steps any environment with the public protocol of `EnvBase`; see `Stepper` for the contract.

    The environment gets the tensors that it returned, never views of the block. So its in-place changes can't falsify
    the record.

    Args:
        env: the environment; it is neither copied nor closed here.
        rules: see `Stepper`.
        direct: the parts of its `step`, if neither `step` nor `maybe_reset` is overridden; None calls these methods.
    """

    through_tensordicts = True
    shows_nothing = True  # the environment gets copies

    def __init__(
        self,
        env: Env,
        rules: EpisodeRules = FREELY,
        direct: DirectStep | None = None,
    ) -> None:
        super().__init__(torch.Size(env.batch_size), env.device, rules, Lease(extra(env, "usage")))
        self.env = env
        self._direct_step = direct
        self._carry: TensorDictBase | None = None
        self._block: Block | None = None
        self._primed_before: Collection[Path] = ()
        self._schema: Schema | None = None
        self._limit = StepLimit(self.batch_size, rules.max_steps)
        self._accepted: dict[Path, torch.dtype] = {}
        self._rewards = {as_path(key) for key in env.reward_keys}
        self._states = {as_path(key) for key in env.state_keys}
        self._undeclared: set[Path] = set()  # keys of the first reset without a spec
        self._passed_on = set(self._states)  # keys of outcomes that only the next root needs
        self.may_mask = may_mask(env)
        self._allowed: AllowedRows | None = None  # redraws actions drawn before the block

    # ------------------------------------------------------------------ state
    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset all environments, or only where `mask` is True. Without a carry all are reset.

        The results become the carry, and the lease is taken. An error leaves no carry.

        Raises:
            StepFault: if the environment raised.
        """
        try:
            if mask is None or self._carry is None:
                self._carry = self.env.reset()
                self._limit.restart(None)
            else:
                request = shallow_copy(self._carry)
                for path in self._ends:
                    if (flag := leaf_at(request, path)) is not None:
                        # A copy, because the environment may overwrite it, which an expanded mask forbids.
                        rows = mask.reshape(mask.shape + (1,) * (flag.ndim - mask.ndim)).expand(flag.shape)
                        put_leaf(request, (*path[:-1], "_reset"), rows.to(flag.device, copy=True))
                self._carry = self.env.reset(request)
                if self.rules.max_steps is not None:
                    self._limit.restart(mask.cpu().numpy())
            self.lease.take()
        except Exception as cause:
            self._carry = None
            raise self.fault(0, "reset", cause) from cause

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps that each episode has taken; zero without a step limit."""
        return torch.from_numpy(self._limit.counts.copy())

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Take a shallow copy of `root`, without ``"next"`` and masks, as the carry; also take the lease."""
        self.lease.take()
        self._carry = root.exclude("next", "_reset").copy()
        self._limit.counts[...] = 0 if steps is None else steps.numpy()

    def root(self) -> dict[Path, Leaf]:
        """Return the carry's public leaves, in the dtypes of the schema. Resets first if there is no carry."""
        if self._carry is None:
            self.reset()
        assert self._carry is not None
        wanted, found = self.schema(), {}
        for path, leaf in iter_leaves(self._carry):
            if path not in wanted or path[0] == "next":
                continue
            if wanted[path].is_list:
                found[path] = new_column(self.batch_size, wanted[path]).copy_(leaf)
            else:
                found[path] = leaf.to(wanted[path].dtype)
        return found

    # ----------------------------------------------------------------- schema
    @cached_property
    def _ends(self) -> list[Path]:
        """The done flags of a root."""
        return [path for path in self.schema().paths if path[-1] == "done" and path[0] != "next"]

    def schema(self) -> Schema:
        """Return the root and next columns, with the dtypes that the specs declare. Resets first without a carry.

        The first call warns of undeclared entries (`UndeclaredKeyWarning`) and other dtypes (`CastWarning`).

        Raises:
            StepFault: if that reset failed.
            EnvironmentContractError: if the root lacks a declared entry, or has one in another shape.
        """
        if self._schema is not None:
            return self._schema
        if self._carry is None:
            self.reset()
        assert self._carry is not None
        env, dims = self.env, len(self.batch_size)
        outcome = (env.full_observation_spec, env.full_reward_spec, env.full_done_spec)
        expected = {path: field for spec in outcome for path, field in declared(spec, dims).items()}
        actions = {as_path(key) for key in self.env.action_keys}
        fields: dict[Path, Field] = {}
        for path, leaf in iter_leaves(self._carry):
            # Private entries and former actions are no columns, unless a spec declares them.
            unasked = (is_private(path) or path in actions) and path not in expected
            if unasked or path[0] == "next" or path in self._rewards:
                continue
            found = Field.of(leaf, len(self.batch_size))
            if path not in expected and path not in self._states:
                self._undeclared.add(path)
                fields[("next", *path)] = found
            fields[path] = self._agreed(path, found, expected.get(path))
        missing = [as_key(p) for p in expected if p not in fields and p not in self._rewards]
        if missing:
            raise EnvironmentContractError(
                f"reset of {_name(self.env)} returned no {missing}, which its specs declare; "
                f"got {[as_key(p) for p in fields]}"
            )
        for path, field in expected.items():
            fields[("next", *path)] = fields[path] if path in fields and field.is_list else field
        self._schema = Schema(fields)
        if self._undeclared:
            keys = [as_key(path) for path in self._undeclared]
            self._warn(
                f"reset returned {keys}, which no spec declares; they are recorded in the form of that reset"
            )
        return self._schema

    def _warn(self, problem: str) -> None:
        message = f"{_name(self.env)}: {problem}; declare such keys in observation_spec"
        warnings.warn(message, UndeclaredKeyWarning, stacklevel=4)

    def _agreed(self, path: Path, found: Field, declared: Field | None) -> Field:
        if declared is None:
            return found
        if declared.dtype is None and found.dtype is None:
            return found  # the spec's shape ignores wrappers' batch sizes
        if not declared.allows(found.shape):
            raise EnvironmentContractError(
                f"reset of {_name(self.env)}: key {as_key(path)!r} is declared as {declared}, got {found}"
            )
        if found.dtype is not declared.dtype:
            warnings.warn(
                f"{_name(self.env)}: key {as_key(path)!r} is declared as {declared.dtype} but comes as "
                f"{found.dtype}; it is cast to the declared dtype",
                CastWarning,
                stacklevel=2,
            )
            self._accepted[path] = found.dtype
        return declared

    # ------------------------------------------------------------------- loop
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Write into `block` from now on; copy the carry into its row 0. Resets first if there is no carry.

        Raises:
            StepFault: if that reset failed.
            EnvironmentContractError: if an entry of the carry isn't as declared.
        """
        if self._carry is None:
            self.reset()
        if block is not self._block or primed != self._primed_before:
            self._see(block, primed)
        self._tries_batched = self._all_batched and not cast(Any, self.env).run_type_checks
        assert self._carry is not None
        self._write_root(0, self._carry, self._root)
        self._allowed = None
        if actions_ready and self.may_mask and block.redraw_seed is not None:
            self._allowed = AllowedRows(self.env, block)

    def _see(self, block: Block, primed: Collection[Path]) -> None:
        """Take views of the columns of `block`."""
        # None until all views are taken: after an error, the next `bind` must take them again.
        self._block = None
        schema = self.schema()
        self._root = {
            path: self._column(block, path, schema[path]) for path in schema.paths if path[0] != "next"
        }
        # A foreign `maybe_reset` may change the root in place, so its root is written separately, after the reset.
        twins = {} if self._direct_step is None else self._root
        self._next = [
            (path[1:], path, self._column(block, path, schema[path], twins.get(path[1:])))
            for path in schema.paths
            if path[0] == "next"
        ]
        # The columns that the native core writes come first.
        self._next.sort(key=lambda entry: not entry[2].batched)
        batched = {as_key(path): column for path, _, column in self._next if column.batched}
        self._num_batched = len(batched)
        roots = {key: column.root_path for key, column in batched.items() if column.root_path is not None}
        ends = [as_key(path) for path in self._ends]
        self._batched = batched_row_writer(block, {key: c.path for key, c in batched.items()}, roots, ends)
        self._tells = batched.keys() >= set(ends)  # whether its flags tell all ends
        self._outcome = TensorDictBuilder(path for path, *_ in self._next)
        self._keys = [as_key(path) for path in self._outcome.paths]
        after = {path: column for path, _, column in self._next}
        # Root columns that aren't in the outcome.
        self._root_only = {path: column for path, column in self._root.items() if path not in after}
        actions = paths_of(self.env.action_keys)
        self._excluded = {*(p for p in actions if p not in schema), *self._rewards, ("next",), ("_reset",)}
        inputs = {*actions, *self._states}
        self._acted = [(p, block.rows(p)) for p in inputs if p in block.schema and p not in schema]
        self._acted += [(path, block.rows(path)) for path in primed]
        # Only `step` itself merges an outcome with a "next" that is already there.
        self._direct = None if any(path[0] == "next" for path in primed) else self._direct_step
        # Whether the native core alone can verify that an outcome is complete and in the declared form.
        self._all_batched = (
            self._direct is not None
            and self._num_batched == len(self._next)
            and self._tells
            and all(len(path) == 1 for path in self._outcome.paths)
        )
        self._last, self._has_lists = block.num_steps - 1, bool(schema.lists)
        self._block, self._primed_before = block, primed

    def step(self, t: int) -> None:
        """Step all environments with the actions of row `t`, and reset ended ones if the rules say so.

        An environment with its own `step` or `maybe_reset` always gets a call of `maybe_reset` then. An error drops the
        carry.

        Raises:
            StepFault: if the environment raised or broke its declaration.
        """
        during = "step"
        carry = self._carry
        assert carry is not None
        try:
            if self._allowed is not None:
                self._allowed.prepare(t)
            for path, rows in self._acted:
                put_leaf(carry, path, as_entry(rows[t].clone()))
            stepped, reached, ended = carry, self._limit.step(), None
            if self._direct is None:
                stepped = self.env.step(carry)
                outcome = stepped.get("next")
            else:
                outcome = self._direct.make(carry)
                if reached is None and self._tries_batched and self._in_order(outcome, carry):
                    assert self._batched is not None
                    ended = self._batched.write(t, level_of(outcome), exactly=True)
                if ended is None:
                    outcome = self._direct.complete(outcome, carry)
            root_too = ended is not None
            if ended is None:
                if reached is not None:
                    self._truncate(outcome, reached)
                root_too, ended = self._write_row(t, outcome)
            during = "reset"
            following = root = following_root(stepped, outcome, self._excluded)
            if self.rules.reset_when_done:
                if self._direct_step is None:  # a foreign one is always called
                    ended = True
                elif ended is None:
                    ended = self._any_done(root)
                if ended:
                    root = self._reset_done(root)
            if root is not following or not root_too:
                self._write_root(t + 1, root, self._root)
            elif self._root_only:
                self._write_root(t + 1, root, self._root_only)
        except Exception as cause:
            self._carry = None  # the next rollout begins with a reset
            raise self.fault(t, during, cause) from cause
        self._carry = root
        self.lease.take()

    def _in_order(self, outcome: Any, root: TensorDictBase) -> bool:
        """Return whether an outcome is a plain TensorDict of all environments: the usual, fast case."""
        if type(outcome) is not TensorDict or "_step" in level_of(root):
            return False
        return bool(outcome.batch_size == self.batch_size)

    def _write_row(self, t: int, outcome: TensorDictBase) -> tuple[bool, bool | None]:
        """Write an outcome.

        Returns:
            Whether the root's entries in the outcome have been written to the next row, too. Whether an episode has
            ended, or None if that is unknown.
        """
        leaves = self._outcome.match(outcome)
        if leaves is not None:
            ended = None
            if self._batched is not None:
                ended = self._batched.write(t, dict(zip(self._keys, leaves, strict=True)))
            written = 0 if ended is None else self._num_batched
            for (_, _, column), value in zip(self._next[written:], leaves[written:], strict=True):
                column.write(t, value)
            return self._direct_step is not None, ended if self._tells else None
        found = dict(iter_leaves(outcome))
        for path, full, column in self._next:
            value = found.pop(path, None)
            if value is None and path in self._undeclared and self._carry is not None:
                value = self._carry.get(as_key(path))  # a key of resets only is in the next root
            if value is None:
                raise EnvironmentContractError(f"step returned no {as_key(full)!r}, expected {column.field}")
            column.write(t, value)
        strange = [path for path in found if path not in self._passed_on and not is_private(path)]
        if strange:
            self._passed_on.update(strange)
            keys = [as_key(path) for path in strange]
            self._warn(f"step returned {keys}, which no spec declares; they aren't recorded")
        return False, None

    def _write_root(self, t: int, root: TensorDictBase, columns: dict[Path, Column]) -> None:
        if t > self._last:
            return
        found = flatten(root) if self._has_lists else None
        for path, column in columns.items():
            column.write(t, leaf_at(root, path) if found is None else found.get(path))

    def _column(self, block: Block, path: Path, field: Field, root: Column | None = None) -> Column:
        inner = path[1:] if path[0] == "next" else path
        accepted = self._accepted.get(inner, field.dtype)
        return Column(block, path, inner, field, accepted, inner in self._rewards, root)

    # --------------------------------------------------------------- episodes
    def _truncate(self, outcome: TensorDictBase, reached: np.ndarray[Any, Any]) -> None:
        """Set truncated and done in every group of flags for episodes that have reached the limit."""
        over = torch.from_numpy(reached)
        for key, flag in list(self._done_entries(outcome, ("truncated", "done"))):
            mask = over.reshape(over.shape + (1,) * (flag.ndim - over.ndim)).to(flag.device)
            outcome.set(as_key(key), flag | mask)

    def _reset_done(self, root: TensorDictBase) -> TensorDictBase:
        if self.rules.max_steps is not None:
            flags = dict(self._done_entries(root))
            for group in outermost(path[:-1] for path in flags):
                flag = flags[(*group, "done")]
                ended = flag.reshape(*self.batch_size, -1).any(-1).cpu()
                self._limit.restart(ended.numpy())
        return self.env.maybe_reset(root)

    def _any_done(self, root: TensorDictBase) -> bool:
        flags = [leaf_at(root, path) for path in self._ends]
        return any(flag is None or bool(flag.any()) for flag in flags)

    def _done_entries(
        self, batch: TensorDictBase, names: Iterable[str] = ("done",)
    ) -> list[tuple[Path, torch.Tensor]]:
        return [(path, leaf) for path, leaf in iter_leaves(batch) if path[-1] in names and "next" not in path]


def any_set(flags: Iterable[Any], t: int) -> bool:
    """Return whether a flag of row `t` is set; the arrays have rows first."""
    for rows in flags:  # noqa: SIM110  # a generator costs more than the loop
        if np.count_nonzero(rows[t]):
            return True
    return False


def declared(spec: Any, dims: int) -> dict[Path, Field]:
    """Return the shapes and dtypes that `spec` declares, without the first `dims` batch dimensions of each shape."""
    leaves = {as_path(key): spec[key] for key in spec.keys(True, True)}
    return {
        path: Field(
            torch.Size(leaf.shape[dims:]), leaf.dtype if isinstance(leaf.dtype, torch.dtype) else None
        )
        for path, leaf in leaves.items()
        if leaf is not None
    }


def _name(env: Env) -> str:
    return type(env).__name__
