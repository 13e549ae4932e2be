"""Integers and one-hot vectors share their behaviour, for one choice and for several."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Categorical, MultiCategorical, MultiOneHot, OneHot
from gleanrl.data.specs.choices import ending_with
from gleanrl.errors import InvalidArgumentError, SpecError, UnsupportedError
from tests.data.specs.cases import bools

BOTH = [(Categorical, OneHot, 3), (MultiCategorical, MultiOneHot, [2, 1])]


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_each_encoding_converts_to_the_other(integers, rows, n):
    for shape in ((), (4,)):
        mask = bools("101")
        batch = integers(n, mask=mask).expand(*shape, *integers(n).shape)
        twin = batch.to_one_hot_spec()
        assert type(twin) is rows and twin.to_categorical_spec() == batch
        assert twin.to_one_hot_spec() is twin and batch.to_categorical_spec() is batch
        value = batch.rand((5,))
        assert torch.equal(twin.to_categorical(batch.to_one_hot(value)), value)


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_all_zeros_are_read_as_the_first_choice(integers, rows, n):
    for spec in (rows(n), rows(n, dtype=torch.int64), rows(n, mask=bools("011")), rows(n).expand(2, 3)):
        zero, first = spec.zero((4,)), spec.to_categorical_spec().zero((4,))
        assert (
            torch.equal(spec.to_categorical(zero), first) and spec.to_numpy(zero).tolist() == first.tolist()
        )
        assert torch.equal(spec.to_one_hot(zero), zero) and not spec.is_in(zero)
        for read in (spec.to_numpy, spec.to_categorical, spec.to_one_hot):
            with pytest.raises(SpecError, match=f"{read.__name__}: expected .*got"):
                read(zero, safe=True)
            with pytest.raises(SpecError, match=f"{read.__name__}: expected .*got"):
                read(spec.one())
    assert spec.is_in(spec.encode(spec.to_numpy(spec.zero())))


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_a_batch_of_size_zero_can_be_drawn_and_checked(integers, rows, n):
    for spec in (integers(n, mask=bools("101")), integers(n), rows(n)):
        empty = spec.expand(2, *spec.shape)[:0]
        if spec.space.index_dims == ():
            assert empty.is_in(empty.rand((3,)))


@pytest.mark.parametrize(("integers", "rows", "n"), BOTH)
def test_dtypes_that_cannot_hold_the_values_are_refused(integers, rows, n):
    with pytest.raises(InvalidArgumentError, match="integer dtype"):
        integers(n).to(torch.complex64)
    with pytest.raises(InvalidArgumentError, match="uint64"):
        rows(n).to(torch.uint64)
    assert rows(n).to(torch.float16).rand().dtype == torch.float16


def test_helpers():
    assert ending_with("x", 3, None) == (3,) == ending_with("x", 3, 3) and ending_with("x", 3, (2, 3)) == (
        2,
        3,
    )
    with pytest.raises(InvalidArgumentError, match=r"ends with 3, got \(2,\)"):
        ending_with("x", 3, (2,))


JOINT = torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.int8)
"""Allowed combinations of a choice among two and a choice among three."""


@pytest.mark.parametrize("kind", [MultiCategorical, MultiOneHot])
@pytest.mark.parametrize("lead", [(), (4,)])
def test_joint_mask_allows_combinations_and_each_occurs_equally_often(kind, lead):
    spec = kind([2, 3]).expand(*lead, *kind([2, 3]).shape)
    spec.update_mask(JOINT)
    assert spec.mask.shape == (*lead, 2, 3) and spec.mask.dtype is torch.bool
    drawn = spec.to_categorical(spec.rand((3000,))).reshape(-1, 2)
    combinations, counts = drawn.unique(dim=0, return_counts=True)
    assert combinations.tolist() == [[0, 0], [1, 1], [1, 2]]
    assert bool(((counts / len(drawn) - 1 / 3).abs() < 0.05).all())


@pytest.mark.parametrize("kind", [MultiCategorical, MultiOneHot])
def test_joint_mask_is_obeyed_by_checks_projection_enumeration_and_copies(kind):
    spec = kind([2, 3], mask=JOINT)
    values = {pair: kind([2, 3]).encode(list(pair)) for pair in ((1, 1), (1, 0), (0, 2))}
    assert [spec.is_in(value) for value in values.values()] == [True, False, False]
    assert spec.is_in(spec.project(values[0, 2].clone()))
    assert spec.to_categorical(spec.project(values[1, 0].clone())).tolist() in ([0, 0], [1, 1])
    assert spec.to_categorical(spec.enumerate(use_mask=True)).tolist() == [[0, 0], [1, 1], [1, 2]]
    for copy in (spec.clone(), spec.to_categorical_spec(), spec.to_one_hot_spec()):
        assert torch.equal(copy.mask, JOINT.bool()) and copy.is_in(copy.rand((50,)))
    assert torch.equal(torch.stack([spec, spec]).mask, JOINT.bool().expand(2, 2, 3))
    with pytest.raises(InvalidArgumentError, match="expected a True"):
        spec.update_mask(torch.zeros(2, 3, dtype=torch.bool))


def test_one_of_several_choices_with_a_joint_mask_has_the_choices_that_occur():
    spec = MultiCategorical([2, 3, 2], mask=torch.eye(2, 3).bool().unsqueeze(-1).expand(2, 3, 2))
    assert spec[..., 1].mask.tolist() == [True, True, False]
    with pytest.raises(UnsupportedError, match="joint mask"):
        spec[..., :2]


def test_mask_of_a_row_is_no_joint_one_where_both_could_be_meant():
    spec = MultiCategorical([5, 5])
    spec.update_mask(torch.arange(10) % 2 == 0)
    assert spec.mask.shape == (10,) and bool((spec.rand((40,)) % 2 == torch.tensor([0, 1])).all())
