"""Comparison of native programs with torch on fixed rows, before a policy runs natively.

Each layer may differ by the rounding of its sums, and each choice only where two scores are equal up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn

from gleanrl._arrays.schema import Field
from gleanrl._arrays.tensordicts import Path, as_key
from gleanrl._rollout.native_modules import MemberResults, Segment, name_of
from gleanrl._rollout.native_program import NotNative, ProgramBuilder, Value, bind_row
from gleanrl._rollout.policy_modules import Member, ProbabilisticCall, Values, kind_of
from gleanrl._state.rng import GlobalGenerators

_ROWS = 8
"""Rows that a policy is compared on: zeros, ones, negative, random, positive, large, NaN, infinity."""


class Probe:
    """Fixed rows of the values that a member of a policy finds.

    Only members that the core computes are called: a copy of each, with the random generators put back. Other members
    may have effects outside of them (a counter in a closure, running statistics), so their outputs get fixed values.

    Args:
        fields: the root columns.
        batch_size: the batch size of a row.
    """

    def __init__(self, fields: Mapping[Path, Field], batch_size: torch.Size) -> None:
        self.fields: dict[Path, Field] = dict(fields)
        """The columns that the next member finds: root columns, and outputs of earlier members."""
        self._batch_size = batch_size
        self._values: list[Values] = [self._row(number, self.fields) for number in range(_ROWS)]

    def add(self, outputs: Mapping[Path, Field | None]) -> None:
        """Add the outputs of a member; None for a column whose form isn't known, which later members can't read."""
        for path in outputs:
            self.fields.pop(path, None)
        known = {path: field for path, field in outputs.items() if field is not None}
        self.fields.update(known)
        for number, row in enumerate(self._values):
            for path in outputs:
                row.pop(path, None)
            row.update(self._row(number, known, finite=True))  # a distribution refuses other parameters

    def _row(self, number: int, fields: Mapping[Path, Field], finite: bool = False) -> Values:
        generator = torch.Generator().manual_seed(number)
        row = {}
        for path, field in fields.items():
            shape = (*self._batch_size, *field.shape)
            if field.is_list or field.dtype not in (torch.float32, torch.bool):
                continue
            if field.dtype is torch.bool:
                value = torch.rand(shape, generator=generator) < 0.7
                if value.dim():
                    value[..., :1] = True  # a mask allows a choice
            else:
                noise = torch.randn(shape, generator=generator)
                zeros, ones = torch.zeros(shape), torch.ones(shape)
                value = (zeros, ones, -noise.abs(), noise, noise.abs() * 3, noise * 1e3, noise, noise)[number]
                if number >= _ROWS - 2 and value.numel() and not finite:
                    value.view(-1)[0] = float("nan") if number == _ROWS - 2 else float("inf")
            row[path] = value
        return row

    @staticmethod
    def _after(member: Member, row: Values) -> Values:
        """Return the row with the outputs of a member; without any value if it raised."""
        values = dict(row)
        try:
            member.on_values()(values)
        except Exception:  # any error of a user's module, for example for NaN
            values = {}
        return values

    def compare(self, members: Sequence[Member], segment: Segment) -> None:
        """Raise `NotNative` unless the core computes the same values as torch, up to rounding.

        Args:
            members: the members of the segment.
            segment: their operations.
        """
        wanted = [value for one in segment.members for value in one.outputs.values()]
        wanted += [
            value for one in segment.members for _, *both in one.layers for values in both for value in values
        ]
        wanted += segment.emit.builder.scores.values()
        num_compared = 0
        with GlobalGenerators().preserved():
            for row in self._values:
                skipped = segment.emit.builder.has_exact_gelu and _has_infinity(row)
                if not skipped and all(path in row for path in segment.inputs):
                    ours = self._native(segment, row, wanted)
                    if ours is not None:  # otherwise torch computes such a row
                        self._compare_row(members, segment, row, ours)
                        num_compared += 1
        if not num_compared:
            raise NotNative("the core computes none of the fixed rows")

    def _compare_row(
        self, members: Sequence[Member], segment: Segment, row: Values, ours: Mapping[Value, Tensor]
    ) -> None:
        values: Values = {path: row[path] for path in segment.inputs}
        for position, (member, made) in enumerate(zip(members, segment.members, strict=True)):
            try:
                for module, inputs, outputs in made.layers:
                    _compare_layer(module, [ours[one] for one in inputs], [ours[one] for one in outputs])
                self._compare_member(member, made, segment.emit.builder, ours, values)
            except NotNative as cause:
                cause.position = position
                raise
            values.update({path: ours[value] for path, value in made.outputs.items()})

    def _compare_member(
        self,
        member: Member,
        made: MemberResults,
        builder: ProgramBuilder,
        ours: Mapping[Value, Tensor],
        values: Values,
    ) -> None:
        call: Any = member.call
        if isinstance(call, ProbabilisticCall):
            _compare_sample(
                call, member, values, {path: ours[value] for path, value in made.outputs.items()}, made
            )
            return
        theirs = self._after(_copy_of(member), values)
        for path, value in made.outputs.items():
            name, scores = as_key(path), builder.scores.get(value.slot)
            if value in builder.drawn:
                _require_form(name, ours[value], theirs.get(path))
            elif scores is None or not _is_tie(ours[value], theirs.get(path), ours[scores]):
                _compare(name, ours[value], theirs.get(path), values.values())

    def _native(self, segment: Segment, row: Values, wanted: Sequence[Value]) -> dict[Value, Tensor] | None:
        """Return the core's values; None if it leaves the row to torch."""
        distinct = [*dict.fromkeys(wanted)]
        program = segment.emit.builder.built([(value, value.dtype) for value in distinct])
        tensors = [weight.read() for weight in segment.emit.builder.weights]
        program.pack([(one.data_ptr(), one.numel()) for one in tensors])
        made = [torch.empty((*self._batch_size, *value.shape), dtype=value.dtype) for value in distinct]
        sources = [row[path].contiguous() for path in segment.inputs]
        bind_row(program, sources, made, self._batch_size, 1, 0)
        return dict(zip(distinct, made, strict=True)) if program.act(0) else None


