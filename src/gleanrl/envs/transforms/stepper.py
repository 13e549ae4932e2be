"""`TransformedStepper`: steps a transformed environment into the rows of a block.

The base environment's stepper fills an inner block. The transforms run on tensors of its rows. Their results are copied
into the outer block, which the user gets::

    action, row t ──inverse transforms──> inner action, row t ──base.step(t)──> inner next, row t
                                                                                       │ transforms' _step
    outer root, row t + 1 <── copy, or transformed reset ─────────────────────────────── outer next, row t

- Both blocks share each column that no transform writes; see `InnerBlocks`.
- If a transform ends an episode that the base environment didn't end, the base stepper resets that environment.
- State from step to step is stored in the root's columns (step counts, sums of rewards), or in a transform.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.devices import columns_device, said_of
from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.schema import Field, Schema
from gleanrl._arrays.tensordicts import FLAGS, NestedKey, Path, as_key, as_path, flatten, outermost, record_of
from gleanrl._rollout.env_traits import EnvTraits, may_mask
from gleanrl._rollout.errors import StepFault
from gleanrl._rollout.plan import action_fields
from gleanrl._rollout.policies import AllowedRows
from gleanrl._rollout.protocol import EpisodeRules, Stepper
from gleanrl._rollout.row_writers import batched_row_writer
from gleanrl._rollout.tensordict_stepper import declared, make_stepper
from gleanrl._util import is_ours
from gleanrl.data.trajectories import MASK
from gleanrl.envs.outcomes import any_of, chosen, due_resets, ended_since, is_partial, keep_flags
from gleanrl.envs.transforms.compose import flattened
from gleanrl.envs.transforms.counting import Counting, Values
from gleanrl.envs.transforms.row_columns import (
    DoneFlags,
    OpenedColumns,
    Outputs,
    SpareRow,
    copy_action,
    require_declared,
)
from gleanrl.envs.transforms.row_skipping import Destinations, RowSkippingPlan, row_skipping_plan, run_steps
from gleanrl.envs.transforms.row_view import Leaves, Row, TransformColumns, on_copies, trailing
from gleanrl.errors import UnsupportedError


class InnerBlocks:
    """Makes the base stepper's inner block for each outer block.

    - A column that no transform writes is shared: the base stepper writes it in place.
    - A column that transforms write, or that the user doesn't get, is a single row of memory in the inner block, viewed
      as T rows. Its values are read within the step only.
    - Flags have all T rows, because a stepper may clear them once for a block and set them only where an episode ends.
      Outcomes that are summed later have all T rows too.

    Args:
        env: the `TransformedEnv`.
        base: the stepper of its base environment.
        changed: the paths that transforms write, without ``"next"``.
        inverts: whether transforms may change actions.
        summed: the paths of outcomes that are summed, without ``"next"``.

    Attributes:
        actions: the paths of the base environment's actions.
        required: the keys in `changed` that have a column below ``"next"`` in the outer block.
    """

    def __init__(self, env: Any, base: Stepper, changed: set[Path], inverts: bool, summed: set[Path]) -> None:
        self._env, self._base, self._changed, self._inverts = env, base, changed, inverts
        self._summed = {("next", *path) for path in summed}
        self._size, self._device = torch.Size(env.batch_size), base.device
        self._spare = SpareRow()
        self._schema: Schema | None = None
        self._outer: Schema | None = None
        self._places: list[tuple[Path, Field, bool]] = []
        self.actions: tuple[Path, ...] = ()
        self.required: list[NestedKey] = []

    def within(self, outer: Block) -> Block:
        """Return the inner block that the base stepper writes while `outer` is filled.

        For a new schema this also sets `actions` and `required`.
        """
        if outer.schema is not self._outer:
            self._lay_out(outer.schema)
        assert self._schema is not None
        columns = [
            outer.column(path) if shared else self._own_column(outer, path, field)
            for path, field, shared in self._places
        ]
        return Block(self._schema, self._size, outer.num_steps, columns=columns)

    def _lay_out(self, outer: Schema) -> None:
        """Compute the parts that all blocks of a schema have in common: actions, shared columns, required keys."""
        actions = action_fields(self._env.base_env, len(self._size))
        # All inner blocks have the same schema object, because steppers compare schemas by identity.
        if self._schema is None:
            self._schema = Schema({**self._base.schema().items(), **actions})
        self.actions, self._places = tuple(actions), []
        for path, field in self._schema.items().items():
            inner = path[1:] if path[0] == "next" else path
            changed = self._inverts if path in actions else inner in self._changed
            shared = not changed and path in outer and outer[path] == field
            self._places.append((path, field, shared))
        self.required = [as_key(path) for path in self._changed if ("next", *path) in outer]
        self._outer = outer

    def _own_column(self, outer: Block, path: Path, field: Field) -> torch.Tensor:
        """Return a column of the inner block that isn't shared: all T rows for flags and summands, else one row."""
        if path[-1] in FLAGS or path in self._summed:
            shape = (*self._size, outer.num_steps, *field.shape)
            return torch.zeros(shape, dtype=field.dtype, device=self._device)
        return self._spare.column(path, field, self._size, outer.num_steps, self._device)


