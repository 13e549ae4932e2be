"""Actors: how a random or a user's policy acts on the rows of a block.

An actor reads the root columns of row t and writes the action columns and the policy's other outputs. `MutationCheck`
detects policies that change or move the tensors of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from gleanrl._arrays.block import Block
from gleanrl._arrays.dlpack import EXCHANGE
from gleanrl._arrays.native import TensorMarks, write_ones
from gleanrl._arrays.ragged import Leaf
from gleanrl._arrays.schema import Field, new_column
from gleanrl._arrays.tensordicts import (
    Path,
    TensorDictBuilder,
    as_key,
    did_you_mean,
    empty_groups,
    flatten,
    group_at,
    is_private,
    leaf_at,
    num_entries,
    put_leaf,
    stand_apart,
)
from gleanrl._rollout.native_policies import DirectProgram, NativePolicy
from gleanrl._rollout.policies import AllowedActions, Compiler, RandomPolicy, unmasked
from gleanrl._rollout.policy_modules import Member, ModuleSequence, Values, members_of, reads_of
from gleanrl._rollout.protocol import PolicyCarry
from gleanrl._rollout.row_writers import Conversions, RowWriter, misfit
from gleanrl._state.rng import OwnedTorchGenerator, derived_seed
from gleanrl.errors import PolicyError


class MutationCheck(Protocol):
    """Detects whether tensors were changed or moved while other code had them.

    It compares addresses and version counters. Torch counts the changes of a tensor and of all its views together.
    """

    def take(self, tensors: tuple[Any, ...]) -> None:
        """Record the address and version of each tensor, or of each object with ``_version`` and ``data_ptr``."""

    def unchanged(self, tensors: tuple[Any, ...]) -> bool:
        """Return whether all addresses and versions equal the recorded ones."""

    def taken(self) -> list[tuple[int, int]]:
        """Return the recorded version and address of each tensor."""


def marks() -> MutationCheck:
    """Return a check without any recorded tensors."""
    return _PythonMarks() if EXCHANGE is None else TensorMarks(EXCHANGE, torch.Tensor)


class _PythonMarks:
    """A `MutationCheck` in Python, for releases of torch without DLPack's exchange interface."""

    def __init__(self) -> None:
        self._recorded: list[tuple[int, int]] = []

    def take(self, tensors: tuple[Any, ...]) -> None:
        self._recorded = _marks_of(tensors)

    def unchanged(self, tensors: tuple[Any, ...]) -> bool:
        return self._recorded == _marks_of(tensors)

    def taken(self) -> list[tuple[int, int]]:
        return self._recorded


def _marks_of(tensors: tuple[Any, ...]) -> list[tuple[int, int]]:
    return [(one._version, one.data_ptr()) for one in tensors]


_ONES = (torch.int64, torch.bool, torch.float32)
"""Dtypes of one-hot vectors that the native core can write."""


class RandomActor:
    """Draws random actions: all T steps in one call, or step by step if the allowed actions depend on the row.

    Args:
        policy: the random policy.
        fields: the actor's columns. Columns that the policy doesn't draw (outputs of another policy) are set to zero.
        each_step: whether the policy's spec changes from step to step. With `AllowedActions` it always does.
        generator: the random generator; None for torch's global generator.
        redrawn: whether the environment's stepper redraws forbidden actions. Then all actions are drawn in advance,
            without a mask; see `Block.redraw_seed`.
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
        self.carry = PolicyCarry()  # always empty

    def bind(self, block: Block) -> Callable[[int], None] | None:
        """Write all T actions into `block` and return None, or return a function that acts on a row.

        With all actions, `Block.redraw_seed` is set too: None if nothing may be redrawn.

        Raises:
            PolicyError: if a drawn action isn't one of the columns, or has another shape or dtype. The returned
                function raises it too.
        """
        if not self._each_step:
            policy = self._policy
            block.redraw_seed = None
            if self._redrawn:
                # The stepper redraws forbidden actions when masks are known, so all actions can be drawn now.
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
        """Write the choices of a single environment without intermediate tensors; return whether that was possible.

        It is possible only if a single one-hot column is to be drawn.
        """
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
        """Do nothing, because drawn actions aren't converted."""

    def _drawn(self, policy: RandomPolicy, size: torch.Size, shape: tuple[int, ...]) -> dict[Path, Leaf]:
        """Return values for all columns, ``(*size, *leaf)``; columns that aren't drawn are zero or blank."""
        drawn = policy.draw(shape, self._owned)
        if not drawn.keys() <= self._fields.keys():
            unknown = [as_key(path) for path in drawn if path not in self._fields]
            raise PolicyError(f"policy: {unknown} aren't action keys of the environment")
        for path, field in self._fields.items():
            if path in drawn and not field.is_list:
                value, expected = drawn[path], size + field.shape
                if value.shape != expected or value.dtype is not field.dtype:
                    raise misfit(path, value, expected, field.dtype)
            elif path not in drawn and field.is_list:
                drawn[path] = new_column(size, field)
            elif path not in drawn:
                drawn[path] = torch.zeros((), dtype=field.dtype).expand(size + field.shape)
        return drawn


