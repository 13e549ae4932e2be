"""The choice between torch and the native core, member by member of a policy.

`NativePolicy` replaces members that the core can compute by native ones, after a comparison with torch on fixed rows.
The choice is made anew when the policy changes, never because of the values of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from gleanrl._arrays.block import Block
from gleanrl._arrays.native import ActorProgram, flushes_denormals
from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path
from gleanrl._rollout.native_forward import run_forward
from gleanrl._rollout.native_modules import Emitter, Segment, emitted, name_of
from gleanrl._rollout.native_probe import Probe
from gleanrl._rollout.native_program import NotNative, ProgramBuilder, Value, bind_row, position_of
from gleanrl._rollout.policy_modules import (
    GLOBAL_HOOKS,
    KeyedCall,
    Member,
    ModuleSequence,
    PlainCall,
    ProbabilisticCall,
    Values,
    is_hooked,
    keys_of,
    kind_of,
)
from gleanrl._state.rng import CounterGenerator
from gleanrl.errors import InvalidArgumentError, UnsupportedError

Backend = Literal["auto", "torch", "native"]
"""Which code computes a policy: the native core where it can, torch, or the native core alone."""


def check_backend(backend: Any) -> Backend:
    """Return `backend`; raise `InvalidArgumentError` unless it is ``"auto"``, ``"torch"`` or ``"native"``."""
    if backend not in get_args(Backend):
        raise InvalidArgumentError(f"policy_backend: expected 'auto', 'torch' or 'native', got {backend!r}")
    found: Backend = backend
    return found


def reason_for_torch() -> str | None:
    """Return why no policy can run natively in the thread's current modes of torch; None if it can."""
    c: Any = torch._C
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if (
        c._len_torch_function_stack()
        or c._len_torch_dispatch_stack()
        or c._functorch.peek_interpreter_stack()
    ):
        return "a mode of torch or functorch is active"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are on"
    if flushes_denormals():
        return "numbers below 2^-126 are flushed to zero"
    if any(GLOBAL_HOOKS):
        return "a global hook of modules is set"
    return None


class _Needs(NamedTuple):
    """The modules and names on which a choice depends, apart from the values of parameters."""

    modules: dict[nn.Module, set[str] | None]
    """The modules, and the names of the attributes that matter; None for all."""
    names: list[tuple[Mapping[str, Any], str]]
    """The global names, with their namespaces."""


class _Snapshot:
    """The parts of modules and the global names that a choice depends on, as they were when it was made."""

    def __init__(self, needs: _Needs) -> None:
        self._modules, self._names = needs
        self._found = self._current()

    def is_current(self) -> bool:
        """Return whether no class, `forward`, hook, submodule, mode or attribute of the modules has changed."""
        now = self._current()
        if any(map(is_hooked, self._modules)) or len(now) != len(self._found):
            return False
        return all(map(is_, now, self._found))

    def _current(self) -> list[Any]:
        found: list[Any] = [namespace.get(name) for namespace, name in self._names]
        for module, names in self._modules.items():
            cls, state = type(module), module.__dict__
            found += (
                cls,
                cls.__call__,
                cls.forward,
                getattr(cls.forward, "__code__", None),
                cls._call_impl,
                cls.__getattr__,
                cls.__getattribute__,
                "forward" in state or "_call_impl" in state,
            )
            for name, part in state["_modules"].items():
                found += (name, part)
            parameters = {**state["_parameters"], **state["_buffers"]}
            if names is None:
                found += state.values()
            else:
                found += map(state.get, names)
                found += [getattr(cls, name, None) for name in names]  # a property hides the attribute
                parameters = {name: parameters.get(name) for name in names}
            for one in parameters.values():
                found += (type(one), None if one is None else one.dtype, one is None or one.is_cpu)
        return found