class RootRows:
    """Writes roots of the base environment into the inner block.

    Args:
        block: the inner block.
        schema: the columns that the base stepper writes.
    """

    def __init__(self, block: Block, schema: Schema) -> None:
        self._block = block
        # A mask of steps is no part of a root.
        paths = [path for path in schema.paths if path[0] != "next" and path != MASK]
        self._batched = batched_row_writer(block, {path: path for path in paths})

    def write(self, t: int, root: Mapping[Path, Leaf]) -> None:
        """Write `root` into row `t`."""
        if self._batched is None or self._batched.write(t, root) is None:
            for path, value in root.items():
                self._block.column(path).select(self._block.time_dim, t).copy_(value)


class TransformedStepper(Stepper):
    """Steps an environment whose transforms accept a `Row`; see `Stepper` for the contract.

    Its carry is the base stepper's carry, and the transforms' values of the next root.

    Args:
        env: the `TransformedEnv`.
        rules: see `Stepper`.
        base: the stepper of the base environment; None for the environment's own.

    Raises:
        UnsupportedError: if there is a limit of steps, and the base environment resets itself in steps that are no
            frames.
    """

    def __init__(self, env: Any, rules: EpisodeRules, base: Stepper | None = None) -> None:
        if rules.max_steps is not None and env.traits.masks_frames:
            raise UnsupportedError(
                f"max_frames_per_traj: expected an environment that can be reset after any step, got {env.base_env}, "
                "which resets itself in the step after an end; build it from single environments with "
                "AutoresetMode.DISABLED"
            )
        self._env = env
        self._base = base = make_stepper(env.base_env, rules) if base is None else base
        super().__init__(torch.Size(env.batch_size), base.device, rules, base.lease)
        self.through_tensordicts = self._base.through_tensordicts
        self._transform, chain = env.transform, flattened(env.transform)
        self._chain = [transform for transform in chain if not transform.idles()]
        self._steps = [_stepping(transform) for transform in self._chain]
        self._inverts, self._invert = self._transform.inverts(), self._transform.inverting()
        self._restart = self._transform._reset
        if any(transform.shows_values for transform in chain):
            self._invert, self._restart = on_copies(self._invert), on_copies(self._restart)
        self._all_ours = all(is_ours(type(t)) for t in chain)
        self.shows_nothing = base.shows_nothing
        # The base stepper redraws actions that its environment's masks forbid. Actions that transforms change, or masks
        # that a user's transform sets, need a redraw here.
        masks_here = (self._inverts and base.may_mask) or (not self._all_ours and may_mask(env))
        self.may_mask, self._masks_here = base.may_mask or masks_here, masks_here
        self._allowed: AllowedRows | None = None  # redraws forbidden actions of the block
        dims = len(self.batch_size)
        self._groups = [as_path(key)[:-1] for key in env.reset_keys]
        self._ruling = outermost(self._groups)
        self._done_keys = frozenset(as_key((*group, "done")) for group in self._ruling)
        self._observed = {**declared(env.full_observation_spec, dims), **declared(env.full_done_spec, dims)}
        self._rewards = declared(env.full_reward_spec, dims)
        self._changed = {
            as_path(key) for key in self._transform.written_keys() if as_path(key)[-1] not in FLAGS
        }
        own = declared(env.base_env.full_observation_spec, dims)
        own |= declared(env.base_env.full_done_spec, dims)
        # The root entries that the base stepper doesn't write into the outer block.
        self._root_keys = [
            as_key(p) for p in self._observed if p in self._changed or own.get(p) != self._observed[p]
        ]
        summed = {as_path(k) for one in self._chain if isinstance(one, Counting) for k, _ in one.summands()}
        self._inner_blocks = InnerBlocks(env, base, self._changed, self._inverts, summed)
        # The paths below "next" that a policy may write and that the base environment reads.
        self._primed = EnvTraits.of(env.base_env).primed_paths
        self._carry: Values | None = None
        self._latest: Values | None = None  # values of the last step in a block, newer than the carry
        self._schema: Schema | None = None
        self._block: Block | None = None  # the outer block
        self._primed_before: Collection[Path] = ()  # paths of the last binding; other ones need new targets
        self._skipping: RowSkippingPlan | None = None  # set by `defer` while skippable rows are skipped
        self._num_stepped = 0  # complete rows of the block; `settle` writes results only up to here
        self._masked = False  # whether rows may be resets of the base environment, which are no frames
        self._root, self._outcome, self._reset_root, self._request, self._input = (
            Row(self.batch_size, said_of(base.device, env.device)) for _ in range(5)
        )

    # ----------------------------------------------------------------- state
    @property
    def disturbed(self) -> bool:
        """Whether other code has stepped or reset the environment since this stepper used it."""
        return self._base.disturbed

    @property
    def steps(self) -> torch.Tensor:
        """The number of steps that each episode has taken, int64 ``[*batch]``."""
        return self._base.steps

    def reset(self, mask: torch.Tensor | None = None) -> None:
        """Reset all environments, or only where `mask` is True. Without a carry all are reset.

        The transformed results become the carry. An error leaves no carry.

        Raises:
            StepFault: if the environment or a transform raised.
        """
        self._catch_up()
        before, self._carry = self._carry, None
        if before is None or (mask is not None and bool(mask.all())):
            mask = None
        self._base.reset(mask)
        root, before = self._base.root(), before or {}
        masks = None if mask is None else self._group_masks(mask, root)
        try:
            values = self._restarted(Leaves(root), masks, before)
            if masks is not None:
                keep_flags(values, before, self._reset_root, masks, self.batch_size)
            self._carry = values
        except Exception as cause:
            raise self.fault(0, "reset", cause) from cause

    def root(self) -> dict[Path, torch.Tensor]:
        """Return the root's leaves, from the carry or else from the base stepper. Resets first if there is no carry."""
        self._catch_up()
        if self._carry is None:
            self.reset()
        assert self._carry is not None
        base = self._base.root()
        wanted = [path for path in self.schema().paths if path[0] != "next" and path != MASK]
        return {
            path: self._carry[as_key(path)] if as_key(path) in self._carry else base[path] for path in wanted
        }

    def _catch_up(self) -> None:
        """Write skipped rows, and make the latest step's values the carry; a reset may come in mid-block."""
        self._write_skipped()
        latest, self._latest = self._latest, None
        if latest is not None:
            self._carry = {key: v.clone() for key, v in latest.items() if as_path(key) in self._observed}

    def load(self, root: TensorDictBase, steps: torch.Tensor | None = None) -> None:
        """Set `root` as the carry, and move the transforms' carried values to the stepper's device.

        Its values before the transforms aren't known. The base stepper gets zeros in place of transformed entries; the
        next step doesn't read them.
        """
        base, found = self._env.base_env, flatten(root)
        zeros = [flatten(spec.zero()) for spec in (base.full_observation_spec, base.full_done_spec)]
        inner = {path: leaf for leaves in zeros for path, leaf in leaves.items()}
        inner |= {path: found[path] for path in inner if path in found and path not in self._changed}
        self._base.load(record_of(inner, self.batch_size), steps)
        self._latest = None
        here = columns_device(self.device)  # may differ from the environment's device; see `host_stepper`
        self._carry = {key: root.get(key).to(here, copy=True) for key in self._root_keys}
        for transform in self._chain:
            transform.carried = {key: value.to(here) for key, value in transform.carried.items()}

    def schema(self) -> Schema:
        """Return the root and ``"next"`` columns, as the transformed specs declare them. Resets first without a carry.

        Raises:
            StepFault: if that reset failed.
            EnvironmentContractError: if the root isn't as declared.
        """
        if self._schema is None:
            if self._carry is None:
                self.reset()
            assert self._carry is not None
            base = self._base.schema()
            self._observed |= {path: base[path] for path in base.lists}
            require_declared(self._observed, self._carry, base, len(self.batch_size))
            fields = dict(self._observed)
            for path, field in {**self._observed, **self._rewards}.items():
                fields[("next", *path)] = field
            self._masked = MASK in base
            if self._masked:
                fields[MASK] = base[MASK]
            self._schema = Schema(fields)
        return self._schema

    # ----------------------------------------------------------------- block
    def bind(self, block: Block, actions_ready: bool, primed: Collection[Path] = ()) -> None:
        """Write into `block` from now on, and copy the carry into its row 0. Resets first if there is no carry."""
        self.schema()
        if self._carry is None:
            self.reset()
        assert self._carry is not None
        if block is not self._block or primed != self._primed_before:
            self._see(block, primed)
        self._skipping, self._num_stepped = None, 0
        self._root.clear(0)
        self._inner.redraw_seed = block.redraw_seed
        self._base.bind(self._inner, actions_ready and not self._inverts, self._passed)
        self._outputs.write_root(0, self._carry)
        self._allowed = None
        if actions_ready and self._masks_here and block.redraw_seed is not None:
            self._allowed = AllowedRows(self._env, block)

    def _see(self, block: Block, primed: Collection[Path]) -> None:
        """Make the inner block and the views of columns for an outer block.

        The views are kept while the same block is bound again. `_block` is set last, so that an interrupt can't leave
        a block with views of another one.
        """
        self._block = None
        self._last = block.num_steps - 1
        self._inner = inner = self._inner_blocks.within(block)
        self._passed = [path for path in primed if self._passes(path) and path in inner.schema]
        self._handed = [
            (inner.rows(path), block.rows(path))
            for path in self._passed
            if inner.column(path) is not block.column(path)
        ]
        self._required = self._inner_blocks.required
        self._outer_root = OpenedColumns(block, False, list(primed))
        # The root of a reset has no actions yet.
        self._inner_root = OpenedColumns(inner, False, without=self._inner_blocks.actions)
        self._inner_next = OpenedColumns(inner, True)
        self._root.over(self._outer_root)
        self._input.over(self._outer_root)
        self._outcome.over(self._inner_next)
        actions = self._inner_blocks.actions if self._inverts else ()
        self._entering = [(as_key(path), inner.rows(path)) for path in actions]
        self._done = DoneFlags(block, self._ruling)
        self._inner_done = DoneFlags(inner, [g for g in self._ruling if ("next", *g, "done") in inner.schema])
        self._inner_roots = RootRows(inner, self._base.schema())
        self._frames = block.rows(MASK) if self._masked else ()
        self._outputs = Outputs(block, self._root_keys, {*self._observed, *self._rewards})
        self._rows = Destinations(inner, block, self._required, self._outputs.by_key)
        self._block, self._primed_before = block, primed

    def _passes(self, path: Path) -> bool:
        """Return whether the base environment reads the values that a policy writes at `path`."""
        if path[0] == "next":
            return path in self._primed
        return path not in self._changed or ("next", *path) in self._primed

    def stop(self, num_steps: int) -> None:
        """End the block before it is full; row `num_steps` becomes the carry."""
        self._base.stop(num_steps)
        self._latest = None
        found = ((key, self._outer_root.row(key, num_steps)) for key in self._root_keys)
        self._carry = {key: value.clone() for key, value in found if value is not None}

    def confirm(self, num_steps: int) -> None:
        """Let the base stepper confirm its steps; see `Stepper.confirm`."""
        self._base.confirm(num_steps)

    # ------------------------------------------------------------------ loop
    def step(self, t: int) -> None:
        """Step with the action of row `t`, run the transforms, and reset where an episode ends.

        The fast path is a skippable row whose transforms the core runs: then no hook is called. Otherwise the order is:

        1. Redraw a forbidden action, run the inverse transforms, and step the base environment.
        2. Run the hooks, and write the results as outcome of row `t` and as root of the next row.
        3. If an episode ended, reset, run the hooks for the reset, and write the next root again.
        4. Let skipped counters continue from the next row.

        An error drops the carry, because environment and transforms may be at different steps.

        Raises:
            StepFault: if the environment or a transform raised.
        """
        during = "step"
        self._latest = None
        try:
            if self._allowed is not None:
                self._allowed.prepare(t)
            if self._inverts:
                self._enter(t)
            for rows, source in self._handed:
                rows[t].copy_(source[t])
            self._base.step(t)
            skipping = self._skipping
            if (
                skipping is not None
                and skipping.mapped is not None
                and skipping.is_skippable(t, self._done)
                and skipping.mapped.run(t)
            ):
                self._latest, self._num_stepped = skipping.counters.root, t + 1
                return
            made, skipped = self._transformed(t)
            self._outcome.seldom = True  # further reads are for flags and ends of episodes only
            if self._masked:
                self._leave_resets(t, made)
            extra = None if self._done_keys.isdisjoint(made) else self._ended_here(t, made)
            self._outputs.write(t, made)
            if (
                skipped is None
                and (self._masked or self._done.any(t))
                and (due := self._due(t, extra)) is not None
            ):
                during = "reset"
                made = self._reset_after(t, made, extra, due)
                if t < self._last:
                    self._outputs.write_root(t + 1, made)
            if skipped is not None:
                made = {**skipped, **made}
            elif skipping is not None and t < self._last:
                skipping.counters.begin(t + 1, made)
            if skipping is not None:
                self._root.made = made
            self._latest, self._num_stepped = made, t + 1
            if t == self._last:
                self._catch_up()
        except StepFault as fault:
            self._carry = None
            # The fault is of a reset that follows a transform's end of an episode. All environments made the step.
            if during == "reset":
                raise StepFault(t, fault.env, during, fault.cause) from fault.cause
            raise
        except Exception as cause:
            self._carry = None
            raise self.fault(t, during, cause) from cause

    def _transformed(self, t: int) -> tuple[Values, Values | None]:
        """Run the transforms on the outcome of row `t`.

        Returns:
            The results by key. In a skippable row also the values of the skipped counters before the skipped rows; None
            in other rows.
        """
        root, outcome, skipping = self._root, self._outcome, self._skipping
        root.t, root.seldom, skipped, required = t, False, None, self._required
        made = outcome.clear(t)
        run_steps(self._steps if skipping is None else skipping.in_every_row, root, outcome)
        if skipping is not None:
            if (
                skipping.mapped is None
                and skipping.is_skippable(t, self._done)
                and self._done_keys.isdisjoint(made)
            ):
                skipped, required = skipping.counters.root, skipping.required
            else:
                root.seldom = outcome.seldom = True
                root.made |= skipping.counters.catch_up(t)
                run_steps(skipping.in_other_rows, root, outcome)
        for key in required:
            if key not in made:
                # A copy: the inner column may be one row of memory, which the next step overwrites.
                made[key] = outcome.get(key).clone()
        return made, skipped

    def run(self, block: Block) -> None:
        """Take all steps of the block; no caller reads its rows before the end.

        After an error `Block.num_complete` is the number of complete steps. After success the caller sets it.
        """
        self.defer(())
        try:
            for t in range(block.num_steps):
                block.num_complete = t
                self.step(t)
        finally:
            self.settle()

    def defer(self, seen: Collection[Path] | None) -> None:
        """Skip transforms in skippable rows until `settle`, as `row_skipping_plan` says.

        Nothing is skipped if a transform is a user's, because it may read or change any entry. Nor is it in blocks of
        one row, or if rows may be resets of the base environment.

        Args:
            seen: the root columns that the actor reads; None for all.
        """
        if not self._all_ours or not self._last or self._masked:
            return
        assert self._carry is not None
        seen_keys = None if seen is None else set(map(as_key, seen))
        skipping = row_skipping_plan(self._chain, self._steps, self._rows, seen_keys)
        if skipping is not None:
            self._root.made = dict(self._carry)
            skipping.counters.begin(0, self._carry)
            self._skipping = skipping

    def settle(self) -> None:
        """Write the results of skipped transforms for all complete rows, and end skipping."""
        self._write_skipped()
        self._skipping = None
        self._root.clear(0)

    def _write_skipped(self) -> None:
        """Write the results of skipped transforms for all complete rows, and update the values of the next root."""
        if self._skipping is not None and self._num_stepped <= self._last:
            values = self._skipping.catch_up(self._num_stepped, self._outer_root)
            if self._latest is not None:
                self._latest = self._latest | values

    def _enter(self, t: int) -> None:
        """Run the inverse transforms on row `t`, and copy the resulting actions into the inner block."""
        entering = self._input
        entering.clear(t)
        self._invert(entering)
        for key, rows in self._entering:
            copy_action(key, rows[t], entering.get(key))

    def _ended_here(self, t: int, made: Values) -> torch.Tensor:
        """Return where a transform ended an episode and the base environment didn't, ``(*batch,)`` bool."""
        after = [made[key] for key in self._done_keys if key in made]
        if not self._inner_done.any(t):  # the common case, which costs less than opening the columns
            return any_of(after, self.batch_size)
        before = [flag for k in self._done_keys if (flag := self._inner_next.row(k, t)) is not None]
        return ended_since(before, after, self.batch_size)

    def _leave_resets(self, t: int, made: Values) -> None:
        """Undo flags that transforms set where row `t` is a reset of the base environment, not a step."""
        skipped = ~self._frames[t]
        for key in [key for key in made if as_path(key)[-1] in FLAGS]:
            before = self._inner_next.row(key, t)
            if before is not None:
                made[key] = torch.where(trailing(skipped, made[key]), before, made[key])

    def _due(self, t: int, extra: torch.Tensor | None) -> dict[Path, torch.Tensor] | None:
        """Return the masks of environments to reset after row `t`, by group of flags; None if there are none.

        Args:
            t: the row.
            extra: where a transform ended an episode, ``(*batch,)`` bool; None for nowhere.
        """
        if not self._masked:
            return due_resets(self._outcome, self._groups) if self.rules.reset_when_done else None  # type: ignore[arg-type]
        # The base environment resets ended members itself, in the following step, which is no frame. Here the
        # transforms follow resets that were made in this row, and ends that they set.
        rows = ~self._frames[t] if extra is None else ~self._frames[t] | extra
        if not bool(rows.any()):
            return None
        return {g: trailing(rows, self._outcome.get(as_key((*g, "done")))) for g in self._groups}

    def _reset_after(self, t: int, made: Values, extra: Any, due: dict[Path, torch.Tensor]) -> Values:
        """Reset the environments in `extra`, run all transforms on the reset, and return their values of the next root.

        The base stepper has reset the other environments in `due` already.

        Args:
            t: the row.
            made: the transforms' values of its outcome.
            extra: where a transform ended an episode; the base stepper must reset these environments.
            due: the masks of environments that are reset, by group of flags.
        """
        masks = due if is_partial(due) else None
        if extra is not None and bool(extra.any()):
            self._base.reset(extra)
        flags = {key: value for key, value in made.items() if as_path(key)[-1] in FLAGS}
        if flags or t == self._last:
            # Where transforms wrote flags, reset environments must get the base environment's flags again. The carry
            # of the base stepper has these flags even if the block has no next row.
            root = self._base.root()
            columns: TransformColumns = Leaves(root)
            if t < self._last:
                self._inner_roots.write(t + 1, root)
        else:
            columns = self._inner_root
        before = {key: self._outcome.get(key, None) for key in self._root_keys}
        values = self._restarted(columns, masks, before, t + 1)
        keep_flags(values, flags, self._reset_root, masks, self.batch_size)
        return values

    def _restarted(
        self,
        columns: TransformColumns,
        masks: dict[Path, torch.Tensor] | None,
        before: Mapping[NestedKey, Any],
        t: int = 0,
    ) -> Values:
        """Run the transforms on a reset, and return their values of the root.

        Args:
            columns: the base environment's root, by key.
            masks: the masks of the reset, by group of flags; None for all environments.
            before: the values before, which environments keep that aren't reset.
            t: index of the root's row.
        """
        root, request = self._reset_root.over(columns), self._request
        root.clear(t, seldom=True)
        request.clear(0)
        request.made = {key: value for key, value in before.items() if value is not None}
        if masks is not None:
            request.made |= {as_key((*group, "_reset")): mask for group, mask in masks.items()}
        self._restart(request, root)
        keys = dict.fromkeys([*self._root_keys, *(k for k in root.made if as_path(k) in self._observed)])
        values = {key: value for key in keys if (value := root.get(key, None)) is not None}
        if masks is not None:
            for key, value in values.items():
                if before.get(key) is not None:
                    values[key] = chosen(masks, key, value, before[key], self.batch_size)
        return values

    def _group_masks(self, mask: torch.Tensor, root: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        flags = {group: root[(*group, "done")] for group in self._groups}
        return {group: trailing(mask.to(f.device), f).expand(f.shape).clone() for group, f in flags.items()}


def _stepping(transform: Any) -> tuple[Any, bool]:
    run, takes_root = transform.stepping()
    return on_copies(run) if transform.shows_values else run, takes_root