def below_next(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the paths that lie below ``"next"``."""
    return tuple(path for path in paths if path[0] == "next")


class PolicyActor:
    """Calls a policy on every row and writes its outputs.

    If a policy is a chain of TensorDict modules, its modules are called on tensor views of the row, without a
    TensorDict. Modules that can't be called on tensors get a TensorDict of the row, and so does any other policy. This
    choice is made anew for each block, so that a new hook or an exchanged module takes effect.

    The policy finds its outputs (except actions) in the next row, for example its state, until all environments are
    reset together. If the policy's inputs are known, the TensorDict holds only these, because each entry costs a view
    per step.

    Args:
        policy: a callable that takes a TensorDict and returns it, or another one, with the actions set.
        fields: the actor's columns, actions first.
        layout: the columns of a row; see `RowLayout`.
        first: the policy's outputs for the first row, if it was already called on it.
        compiler: compiles the policy's callables; None for no compilation.
        native: decides which members the native core computes; None for none.
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        fields: Mapping[Path, Field],
        layout: RowLayout,
        first: Values | None = None,
        compiler: Compiler | None = None,
        native: NativePolicy | None = None,
    ) -> None:
        self._policy = policy
        self._compiler = compiler
        self.native = native
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
        """Whether the policy's modules are called directly on tensors; raises as `bind` does."""
        members = self._members()
        reads = reads_of(members)
        return reads is not None and self._on_tensors(members, reads)

    def bind(self, block: Block) -> Callable[[int], None]:
        """Read from and write into `block` from now on, and set `seen`; return a function that acts on a row.

        The very first row gets the outputs `first`, if they were given. Later rows call the policy.

        Raises:
            PolicyError: if the policy's modules read an entry that the environment doesn't offer. The returned function
                raises it if outputs don't fit, the policy changed its input, or torch can't compute it (see
                `explain_input`).
        """
        members, compiler = self._members(), self._compiler
        if self.native is not None:
            members = self.native.members(members)
        reads = reads_of(members)
        if reads is not None and self._on_tensors(members, reads):
            self.seen = reads
            program = self.native and self.native.direct(members, block, self._fields, self._layout.actions)
            if program:
                return self._natively(program, block)
            return self._writing(self._on_rows(members, block), block)
        policy = ModuleSequence(members) if compiler is None else compiler(self._policy)
        self.seen = reads if reads is not None and self._offers(reads) else None
        return self._writing(self._on_tensordict.bind(policy, block, self.seen), block)

    def _on_rows(self, members: Sequence[Member], block: Block) -> Callable[[int], Values]:
        return _CallsActor(members, tuple(self.seen or ()), self._layout, block)

    def _writing(self, call: Callable[[int], Values], block: Block) -> Callable[[int], None]:
        writer = RowWriter(block, self._fields, self._layout.actions)
        self._conversions, write = writer.conversions, writer.write

        def act(t: int) -> None:
            first, self._first = self._first, None
            try:
                values = call(t) if first is None else first
            except RuntimeError as cause:
                paths = self.seen or self._layout.roots
                explain_input(self._policy, {path: block.schema[path] for path in paths}, cause)
                raise
            write(t, values)

        return act

    def _natively(self, program: DirectProgram, block: Block) -> Callable[[int], None]:
        """Return a function that computes a row by the core, or by torch if the core leaves the row to torch."""
        self._conversions = Conversions(block)
        compute = program.act
        by_torch: Callable[[int], None] | None = None

        def act(t: int) -> None:
            nonlocal by_torch
            if self._first is not None or not compute(t):
                by_torch = by_torch or self._writing(self._on_rows(program.members, block), block)
                by_torch(t)

        return act

    def check(self) -> None:
        """Raise `PolicyError` if the conversion of an action of the bound block changed its value."""
        self._conversions.check()

    def _members(self) -> list[Member]:
        return members_of(self._policy, self._layout.batch_size, self._compiler)

    def _offers(self, reads: Sequence[Path]) -> bool:
        """Return whether a TensorDict with only the policy's inputs `reads` can be built.

        All inputs must be root columns of plain tensors. If groups have their own batch sizes, all entries are needed:
        a policy may ask for the size of a group without reading its entries.
        """
        row = self._layout
        return not row.groups and row.lists.isdisjoint(reads) and set(row.roots).issuperset(reads)

    def _on_tensors(self, members: Sequence[Member], reads: Sequence[Path]) -> bool:
        """Return whether all members of the policy, which reads these paths, can be called on tensors.

        Raises:
            PolicyError: if neither the environment nor a member provides one of the paths.
        """
        calls = [member.call for member in members if member.call is not None]
        if len(calls) < len(members):
            return False
        made = {path for call in calls for path in call.outputs}
        if self._layout.lists.intersection(reads) or any(field.is_list for field in self._fields.values()):
            return False  # only a TensorDict can show list entries
        if not stand_apart([*self._layout.roots, *self._fields, *reads, *made]):
            return False  # a group is read or written as a whole: a path is a prefix of another
        unknown = [path for path in reads if path not in self._layout.roots]
        if any(path not in made for path in unknown):
            keys, offered = ([as_key(path) for path in paths] for paths in (unknown, self._layout.roots))
            hint = did_you_mean(keys[0], offered)
            raise PolicyError(
                f"policy: in_keys {keys} aren't offered by the environment, which has {offered}{hint}"
            )
        return not unknown  # otherwise it reads its own output from the previous row