class NativeCall:
    """Computes adjacent members of a policy in the core, on tensors of a row.

    Args:
        members: the members.
        segment: their operations.
        batch_size: the batch size of a row.
        random: the source of random numbers.
        number: the position of the segment in the policy; segments draw different numbers.
        is_current: tells whether the modules are as they were when the segment was made.
    """

    def __init__(
        self,
        members: Sequence[Member],
        segment: Segment,
        batch_size: torch.Size,
        random: CounterGenerator,
        number: int,
        is_current: Callable[[], bool],
    ) -> None:
        self._is_current = is_current
        self.members = members
        self.inputs, self.outputs = [*segment.inputs], [*segment.outputs]
        self.segment, self.random, self._number = segment, random, number
        self._batch_size = batch_size
        made = [(value, value.dtype) for value in segment.outputs.values()]
        self._program = segment.emit.builder.built(made)
        self._weights: list[Tensor] = []
        self._forms = [((*batch_size, *value.shape), value.dtype) for value in segment.outputs.values()]
        self.advances = False
        """Whether a call counts as a step of the random numbers: true for the last segment of a policy."""

    @property
    def key(self) -> int:
        """The key of the segment's random numbers."""
        # Any odd factor gives each segment another key.
        return (self.random.key + self._number * 0x9E3779B97F4A7C15) % 2**64

    def read_weights(self) -> None:
        """Look up the current weights; raise `NotNative` if one has another dtype, shape or device."""
        self._weights = [weight.read() for weight in self.segment.emit.builder.weights]

    def pack(self, program: ActorProgram | None = None) -> None:
        """Copy the weights that were looked up into a program; None for the one of `__call__`."""
        (program or self._program).pack([(one.data_ptr(), one.numel()) for one in self._weights])

    def on_torch(self, values: Values) -> None:
        """Compute the members by torch."""
        for member in self.members:
            member.on_values()(values)

    def __call__(self, values: Values) -> None:
        """Read the inputs from `values` and add the outputs."""
        tensors, step = [values[path] for path in self.inputs], self.random.step
        if self.advances:
            self.random.step = step + 1
        if not all(map(self._fits, tensors, self.segment.inputs.values())) or not self._is_ready():
            self.on_torch(values)
            return
        sources = [one.contiguous() for one in tensors]
        made = [torch.empty(shape, dtype=dtype) for shape, dtype in self._forms]
        bind_row(self._program, sources, made, self._batch_size, self.key, step)
        if self._program.act(0):
            values.update(zip(self.outputs, made, strict=True))
        else:
            self.on_torch(values)

    def _is_ready(self) -> bool:
        """Copy the current weights, because members between native ones may change modules; return whether it works."""
        try:
            self.read_weights()
        except NotNative:
            return False
        self.pack()
        return self._is_current()

    def _fits(self, tensor: Any, value: Value) -> bool:
        shape = (*self._batch_size, *value.shape)
        return (
            type(tensor) is Tensor and tensor.dtype is value.dtype and tensor.shape == shape and tensor.is_cpu
        )


class DirectProgram(NamedTuple):
    """A program of a whole policy that is bound to the columns of a block."""

    act: Callable[[int], bool]
    """Computes a row and writes its outputs; False if torch has to compute the row.

    The program has raw addresses: the caller keeps the block alive.
    """
    members: Sequence[Member]
    """The members of the policy."""


