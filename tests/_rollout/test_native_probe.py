"""The comparison with torch refuses programs that compute other values, and has no effect on the policy."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl._arrays.schema import Field
from gleanrl._rollout.native_forward import run_forward
from gleanrl._rollout.native_modules import Emitter, MemberResults, Segment, emitted
from gleanrl._rollout.native_policies import NativePolicy
from gleanrl._rollout.native_probe import Probe
from gleanrl._rollout.native_program import NotNative, ProgramBuilder, UnaryFunction
from gleanrl._rollout.policy_modules import Member, members_of
from gleanrl._state.rng import CounterGenerator
from gleanrl.errors import UnsupportedError

FIELDS = {("x",): Field(torch.Size([4]), torch.float32)}
NO_BATCH = torch.Size()


def member(module: nn.Module, source: str = "x", target: str = "y") -> Member:
    (found,) = members_of(TensorDictModule(module, in_keys=[source], out_keys=[target]), NO_BATCH)
    return found


def emitter() -> Emitter:
    return Emitter(ProgramBuilder(FIELDS), run_forward)


def segment_of(function: UnaryFunction, emit: Emitter, source: str = "x", target: str = "y") -> MemberResults:
    """Return the results of a member that applies `function` to an input."""
    return MemberResults({(target,): emit.builder.unary(function, emit.builder.input((source,)))}, None, [])


def test_a_program_with_another_function_is_refused() -> None:
    emit, members = emitter(), [member(nn.Tanh())]
    wrong = Segment(emit, [segment_of(UnaryFunction.SIGMOID, emit)])
    with pytest.raises(NotNative, match="'y' differs"):
        Probe(FIELDS, NO_BATCH).compare(members, wrong)
    right = emitted(members, emitter())
    Probe(FIELDS, NO_BATCH).compare(members, right)


def test_the_first_wrong_member_is_named() -> None:
    emit, members = emitter(), [member(nn.Tanh()), member(nn.ReLU(), "x", "z")]
    made = [segment_of(UnaryFunction.TANH, emit), segment_of(UnaryFunction.TANH, emit, target="z")]
    with pytest.raises(NotNative, match="'z' differs") as caught:
        Probe(FIELDS, NO_BATCH).compare(members, Segment(emit, made))
    assert caught.value.position == 1


def test_nan_must_be_where_torch_has_it() -> None:
    emit, members = emitter(), [member(nn.Identity())]
    quiet = emit.builder.unary(UnaryFunction.AT_LEAST, emit.builder.input(("x",)), -1e30)
    Probe(FIELDS, NO_BATCH).compare(members, Segment(emit, [MemberResults({("y",): quiet}, None, [])]))
    emit = emitter()
    x = emit.builder.input(("x",))
    finite = emit.builder.unary(UnaryFunction.AT_MOST, x, 1e30)  # infinity becomes 1e30
    with pytest.raises(NotNative, match="differs"):
        Probe(FIELDS, NO_BATCH).compare(members, Segment(emit, [MemberResults({("y",): finite}, None, [])]))


class Counting(nn.Module):
    """Counts its calls, so that it can't run natively, and draws a random number."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.rand(())


def test_earlier_members_and_generators_are_unchanged() -> None:
    counting = Counting()
    members = [member(counting, target="h"), member(nn.Tanh(), "h")]
    before = torch.get_rng_state()
    native = NativePolicy("auto", CounterGenerator(), FIELDS, {("h",): FIELDS[("x",)]}, NO_BATCH)
    with torch.no_grad():
        native.members(members)
    assert native.said[1] == "Tanh: native"
    assert counting.calls == 0 and torch.equal(torch.get_rng_state(), before)


def test_a_mask_without_dimensions_is_probed() -> None:
    fields = {**FIELDS, ("mask",): Field(torch.Size([]), torch.bool)}
    members = [member(nn.Tanh())]
    Probe(fields, NO_BATCH).compare(members, emitted(members, emitter()))


class Locked(nn.Module):
    """Can't be copied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    def __deepcopy__(self, memo: object) -> Locked:
        raise TypeError("can't be copied")


def test_a_member_that_cannot_be_copied_is_left_to_torch() -> None:
    native = NativePolicy("auto", CounterGenerator(), FIELDS, {}, NO_BATCH)
    members = [member(Locked())]
    with torch.no_grad():
        assert native.members(members) == members
    assert native.said == ("Locked: torch (Locked can't be copied for the comparison)",)


def test_the_native_backend_refuses_at_each_block() -> None:
    native = NativePolicy("native", CounterGenerator(), FIELDS, {}, NO_BATCH)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="Counting: torch"):
            native.members([member(Counting())])
