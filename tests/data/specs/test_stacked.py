"""Stacks of unlike leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.specs import Bounded, Categorical, Composite, OneHot, Stacked, Unbounded
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, SchemaError, SpecError, UnsupportedError


def test_there_and_back():
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
