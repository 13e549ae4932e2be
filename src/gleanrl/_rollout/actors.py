"""How a policy acts on a block row.

An actor reads the root columns of row t and writes its own columns, the action's and whatever else the
policy puts out.

Whether somebody who was given tensors has changed or moved them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import TensorMarks, write_ones
from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.schema import Field, new_column
from gleanrl._arrays.tensordicts import (
    Path,
    TensorDictBuilder,
    as_key,
    empty_groups,
    flatten,
    group_at,
    is_private,
    leaf_at,
    num_entries,
    put_leaf,
    stand_apart,
)
from gleanrl._rollout.policies import AllowedActions, Compiler, RandomPolicy, unmasked
from gleanrl._rollout.policy_modules import Member, ModuleSequence, Values, members_of, reads_of
from gleanrl._rollout.protocol import PolicyCarry
from gleanrl._rollout.row_writers import RowWriter, misfit
from gleanrl._state.rng import OwnedTorchGenerator, derived_seed
from gleanrl.errors import PolicyError


class MutationCheck(Protocol):
    """Where some tensors are, and how often they were changed: asked before and after somebody else gets them.

    Torch counts the changes of a tensor and of all its views together.
    """

    def take(self, tensors: tuple[Any, ...]) -> None:
        """Remember address and number of changes of each; tensors, or things with ``_version`` and ``data_ptr``."""

    def unchanged(self, tensors: tuple[Any, ...]) -> bool:
        """Return whether these are where they were, and as often changed."""

    def taken(self) -> list[tuple[int, int]]:
        """Return what was remembered: the number of changes and the address of each."""


def marks() -> MutationCheck:
    """Return marks of no tensors yet."""
    return _AskedMarks() if EXCHANGE is None else TensorMarks(EXCHANGE, torch.Tensor)


class _AskedMarks:
    """Asks tensors in Python; see `MutationCheck`."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []

    def take(self, tensors: tuple[Any, ...]) -> None:
        self._taken = _marks_of(tensors)

    def unchanged(self, tensors: tuple[Any, ...]) -> bool:
        return self._taken == _marks_of(tensors)

    def taken(self) -> list[tuple[int, int]]:
        return self._taken


def _marks_of(tensors: tuple[Any, ...]) -> list[tuple[int, int]]:
    return [(one._version, one.data_ptr()) for one in tensors]


_ONES = (torch.int64, torch.bool, torch.float32)
"""Dtypes of one-hot vectors that the core writes."""


class RandomActor:
    """Draws the actions of all T steps in one call, or step by step where what is allowed depends on the row.

    Args:
        policy: what to draw from.
        fields: the actor's columns; those that the policy doesn't draw (another policy's extras) are zero.
        each_step: whether the policy's spec changes from step to step; that of `AllowedActions` always does.
        generator: what to draw with; None for torch's global generator.
        redrawn: whether the policy draws from all actions of an environment whose stepper redraws those that a mask
            forbids; see `Block.redraw_seed`.
    """

    def __init__(
        self,
        policy: RandomPolicy,
        fields: Mapping[Path, Field],
        each_step: bool = False,
        generator: OwnedTorchGenerator | None = None,
        redrawn: bool = False,
    ) -> None:
        self._policy = policy
        self._fields = fields
        self._each_step = each_step or isinstance(policy, AllowedActions)
        self.primed = below_next(fields)
        self.seen: Collection[Path] | None = None
        self.overwrites = False
        self._owned = generator
        self._redrawn = redrawn
        self.carry = PolicyCarry()  # nothing, for ever

    def bind(self, block: Block) -> Callable[[int], None] | None:
        """Write all T actions into `block`, or return what acts on a row."""
        if not self._each_step:
            policy = self._policy
            block.redraw_seed = None
            if self._redrawn:
                block.redraw_seed = derived_seed(self._owned)
                policy = unmasked(policy)
            if self._wrote_choices(policy, block):
                return None
            size = torch.Size((block.num_steps, *block.batch_size[:-1]))
            for path, action in self._drawn(policy, size, (block.num_steps,)).items():
                block.fill(path, action)
            return None
        targets = [(path, block.rows(path)) for path in self._fields]

        def act(t: int) -> None:
            drawn = self._drawn(self._policy, block.batch_size[:-1], ())
            for path, rows in targets:
                rows[t].copy_(drawn[path])

        return act

    def _wrote_choices(self, policy: RandomPolicy, block: Block) -> bool:
        """Write the choices of a single environment, if that is all there is to draw: without tensors in between."""
        if self._owned is None or len(self._fields) != 1 or block.time_dim:
            return False
        ((path, field),) = self._fields.items()
        column = block.column(path)
        if len(field.shape) != 1 or field.dtype not in _ONES or field.is_list or not column.is_cpu:
            return False
        indices = policy.draw_indices(block.num_steps, path, field, self._owned)
        if indices is None:
            return False
        written = write_ones(indices.numpy(), block.array(path))
        assert written, "a column of one environment is contiguous"
        return True

    def check(self) -> None:
        """Do nothing: drawn actions aren't converted."""

    def _drawn(self, policy: RandomPolicy, size: torch.Size, shape: tuple[int, ...]) -> dict[Path, Leaf]:
        """Return values for all columns, ``(*size, *leaf)``: those that aren't drawn are zero, or blank."""
        drawn = policy.draw(shape, self._owned)
        if not drawn.keys() <= self._fields.keys():
            unknown = [as_key(path) for path in drawn if path not in self._fields]
            raise PolicyError(f"policy: {unknown} aren't action keys of the environment")
        for path, field in self._fields.items():
            if path in drawn and not field.is_list:
                value, whole = drawn[path], size + field.shape
                if value.shape != whole or value.dtype is not field.dtype:
                    raise misfit(path, value, whole, field.dtype)
            elif path not in drawn and field.is_list:
                drawn[path] = new_column(size, field)
            elif path not in drawn:
                drawn[path] = torch.zeros((), dtype=field.dtype).expand(size + field.shape)
        return drawn


