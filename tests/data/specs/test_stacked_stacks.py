"""`torch.stack` returns one spec for equal specs and a stack for different ones."""

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
from gleanrl.errors import (
    IndexRangeError,
    InvalidArgumentError,
    InvalidTypeError,
    SchemaError,
    SpecError,
    UnsupportedError,
)


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_members_of_unlike_shapes():
    spec = torch.stack([Unbounded((2, 3)), Unbounded((2, 4))])
    assert spec.shape == (2, 2, -1) and spec.batch_ndim == 2
    assert spec[1] == Unbounded((2, 4)) and spec[:, 0].unbind() == (Unbounded((3,)), Unbounded((4,)))
    assert spec.expand(5, 2, 2, -1)[0] == spec
    for value in (spec.rand(), spec.zero(), spec.one(), spec.encode([np.zeros((2, 3)), np.ones((2, 4))])):
        assert value.is_nested and [part.shape for part in value.unbind()] == [(2, 3), (2, 4)]
        assert spec.is_in(value) and spec.project(value) is value
    assert not spec.is_in(torch.zeros(2, 2, 3))
    with pytest.raises(UnsupportedError, match=r"different shapes.*dimension 0 only.*unbind\(0\)"):
        spec.rand((3,))
    bounded = torch.stack([Bounded(0, 1, (1,)), Bounded(0, 1, (2,))])
    outside = torch.nested.nested_tensor([torch.zeros(1), torch.ones(2) * 3])
    assert not bounded.is_in(outside) and bounded.project(outside).unbind()[1].tolist() == [1, 1]
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


def test_domain_of_a_stack_equals_the_domain_of_its_members():
    assert Stacked(Bounded(0, 1, (2,)), Bounded(0, 2, (2,))).domain == "continuous"
    assert Stacked(Categorical(2), Categorical(3)).domain == "discrete"
    assert Stacked(Bounded(0, 1, ()), Bounded(0, 1, (), domain="discrete")).domain is None


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
def test_specs_that_cannot_be_stacked_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_all_combinations():
    spec = torch.stack([Categorical(2), Categorical(3)])
    assert spec.enumerate().tolist() == [[a, b] for a in range(2) for b in range(3)]
    assert len(spec.enumerate()) == spec.cardinality() == 6