@dataclass(frozen=True)
class RowLayout:
    """The columns of a row, as a policy finds them.

    Attributes:
        roots: the paths that the environment offers.
        actions: the action paths.
        batch_size: the batch dimensions of a row.
        device: the device attribute of the row's TensorDict.
        policy_device: device to which the policy's input is moved; None leaves it on the block's device.
        groups: the batch sizes of nested TensorDicts beyond `batch_size` (see `TensorDictBuilder`).
        lists: the paths of `roots` that are lists.
    """

    roots: tuple[Path, ...]
    actions: tuple[Path, ...]
    batch_size: torch.Size
    device: torch.device | None = None
    policy_device: torch.device | None = None
    groups: Mapping[Path, tuple[int, ...]] | None = None
    lists: frozenset[Path] = frozenset()


class _CallsActor:
    """Calls the modules of a policy on tensor views of a row."""

    def __init__(
        self, members: Sequence[Member], inputs: Sequence[Path], layout: RowLayout, block: Block
    ) -> None:
        self._calls = [member.on_values() for member in members]
        self._marks = marks()
        self._device = layout.policy_device
        self._inputs, self._records, self._cloning = inputs, block.rows_by_step(inputs), block.cloning

    def __call__(self, t: int) -> Values:
        device, leaves = self._device, self._records[t]
        if self._cloning is not None:
            leaves = tuple(map(self._cloning, leaves))
        self._marks.take(leaves)
        values: Values = dict(zip(self._inputs, leaves, strict=True))
        if device is not None:
            values = {path: row.to(device) for path, row in values.items()}
        for call in self._calls:
            call(values)
        if not self._marks.unchanged(leaves):
            raise _changed_input(self._inputs, leaves, self._marks, t)
        return values


