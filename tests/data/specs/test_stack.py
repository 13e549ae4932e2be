"""Stacks of specs: what `torch.stack` makes of them, and stacks of unlike ones against the list of their members."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.specs import (
    Bounded,
    Categorical,
    Composite,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    stack_specs,
)
from gleanrl.data.specs.stack import Stack, restacked
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    SpecError,
    UnsupportedError,
)


def leaf(i):
    return Bounded(i, i + 0.5, (2, 4))


def composite(i):
    return Composite(x=Bounded(i, i + 0.5, (2, 4)), **{f"only{i}": Unbounded((2,))}, shape=(2,))


@pytest.fixture(
    params=[(leaf, 0), (leaf, 1), (leaf, 2), (composite, 0), (composite, 1)],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def stacked(request):
    """Return three unlike members and their stack."""
    torch.manual_seed(0)
    make, dim = request.param
    members = [make(i) for i in range(3)]
    return members, torch.stack(members, dim)


def test_unbinding_gives_the_members_back(stacked):
    members, spec = stacked
    assert isinstance(spec, Stack) and list(spec.unbind(spec.stack_dim)) == members
    assert spec.shape[spec.stack_dim] == 3 and spec.ndim == members[0].ndim + 1
    across = 1 if spec.stack_dim == 0 else 0
    assert [part.specs for part in spec.unbind(across)] == [tuple(m[0] for m in members)] * 2


def test_indexing_chooses_members(stacked):
    members, spec = stacked
    front = (slice(None),) * spec.stack_dim
    assert spec[(*front, 1)] == members[1] and spec[(*front, -1)] == members[2]
    assert spec[(*front, slice(1, None))].specs == tuple(members[1:])
    assert spec[(*front, [2, 0, 2])].specs == (members[2], members[0], members[2])
    assert spec[(*front, slice(1, 2))] == members[1].unsqueeze(spec.stack_dim)
    assert spec[...] == spec and spec[None].stack_dim == spec.stack_dim + 1


def test_shape_operations_keep_each_member_in_its_place(stacked):
    members, spec = stacked
    wide = spec.expand(5, *spec.shape)
    assert wide.stack_dim == spec.stack_dim + 1 and wide[3] == spec and wide.is_in(wide.rand((2,)))
    flat = wide.flatten(0, wide.stack_dim)
    assert flat.is_in(flat.rand()) and flat[-1].is_in(
        members[2].flatten(0, spec.stack_dim - 1)[0].rand()
        if spec.stack_dim > 1
        else members[2].rand()
        if spec.stack_dim == 0
        else members[2][0].rand()
    )
    assert spec.unsqueeze(0).squeeze(0) == spec
    assert flat.unflatten(0, wide.shape[: wide.stack_dim + 1]) == wide


def test_values_are_checked_position_by_position(stacked):
    members, spec = stacked
    value = spec.rand((6,))
    assert spec.is_in(value) and spec.project(value) is value
    axis = 1 + spec.stack_dim
    swapped = [spec.rand((6,)).unbind(axis)[i] for i in (1, 0, 2)]
    if isinstance(spec, Stacked):
        bad = torch.stack(swapped, axis)
        with pytest.raises(SpecError, match=f"position 0 along dimension {spec.stack_dim}: expected"):
            spec.assert_is_in(bad)
        assert spec.is_in(spec.project(bad))
    with pytest.raises(SpecError, match="expected"):
        spec.project(None)
    with pytest.raises(SchemaError, match="expected"):
        spec.to_numpy(None)


def test_drawing_zeros_and_ones(stacked):
    _, spec = stacked
    for make in (spec.rand, spec.sample, spec.zero, spec.one):
        value = make((5,))
        assert value.shape[: spec.batch_ndim + 1] == (5, *spec.batch_shape)
    assert bool((spec.zero() == 0).all()) and bool((spec.ones() == 1).all())


def test_copies_and_devices(stacked):
    members, spec = stacked
    assert spec.clone() == spec and all(a is not b for a, b in zip(spec.clone().specs, members, strict=True))
    assert spec.to("cpu").device == torch.device("cpu") and spec.to("cpu").to("cpu") != spec
    moved = spec.to("cpu")
    assert moved.to("cpu") is moved and spec != members[0] and "dim=" in repr(spec)
    assert spec.cardinality() == float("inf")


def test_restacking():
    spec = torch.stack([Categorical(2), Categorical(3)])
    assert restacked(spec, lambda t: t.flip(0)).specs == (Categorical(3), Categorical(2))
    assert restacked(spec, lambda t: t[:0]).shape == (0,)
    four = torch.stack([Categorical(n) for n in (2, 3, 4, 5)])
    square = four.unflatten(0, (2, 2))
    assert square[1, 0] == Categorical(4) and square.is_in(square.rand((3,))) and square.flatten() == four


def test_members_share_their_leading_dimensions():
    with pytest.raises(InvalidArgumentError, match="as many dimensions"):
        Stacked(Unbounded((2,)), Unbounded(()))
    with pytest.raises(InvalidArgumentError, match="dimension from 0 to 0"):
        Stacked(Unbounded((2,)), Unbounded((3,)), dim=1)
    with pytest.raises(InvalidArgumentError, match="dimension from 0 to 1"):
        StackedComposite(Composite(shape=(2,)), Composite(shape=(2,)), dim=3)
    with pytest.raises(InvalidArgumentError, match="one device"):
        Stacked(Unbounded((2,)), Unbounded((2,), device="cpu"))


def test_leaves_there_and_back():
    torch.manual_seed(0)
    for spec in (
        Stacked(Categorical(2), Categorical(5)),
        Stacked(OneHot(3, (2, 3)), OneHot(3, (2, 3), mask=torch.tensor([True, False, False])), dim=1),
    ):
        value = spec.rand()
        array = spec.to_numpy(value)
        assert torch.equal(spec.encode(array), value) and torch.equal(spec.encode(array.tolist()), value)
        assert np.array_equal(spec.to_numpy(torch.stack([value] * 4)), np.stack([array] * 4))
        assert torch.equal(spec.encode(torch.from_numpy(array)), value)
    spec = Stacked(Categorical(2), Categorical(5))
    with pytest.raises(SpecError, match="got 4"):
        spec.encode([4, 4])
    for bad in (3, [1, 2, 3]):
        with pytest.raises(SchemaError, match="2 entries along dimension 0"):
            spec.encode(bad)


def test_members_of_unlike_shapes():
    spec = torch.stack([Unbounded((2, 3)), Unbounded((2, 4))])
    assert spec.shape == (2, 2, -1) and spec.batch_ndim == 2
    assert spec[1] == Unbounded((2, 4)) and spec[:, 0].unbind() == (Unbounded((3,)), Unbounded((4,)))
    assert spec.expand(5, 2, 2, -1)[0] == spec
    for call in (spec.rand, spec.zero, spec.one):
        with pytest.raises(UnsupportedError, match=r"different shapes.*unbind\(0\)"):
            call()
    assert not spec.is_in(torch.zeros(2, 2, 3))
    with pytest.raises(InvalidArgumentError):
        spec.unbind(2)


def test_dtypes():
    spec = Stacked(Bounded(0, 1, (2,)), Bounded(1, 2, (2,)))
    assert (
        spec.dtype == torch.float32
        and spec.to(torch.float64).dtype == torch.float64
        and spec.to(torch.float32) is spec
    )
    assert spec.type_check(torch.zeros(3)) is None
    with pytest.raises(InvalidTypeError, match="'k'"):
        spec.type_check(torch.zeros(3, dtype=torch.int64), "k")
    with pytest.raises(InvalidArgumentError, match="one dtype"):
        Stacked(Unbounded((2,)), Categorical(2, (2,)))


def test_only_leaves():
    for bad in ((), (1,), (Composite(), Composite())):
        with pytest.raises(InvalidTypeError, match="leaf specs"):
            Stacked(*bad)


def test_iteration_and_cardinality():
    spec = Stacked(Categorical(2), Categorical(5))
    assert len(spec) == 2 and list(spec) == [Categorical(2), Categorical(5)] and spec.cardinality() == 10
    assert not spec.is_in(torch.zeros(3, dtype=torch.int64)) and not spec.is_in(0)


def test_equal_specs_give_one_of_their_kind():
    assert torch.stack([Unbounded((2,))] * 3) == Unbounded((3, 2))
    assert (
        torch.stack([Unbounded((2,))] * 3, 1) == Unbounded((2, 3)) == torch.stack([Unbounded((2,))] * 3, -1)
    )
    assert torch.stack((Composite(a=Categorical(2)),) * 2, dim=0) == Composite(
        a=Categorical(2, (2,)), shape=(2,)
    )
    assert torch.stack([Categorical(2)]) == Categorical(2, (1,))


def test_unlike_specs_give_a_stack():
    leaf = torch.stack([Unbounded((2,)), Unbounded((3,))])
    assert type(leaf) is Stacked and leaf == stack_specs([Unbounded((2,)), Unbounded((3,))])
    assert type(torch.stack([Composite(), Composite(a=None)])) is StackedComposite
    assert torch.stack([Categorical(2, (4,)), Categorical(3, (4,))], -1).stack_dim == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: stack_specs([]), InvalidArgumentError, "at least one"),
        (lambda: torch.stack([Unbounded(), torch.zeros(1)]), InvalidTypeError, "expected specs"),
        (lambda: torch.stack([Unbounded(), Composite()]), InvalidTypeError, "leaf specs"),
        (lambda: torch.stack([Unbounded()] * 2, out=torch.zeros(1)), UnsupportedError, "out"),
        (lambda: torch.stack([Unbounded()] * 2, 2), IndexRangeError, "dimension 2 is out of range"),
        (
            lambda: torch.stack([Categorical(3).to_one_hot_spec()] * 2, 1),
            InvalidArgumentError,
            "one value's encoding",
        ),
    ],
)
def test_what_cannot_be_stacked(call, error, message):
    with pytest.raises(error, match=message):
        call()