def below_next(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return those of `paths` that stand below ``"next"``."""
    return tuple(path for path in paths if path[0] == "next")


class PolicyActor:
    """Calls a policy on every row and writes what it puts out.

    A TensorDict module that can be taken apart has its modules called on tensor views of the row, without a
    TensorDict; any other policy gets a TensorDict of the row, and so do those members of a sequence that can't be
    called on tensors. Which of them is found out for each block, so that a hook or a module that is exchanged in
    between takes effect. What a policy writes beside its actions it finds again in the next row (its state, if it
    has one), until the environments are reset all together. Where it is known what a policy reads, the TensorDict
    holds no more than that: to show it an entry costs a view for every step.

    Args:
        policy: a callable of one TensorDict that returns it, or another one, with the actions set.
        fields: the actor's columns, actions first.
        layout: which columns there are; see `RowLayout`.
        first: the policy's output for the first row, if it was called on that already.
        compiler: makes faster callables of what the policy calls; None for none.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        fields: Mapping[Path, Field],
        layout: RowLayout,
        first: Values | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self._policy = policy
        self._compiler = compiler
        self._fields = fields
        self._layout = layout
        self._first = first
        over = tuple(path for path in fields if path in layout.roots)
        self.primed = (*below_next(fields), *over)
        self.seen: Collection[Path] | None = None
        self.overwrites = bool(over)
        self.carry = PolicyCarry(layout.batch_size, layout.policy_device)
        self._on_tensordict = _TensorDictCall(fields, layout, self.carry)
        if first is not None:
            self.carry.outputs = tuple(
                (path, first[path]) for path in first if self._on_tensordict.is_state(path)
            )

    @property
    def by_modules(self) -> bool:
        """Whether the modules inside the policy are called, without a TensorDict."""
        members = self._members()
        reads = reads_of(members)
        return reads is not None and self._on_tensors(members, reads)

    def bind(self, block: Block) -> Callable[[int], None]:
        """Read from and write into `block` from now on; return what acts on a row."""
        call: Callable[[int], Values]
        members, compiler = self._members(), self._compiler
        reads = reads_of(members)
        if reads is not None and self._on_tensors(members, reads):
            call = _CallsActor(members, reads, self._layout, block)
            self.seen = reads
        else:
            policy = ModuleSequence(members) if compiler is None else compiler(self._policy)
            self.seen = reads if reads is not None and self._offers(reads) else None
            call = self._on_tensordict.bind(policy, block, self.seen)
        writer = RowWriter(block, self._fields, self._layout.actions)
        self._conversions, write = writer.conversions, writer.write

        def act(t: int) -> None:
            first, self._first = self._first, None
            values = call(t) if first is None else first
            write(t, values)

        return act

    def check(self) -> None:
        """Raise if an action of the bound block isn't what the policy put out."""
        self._conversions.check()

    def _members(self) -> list[Member]:
        return members_of(self._policy, self._layout.batch_size, self._compiler)

    def _offers(self, reads: Sequence[Path]) -> bool:
        """Return whether a row of what a policy reads is all that it needs: its tensors are there.

        Groups of sizes of their own are asked for these, whatever is read of them.
        """
        row = self._layout
        return not row.groups and row.lists.isdisjoint(reads) and set(row.roots).issuperset(reads)

    def _on_tensors(self, members: Sequence[Member], reads: Sequence[Path]) -> bool:
        """Return whether no member of the policy, which reads these paths, needs a TensorDict."""
        calls = [member.call for member in members if member.call is not None]
        if len(calls) < len(members):
            return False
        made = {path for call in calls for path in call.outputs}
        if self._layout.lists.intersection(reads) or any(field.is_list for field in self._fields.values()):
            return False  # a TensorDict shows what lists hold
        if not stand_apart([*self._layout.roots, *self._fields, *reads, *made]):
            return False  # a group is read or written as a whole: tensors by path don't know what lies in it
        unknown = [path for path in reads if path not in self._layout.roots]
        if any(path not in made for path in unknown):
            raise PolicyError(
                f"policy: in_keys {[as_key(path) for path in unknown]} aren't offered by the environment, "
                f"which has {[as_key(path) for path in self._layout.roots]}"
            )
        return not unknown  # else it reads what it wrote in the row before


@dataclass(frozen=True)
class RowLayout:
    """What a policy finds in a row.

    Attributes:
        roots: the paths that the environment offers.
        actions: the action paths.
        batch_size: the batch dimensions of a row.
        device: what the row's TensorDict says of its device.
        policy_device: where the policy wants its input; None for where the block lives.
        groups: the batch sizes of nested TensorDicts beyond `batch_size` (see `TensorDictBuilder`).
        lists: those of `roots` that are lists.
    """

    roots: tuple[Path, ...]
    actions: tuple[Path, ...]
    batch_size: torch.Size
    device: torch.device | None = None
    policy_device: torch.device | None = None
    groups: Mapping[Path, tuple[int, ...]] | None = None
    lists: frozenset[Path] = frozenset()


class _CallsActor:
    """Makes the calls of a policy on tensor views of a row."""

    def __init__(
        self, members: Sequence[Member], inputs: Sequence[Path], layout: RowLayout, block: Block
    ) -> None:
        self._calls = [member.on_values() for member in members]
        self._marks = marks()
        self._device = layout.policy_device
        self._inputs, self._records, self._cloning = inputs, block.shown(inputs), block.cloning

    def __call__(self, t: int) -> Values:
        device, given = self._device, self._records[t]
        if self._cloning is not None:
            given = tuple(map(self._cloning, given))
        self._marks.take(given)
        values: Values = dict(zip(self._inputs, given, strict=True))
        if device is not None:
            values = {path: row.to(device) for path, row in values.items()}
        for call in self._calls:
            call(values)
        if not self._marks.unchanged(given):
            raise _changed_input(self._inputs, given, self._marks, t)
        return values


class _TensorDictCall:
    """Calls a policy on a fresh TensorDict over a row, with what the policy wrote in the row before."""

    def __init__(self, fields: Mapping[Path, Field], layout: RowLayout, carry: PolicyCarry) -> None:
        self._fields = fields
        self._carry = carry
        self._marks = marks()
        self._row = layout
        self._reads: Sequence[Path] | None = None
        self._layout = TensorDictBuilder(layout.roots, layout.groups, layout.lists)
        self._known = {*fields, *layout.roots}
        self._groups: list[Path] = []
        self._num_entries = -1
        self._carried: list[Path] = []
        self._wanted = TensorDictBuilder(fields)

    def bind(
        self, policy: Callable[[Any], Any], block: Block, reads: Sequence[Path] | None
    ) -> _TensorDictCall:
        """Call `policy` from now on, and read from `block`: what the policy reads, or all there is."""
        if reads != self._reads:
            row, self._reads, self._num_entries = self._row, reads, -1
            self._layout = TensorDictBuilder(row.roots if reads is None else reads, row.groups, row.lists)
        self._policy, self._records, self._cloning = policy, block.shown(self._layout.paths), block.cloning
        return self

    def __call__(self, t: int) -> Values:
        given = self._records[t]
        if self._cloning is not None:
            given = tuple(map(self._cloning, given))
        self._marks.take(given)
        root: TensorDictBase = self._layout.build(given, self._row.batch_size, self._row.device)
        if self._row.policy_device is not None:
            root = root.to(self._row.policy_device)
        if self._reads is None:
            for path, value in self._carry.outputs:
                put_leaf(root, path, value)
        out = self._policy(root)
        try:
            if self._counted(out) != self._num_entries:
                self._check_keys(out)
            found = self._wanted.find(out)
            if found is None:
                found = self._found(out)
            values: Values = dict(zip(self._wanted.paths, found, strict=True))
            if self._carried:
                self._carry.outputs = tuple([(path, values[path]) for path in self._carried])
        except (AttributeError, KeyError) as cause:
            raise missing_output(out, self._fields) from cause
        if not self._marks.unchanged(given):
            raise _changed_input(self._layout.paths, given, self._marks, t)
        return values

    def is_state(self, path: Path) -> bool:
        """Return whether an output is found again in the next row."""
        ours = (path in self._fields or is_private(path)) and path[0] != "next"
        return ours and path not in self._row.roots and path not in self._row.actions

    def _found(self, out: TensorDictBase) -> list[Any]:
        """Return what is wanted of an output that has lists, or other keys than the one before though as many."""
        found = [_entry(out, path) for path in self._wanted.paths]
        if any(value is None for value in found):
            self._check_keys(out)
            found = [_entry(out, path) for path in self._wanted.paths]
        return found

    def _check_keys(self, out: TensorDictBase) -> None:
        """Raise if `out` holds what no column was made for; else remember that so many keys are fine."""
        came = flatten(out)
        unknown = [as_key(path) for path in came if path not in self._known and not is_private(path)]
        if unknown:
            raise PolicyError(
                f"policy: it put out {unknown}, which it didn't when it was first called; "
                "the columns of a batch are fixed then"
            )
        self._carried = [path for path in came if self.is_state(path)]
        self._wanted = TensorDictBuilder(dict.fromkeys((*self._fields, *self._carried)))
        inner = dict.fromkeys(path[:end] for path in came for end in range(1, len(path)))
        self._groups = [*inner, *empty_groups(out)]
        self._num_entries = self._counted(out)

    def _counted(self, out: Any) -> int:
        """Return how many entries there are at all levels that are known."""
        if not self._groups:
            return num_entries(out)
        return num_entries(out) + sum([num_entries(group_at(out, path)) for path in self._groups])


def _entry(out: Any, path: Path) -> Any:
    leaf = leaf_at(out, path)
    return out.get(path, None) if leaf is None else leaf


def _changed_input(paths: Iterable[Path], given: Sequence[Any], before: MutationCheck, t: int) -> PolicyError:
    """Return the error for a policy that changed or moved its input: the row is the record of what it saw."""
    rows = list(zip(paths, given, before.taken(), strict=True))
    moved = [as_key(path) for path, row, (_, address) in rows if row.data_ptr() != address]
    if moved:
        return PolicyError(
            f"policy: it moved its input {moved} to other memory at step {t} of the batch (share_memory_, a queue of "
            "torch.multiprocessing, .data), where the environment's next values don't come; use a clone of it"
        )
    changed = [as_key(path) for path, row, (version, _) in rows if row._version != version]
    return PolicyError(
        f"policy: it changed its input {changed} in place at step {t} of the batch, which would falsify the record; "
        "use operations that make new tensors (a first layer without inplace=True)"
    )


def missing_output(out: Any, fields: Mapping[Path, Field]) -> PolicyError:
    """Return the error for a policy whose output `out` lacks some of `fields`, or is no TensorDict."""
    expected = [as_key(path) for path in fields]
    if not isinstance(out, TensorDictBase):
        return PolicyError(f"policy: expected a TensorDict with {expected}, got {type(out).__name__}")
    return PolicyError(f"policy: expected the keys {expected}, got {sorted(map(str, out.keys(True, True)))}")