class _TensorDictCall:
    """Calls a policy on a new TensorDict of a row, which also holds the policy's outputs of the row before."""

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
        """Call `policy` from now on, and read the paths `reads` of `block`; None reads all."""
        if reads != self._reads:
            row, self._reads, self._num_entries = self._row, reads, -1
            self._layout = TensorDictBuilder(row.roots if reads is None else reads, row.groups, row.lists)
        self._policy, self._records, self._cloning = (
            policy,
            block.rows_by_step(self._layout.paths),
            block.cloning,
        )
        return self

    def __call__(self, t: int) -> Values:
        leaves = self._records[t]
        if self._cloning is not None:
            leaves = tuple(map(self._cloning, leaves))
        self._marks.take(leaves)
        root: TensorDictBase = self._layout.build(leaves, self._row.batch_size, self._row.device)
        if self._row.policy_device is not None:
            root = root.to(self._row.policy_device)
        if self._reads is None:
            for path, value in self._carry.outputs:
                put_leaf(root, path, value)
        out = self._policy(root)
        try:
            # Comparing keys takes longer than counting them, so they are compared only if their number changed.
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
        if not self._marks.unchanged(leaves):
            raise _changed_input(self._layout.paths, leaves, self._marks, t)
        return values

    def is_state(self, path: Path) -> bool:
        """Return whether the policy finds this output in the next row."""
        ours = (path in self._fields or is_private(path)) and path[0] != "next"
        return ours and path not in self._row.roots and path not in self._row.actions

    def _found(self, out: TensorDictBase) -> list[Any]:
        """Return the wanted outputs if `out` has lists, or has other keys than the last output although as many."""
        found = [_entry(out, path) for path in self._wanted.paths]
        if any(value is None for value in found):
            self._check_keys(out)
            found = [_entry(out, path) for path in self._wanted.paths]
        return found

    def _check_keys(self, out: TensorDictBase) -> None:
        """Raise `PolicyError` if `out` has an entry without a column. Private entries need none.

        Otherwise record the carried outputs and the number of entries. Later outputs with the same number of entries
        skip this check.
        """
        found = flatten(out)
        unknown = [as_key(path) for path in found if path not in self._known and not is_private(path)]
        if unknown:
            raise PolicyError(
                f"policy: it returned {unknown}, which its first call didn't return; "
                "return the same keys in every call, since the first call fixes the columns of a batch"
            )
        self._carried = [path for path in found if self.is_state(path)]
        self._wanted = TensorDictBuilder(dict.fromkeys((*self._fields, *self._carried)))
        inner = dict.fromkeys(path[:end] for path in found for end in range(1, len(path)))
        self._groups = [*inner, *empty_groups(out)]
        self._num_entries = self._counted(out)

    def _counted(self, out: Any) -> int:
        """Return the number of entries of `out` at all known levels."""
        if not self._groups:
            return num_entries(out)
        return num_entries(out) + sum([num_entries(group_at(out, path)) for path in self._groups])


def _entry(out: Any, path: Path) -> Any:
    leaf = leaf_at(out, path)
    return out.get(path, None) if leaf is None else leaf


def _changed_input(
    paths: Iterable[Path], leaves: Sequence[Any], before: MutationCheck, t: int
) -> PolicyError:
    """Return the error for a policy that changed or moved its input, because the row is the record of that input."""
    rows = list(zip(paths, leaves, before.taken(), strict=True))
    moved = [as_key(path) for path, row, (_, address) in rows if row.data_ptr() != address]
    if moved:
        return PolicyError(
            f"policy: it moved its input {moved} to other memory at step {t} of the batch (share_memory_, a queue of "
            "torch.multiprocessing, .data), so that it would miss the environment's next values; move a clone instead"
        )
    changed = [as_key(path) for path, row, (version, _) in rows if row._version != version]
    return PolicyError(
        f"policy: it changed its input {changed} in place at step {t} of the batch, which would falsify the record; "
        "use operations that make new tensors (a first layer without inplace=True)"
    )


def explain_input(policy: Any, inputs: Mapping[Path, Field], cause: RuntimeError) -> None:
    """Raise an error with the inputs of a policy that torch can't compute, for example because of its width.

    Args:
        policy: the user's policy, or a module that wraps it.
        inputs: the fields that it reads, without batch dimensions.
        cause: the error of its call. Nothing is raised for a subclass of RuntimeError, and for a message that names no
            shape, size or dtype: the error has another reason.

    Raises:
        PolicyError: with `cause` as its cause.
    """
    if type(cause) is not RuntimeError or not re.search(r"shape|size|dtype", str(cause)):
        return
    while type(policy) is TensorDictModule:
        policy = policy.module
    name = getattr(policy, "__name__", type(policy).__name__)
    fields = ", ".join(f"{as_key(path)!r} {field}" for path, field in inputs.items())
    raise PolicyError(
        f"policy: {name} raised {cause}; its input is {fields} for each environment: make the policy take this shape "
        "and dtype"
    ) from cause


def missing_output(out: Any, fields: Mapping[Path, Field]) -> PolicyError:
    """Return the error for a policy whose output `out` lacks some of `fields` or isn't a TensorDict."""
    expected = [as_key(path) for path in fields]
    if not isinstance(out, TensorDictBase):
        return PolicyError(f"policy: expected a TensorDict with {expected}, got {type(out).__name__}")
    return PolicyError(f"policy: expected the keys {expected}, got {sorted(map(str, out.keys(True, True)))}")