def _copy_of(member: Member) -> Member:
    """Return a copy of a member, because a call may change its parameters or its state."""
    try:
        return copy.deepcopy(member)
    except Exception as cause:  # a user's module may raise any error when it is copied
        raise NotNative(f"{name_of(member)} can't be copied for the comparison") from cause


def _has_infinity(row: Values) -> bool:
    return any(_is_tensor(value) and bool(value.isinf().any()) for value in row.values())


def _is_tensor(value: Any) -> bool:
    return type(value) is Tensor


_TOLERANCE = 1e-5


def _compare_layer(module: nn.Module, inputs: Sequence[Tensor], ours: Sequence[Tensor]) -> None:
    """Raise `NotNative` unless the results of a layer are torch's, up to the rounding of its sums."""
    theirs = module(*(one.clone() for one in inputs))
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(module, nn.Linear):
            bias = None if module.bias is None else module.bias.abs()
            allowed = nn.functional.linear(inputs[0].abs(), module.weight.abs(), bias)
        else:
            allowed = other.abs() + _largest(inputs) + 1.0
        _require_close(type(module).__name__, mine, other, allowed * _TOLERANCE)


def _compare(name: Any, mine: Tensor, theirs: Any, inputs: Any) -> None:
    """Raise `NotNative` unless a member's output is torch's, up to rounding."""
    _require_form(name, mine, theirs)
    if not mine.dtype.is_floating_point:
        if not torch.equal(mine, theirs):
            raise NotNative(f"{name!r} differs from torch's")
        return
    _require_close(name, mine, theirs, torch.tensor(10 * _TOLERANCE * (1.0 + _largest((theirs, *inputs)))))


def _require_form(name: Any, mine: Tensor, theirs: Any) -> None:
    """Raise `NotNative` unless a member's output has torch's shape and dtype."""
    if not _is_tensor(theirs) or theirs.shape != mine.shape or theirs.dtype is not mine.dtype:
        said = (
            f"{tuple(theirs.shape)} {theirs.dtype}" if isinstance(theirs, Tensor) else type(theirs).__name__
        )
        raise NotNative(f"{name!r} is {said} in torch and {tuple(mine.shape)} {mine.dtype} natively")


def _is_tie(mine: Tensor, theirs: Any, scores: Tensor) -> bool:
    """Return whether two choices differ only where the scores of both are equal up to rounding."""
    if not _is_tensor(theirs) or theirs.shape != mine.shape or theirs.dtype is not mine.dtype:
        return False
    if mine.shape != scores.shape and mine.numel() != scores[..., 0].numel():
        return False  # a one-hot vector with more places than scores
    a, b = (
        (one.argmax(-1) if one.shape == scores.shape else one.reshape(scores.shape[:-1]))
        for one in (mine, theirs)
    )
    margin = scores.gather(-1, a.unsqueeze(-1)) - scores.gather(-1, b.unsqueeze(-1))
    return bool((margin.abs() <= _TOLERANCE * (1.0 + _largest((scores,)))).all())


def _largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value of finite numbers; 0 if there are none."""
    floats = [one for one in tensors if one.numel() and one.is_floating_point()]
    return max([float(one.nan_to_num(0.0, 0.0, 0.0).abs().amax()) for one in floats], default=0.0)


def _require_close(name: Any, mine: Tensor, theirs: Tensor, allowed: Tensor) -> None:
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if not bool((same | ((mine - theirs).abs() <= allowed)).all()):
        raise NotNative(f"{name!r} differs from torch's by more than rounding")


def _compare_sample(
    call: ProbabilisticCall, member: Member, values: Values, mine: Values, made: MemberResults
) -> None:
    """Raise `NotNative` unless torch gives the core's sample the same log-probability, or draws the same mode."""
    drawn = mine[call.outputs[0]]
    kind = kind_of(member.kind, call.module)
    try:
        distribution: Any = call.distribution(dict(values))
        if kind is not InteractionType.RANDOM:
            theirs = call.module._dist_sample(distribution, interaction_type=kind)
            _compare(as_key(call.outputs[0]), drawn, theirs, values.values())
        else:
            example = distribution.sample()
            if example.shape != drawn.shape or example.dtype is not drawn.dtype:
                raise NotNative(f"samples are {tuple(example.shape)} {example.dtype} in torch")
        if made.score is None:
            return
        theirs = distribution.log_prob(drawn)
    except (ValueError, RuntimeError, TypeError) as cause:  # torch refuses the parameters or the sample
        raise NotNative(f"torch refuses a sample or its parameters: {cause!s:.60}") from cause
    score = mine[made.score]
    # A squashed sample near its bounds loses the digits that its log-probability needs.
    allowed = 1e-3 + 1e-3 * theirs.abs()
    if score.shape != theirs.shape:
        raise NotNative(f"log-probabilities are {tuple(theirs.shape)} in torch")
    close = ((score - theirs).abs() <= allowed) | (score.isnan() & theirs.isnan()) | (theirs.abs() > 10)
    if not bool(close.all()):
        raise NotNative("log-probabilities differ from torch's")
