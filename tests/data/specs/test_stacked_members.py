"""`torch.stack` of different specs behaves as the list of its members."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Bounded, Categorical, Composite, Stacked, StackedComposite, Unbounded
from gleanrl.data.specs.stacked import StackedMembers, restacked
from gleanrl.errors import InvalidArgumentError, SchemaError, SpecError


def leaf(i):
    return Bounded(i, i + 0.5, (2, 4))


def composite(i):
    return Composite(x=Bounded(i, i + 0.5, (2, 4)), **{f"only{i}": Unbounded((2,))}, shape=(2,))


@pytest.fixture(
    params=[(leaf, 0), (leaf, 1), (leaf, 2), (composite, 0), (composite, 1)],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def stacked(request):
    """Return three different members and their stack."""
    torch.manual_seed(0)
    make, dim = request.param
    members = [make(i) for i in range(3)]
    return members, torch.stack(members, dim)


def test_unbinding_gives_the_members_back(stacked):
    members, spec = stacked
    assert isinstance(spec, StackedMembers) and list(spec.unbind(spec.stack_dim)) == members
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
    moved = spec.to("meta")
    assert moved.device == torch.device("meta") and moved != spec and moved.to("meta") is moved
    assert (
        moved.clear_device_() is moved
        and spec != members[0]
        and spec.dim == spec.stack_dim
        and "dim=" in repr(spec)
    )
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
        Stacked(Unbounded((2,)), Unbounded((2,), device="meta"))