class NativePolicy:
    """Chooses for each member of a policy whether torch or the native core computes it.

    Args:
        backend: ``"auto"`` or ``"native"``; see `Backend`.
        random: the source of random numbers.
        fields: the root columns that the policy finds.
        outputs: the columns that the policy writes.
        batch_size: the batch size of a row.
        device: the device that the policy's input is moved to; None for none.
    """

    def __init__(
        self,
        backend: Backend,
        random: CounterGenerator,
        fields: Mapping[Path, Field],
        outputs: Mapping[Path, Field],
        batch_size: torch.Size,
        device: torch.device | None = None,
    ) -> None:
        self._backend, self._random, self._batch_size = backend, random, batch_size
        self._fields, self._outputs, self._device = fields, outputs, device
        self._key: list[Any] | None = None
        self._snapshot = _Snapshot(_Needs({}, []))
        self._reason: str | None = None
        self._members: list[Member] = []
        self._direct: tuple[tuple[Any, ...], ActorProgram] | None = None
        self.said: tuple[str, ...] = ()
        """For each member: its class, and "native" or "torch" with the reason."""

    def members(self, members: list[Member]) -> list[Member]:
        """Return the members, with adjacent ones that the core computes replaced by one.

        Raises:
            UnsupportedError: the backend is ``"native"`` and torch has to compute a member.
        """
        members = [self._keyed(member) for member in members]
        reason, key = reason_for_torch(), _key_of(members)
        if self._device is not None and self._device.type != "cpu":
            reason = f"the policy is on {self._device}"
        if not self._is_current(reason, key):
            self._choose(members, reason, key)
        if self._backend == "native" and any(not isinstance(one.call, NativeCall) for one in self._members):
            raise UnsupportedError(f"policy_backend='native': {'; '.join(self.said)}")
        return self._members

    def _is_current(self, reason: str | None, key: list[Any]) -> bool:
        """Return whether the last choice still holds. If so, native members have looked up their weights."""
        if (
            reason is not None
            or self._reason is not None
            or key != self._key
            or not self._snapshot.is_current()
        ):
            return False
        try:
            for member in self._members:
                if isinstance(member.call, NativeCall):
                    member.call.read_weights()
        except NotNative:  # a parameter has another form
            return False
        return True

    def _choose(self, members: list[Member], reason: str | None, key: list[Any]) -> None:
        self._key = None  # after an interrupt, the next batch chooses again
        why, by_tensordict = reason, [member for member in members if member.call is None]
        if by_tensordict and reason is None:
            why = f"{name_of(by_tensordict[0])} is only known as a module on TensorDicts"
        if why is None:
            self._members, said = self._chosen(members)
        else:
            self._members, said = members, [f"{name_of(member)}: torch ({why})" for member in members]
        self.said = tuple(said)  # one assignment: another thread may read it
        self._reason, self._key = reason, key

    def _keyed(self, member: Member) -> Member:
        """Return a member that is called on tensors, if its keys are known."""
        keys = keys_of(member.module) if member.call is None else None
        if keys is None:
            return member
        return Member(member.module, KeyedCall(member.module, keys, self._batch_size), member.kind)

    def _chosen(self, members: list[Member]) -> tuple[list[Member], list[str]]:
        """Return the members with adjacent native ones replaced by one, and a text for each of `members`."""
        rows, needs = Probe(self._fields, self._batch_size), _Needs({}, [])
        chosen: list[Member] = []
        said: list[str] = []
        call: NativeCall | None = None
        start = 0
        while start < len(members):
            end, segment, reason = _longest(members, start, rows, needs)
            if segment is None:
                chosen.append(members[start])
                said.append(f"{name_of(members[start])}: torch ({reason})")
                made: Any = members[start].call
                rows.add({path: self._outputs.get(path) for path in made.outputs})
                start += 1
                continue
            call = NativeCall(
                members[start:end], segment, self._batch_size, self._random, len(chosen), self._is_unchanged
            )
            call.read_weights()
            rows.add({path: Field(torch.Size(one.shape), one.dtype) for path, one in segment.outputs.items()})
            chosen.append(Member(ModuleSequence(members[start:end]), call))
            said += [f"{name_of(member)}: native" for member in members[start:end]]
            start = end
        if call is not None:
            call.advances = True
        self._direct, self._snapshot = None, _Snapshot(needs)
        natives = [member.call for member in chosen if isinstance(member.call, NativeCall)]
        if len(natives) < len(chosen) and any(native.segment.shares_memory for native in natives):
            # A torch member may change in place what torch would share with another entry.
            return members, [
                f"{name_of(one)}: torch (an entry shares memory with another one)" for one in members
            ]
        return chosen, said

    def _is_unchanged(self) -> bool:
        return self._snapshot.is_current()

    def direct(
        self, members: Sequence[Member], block: Block, fields: Mapping[Path, Field], actions: Sequence[Path]
    ) -> DirectProgram | None:
        """Return a program that reads and writes the columns of `block`; None if a member needs torch.

        Args:
            members: what `members` returned.
            block: the block.
            fields: the columns to write.
            actions: the paths of `fields` that are actions.
        """
        if len(members) != 1 or not isinstance(members[0].call, NativeCall):
            return None
        call = members[0].call
        outputs = call.segment.outputs
        if any(
            path not in outputs or not call.segment.emit.builder.fits(outputs[path], field, path in actions)
            for path, field in fields.items()
        ):
            return None
        positions = [position_of(block, path) for path in (*call.inputs, *fields)]
        known = [position for position in positions if position is not None]
        if len(known) < len(positions):
            return None
        key = (call, *fields.items())
        if self._direct is None or self._direct[0] != key:
            made = call.segment.emit.builder.built(
                [(outputs[path], field.dtype) for path, field in fields.items()]
            )
            self._direct = key, made
        program = self._direct[1]
        call.pack(program)
        parts = block.batch_size[:-1].numel()
        sources, targets = known[: len(call.inputs)], known[len(call.inputs) :]
        program.bind(sources, targets, parts, block.num_steps, call.key, self._random.step, 0)
        self._random.follow(program)
        return DirectProgram(program.act, call.members)


def _longest(
    members: Sequence[Member], start: int, rows: Probe, needs: _Needs
) -> tuple[int, Segment | None, str]:
    """Return the end of the longest run of native members from `start` on, its segment, and why it ends.

    The modules and names on which the answer depends are added to `needs`.
    """
    end, reason = len(members), ""
    while end > start:
        emit = Emitter(ProgramBuilder(rows.fields), run_forward)
        try:
            segment = emitted(members[start:end], emit)
            rows.compare(members[start:end], segment)
            return end, segment, reason
        except NotNative as cause:
            end, reason = start + cause.position, str(cause)
        finally:
            needs.modules.update(emit.modules)
            needs.names.extend(emit.names)
    return start, None, reason


class _Same:
    """An object that equals only itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _mark_of(value: Any) -> tuple[Any, ...]:
    """Return what tells whether an argument of a distribution has changed."""
    if isinstance(value, (bool, int, float, str)):
        return type(value), value
    if isinstance(value, Tensor) and value.numel() == 1:
        return _Same(value), float(value)  # writes through `data` or a NumPy array don't count as versions
    return _Same(value), getattr(value, "_version", None)


def _key_of(members: Sequence[Member]) -> list[Any]:
    """Return the parts of members that a choice depends on, apart from the modules' state."""
    found: list[Any] = [interaction_type()]
    for member in members:
        call = member.call
        if isinstance(call, PlainCall):
            found += (call.function, call.names, call.inputs, call.outputs, member.kind)
        elif isinstance(call, ProbabilisticCall):
            module = call.module
            found += (module, module.distribution_class, kind_of(member.kind, module))
            for name, value in module.distribution_kwargs.items():
                found += (name, *_mark_of(value))
            found += (call.inputs, call.outputs, call.on_tensors)
        elif isinstance(call, KeyedCall):
            found += (call.module, call.inputs, call.outputs, member.kind)
        else:
            found.append(member.module)
    return found
