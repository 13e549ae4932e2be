"""Shape operations change a spec as torch changes its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)
from gleanrl.data.specs.base import as_size, blank, concrete, fits, outcome, repeated
from gleanrl.errors import IndexRangeError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from tests.data.specs.cases import COMPOSITES, LEAVES, bools


@pytest.fixture(params=[*LEAVES, *COMPOSITES])
def spec(request):
    torch.manual_seed(0)
    return {**LEAVES, **COMPOSITES}[request.param]()


OPERATIONS = {
    "expand": lambda x, tail: x.expand(2, 4, 3, *tail),
    "reshape": lambda x, tail: x.reshape(2, 6, *tail),
    "reshape -1": lambda x, tail: x.reshape(-1, *tail),
    "view": lambda x, tail: x.view(3, 4, *tail),
    "flatten": lambda x, tail: x.flatten(0, 1),
    "unflatten": lambda x, tail: x.unflatten(0, (2, 2)),
    "unsqueeze": lambda x, tail: x.unsqueeze(1),
    "unsqueeze first": lambda x, tail: x.unsqueeze(0),
    "squeeze nothing": lambda x, tail: x.squeeze(0),
    "int": lambda x, tail: x[1],
    "two ints": lambda x, tail: x[1, -1],
    "slice": lambda x, tail: x[1:3],
    "step": lambda x, tail: x[:, ::2],
    "none": lambda x, tail: x[None, 1],
    "ellipsis": lambda x, tail: x[2, ...],
    "list": lambda x, tail: x[[0, 0, 3]],
    "index_select": lambda x, tail: x.index_select(1, torch.tensor([2, 0])),
    "index_select one": lambda x, tail: x.index_select(0, torch.tensor(3)),
    "tensor": lambda x, tail: x[torch.tensor([[1, 2], [0, 3]])],
    "array": lambda x, tail: x[np.array([2, 1])],
    "mask": lambda x, tail: x[torch.tensor([True, False, True, True])],
    "two-dimensional mask": lambda x, tail: x[torch.eye(4, 3, dtype=torch.bool)],
    "tensors apart": lambda x, tail: x[torch.tensor([0, 1]), :, None][:, 0],
}


def test_the_spec_follows_its_values(spec):
    wide = spec.expand(4, 3, *spec.shape)
    value = wide.rand((2,))
    for name, operation in OPERATIONS.items():
        changed = operation(wide, spec.shape)
        model = operation(torch.zeros(4, 3, 5), (5,))
        assert changed.shape == (*model.shape[:-1], *spec.shape), name
        assert changed.is_in(changed.rand((2,))), name
        if isinstance(value, torch.Tensor) and _indexable(value.dtype):
            assert all(changed.is_in(operation(one, spec.shape)) for one in value), name


def _indexable(dtype: torch.dtype) -> bool:
    try:
        return torch.zeros(2, dtype=dtype)[[0]].shape == (1,)
    except RuntimeError:  # unsigned integers in torch 2.6
        return False


def test_expanding_and_taking_out_again(spec):
    wide = spec.expand(4, 3, *spec.shape)
    assert wide.ndim == wide.ndimension() == spec.ndim + 2
    assert wide[2, 1] == spec and wide.flatten(0, 1)[7] == spec
    assert wide.expand(4, 3, *spec.shape) == wide == wide.reshape(wide.shape) == wide[...]
    assert wide.unsqueeze(1).squeeze(1) == wide and wide.unsqueeze(0)[0] == wide
    assert spec.unsqueeze(0).squeeze(0) == spec and spec[None][0] == spec


def test_stacking_and_unbinding(spec):
    wide = spec.expand(4, 3, *spec.shape)
    for parts in (wide.unbind(0), wide.unbind(1)):
        assert all(part == parts[0] for part in parts)
    twins = [spec, spec.clone(), spec]
    stacked = torch.stack(twins)
    assert stacked == spec.expand(3, *spec.shape)
    assert list(stacked.unbind()) == twins
    for dim in range(spec.batch_ndim + 1):
        assert list(torch.stack(twins, dim).unbind(dim)) == twins


def test_the_new_spec_shares_no_state(spec):
    wide, first = spec.expand(2, *spec.shape), spec.clone()
    if hasattr(wide, "update_mask"):
        wide.update_mask(torch.ones_like(wide.mask) if wide.mask is not None else None)
        assert spec == first


def test_bounds_and_masks_go_where_their_elements_go():
    low = torch.arange(6.0).reshape(2, 3)
    spec = Bounded(low, low + 1)
    assert torch.equal(spec[1].low, low[1]) and torch.equal(spec.flatten().high, low.flatten() + 1)
    assert torch.equal(spec[:, 2].low, low[:, 2]) and torch.equal(spec.unbind(1)[1].low, low[:, 1])
    assert torch.equal(spec.expand(2, 2, 3).low, low.expand(2, 2, 3))
    masked = OneHot(3, (2, 3), mask=bools("100 011"))
    assert masked[0].mask.tolist() == [True, False, False]
    assert masked[[1, 0]].mask.tolist() == bools("011 100").tolist()
    assert Categorical(3, (2,), mask=bools("100 011"))[1].mask.tolist() == [False, True, True]


def test_squeeze_keeps_the_dimensions_of_a_value():
    assert OneHot(1, (1, 2, 1, 1)).squeeze().shape == (2, 1)
    assert Bounded(0, 1, (1, 2, 1)).squeeze().shape == (2,)
    assert Bounded(0, 1, (1, 2, 1)).squeeze(-1).shape == (1, 2)


def test_minus_one_keeps_a_dimension():
    assert OneHot(3, (1, 3)).expand(5, -1).shape == (5, 3)
    assert Unbounded((1, 2)).expand(4, -1, 2).shape == (4, 1, 2)
    assert OneHot(3, (4, 3)).reshape(2, -1, 3).shape == (2, 2, 3)
    assert Unbounded((0, 3)).reshape(3, 0).shape == (3, 0)


def test_a_single_value_has_its_size():
    assert Unbounded((2, 3)).numel() == 6 and Unbounded(()).numel() == 1
    assert len(Unbounded((2, 3))) == 2 and [s.shape for s in Unbounded((2, 3))] == [(3,), (3,)]
    assert bool(Unbounded(())) and bool(Unbounded((0,)))
    opened = torch.stack([Composite(shape=(-1, 2)), Composite(a=None, shape=(-1, 2))], 1)
    for spec in (Unbounded(()), Unbounded((-1, 3)), opened):
        with pytest.raises(InvalidTypeError, match="fixed first dimension"):
            len(spec)


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: s.expand(2, 3, 5),
        lambda s: s.expand(2, 2, 5),
        lambda s: s.reshape(2, 5),
        lambda s: s.expand(3, 4),
        lambda s: s.expand(4),
        lambda s: s.reshape(8),
        lambda s: s.reshape(3, 4),
        lambda s: s.flatten(),
        lambda s: s.flatten(1, 0),
        lambda s: s.unflatten(0, (3, 3)),
        lambda s: s.unflatten(-1, (2, 2)),
        lambda s: s.unsqueeze(-1),
        lambda s: s.unbind(-1),
        lambda s: s.squeeze(1),
        lambda s: s[0, 1],
        lambda s: s[0, :2],
        lambda s: s[0, ..., 1],
        lambda s: s[0][:1],
        lambda s: s[0][..., 0],
        lambda s: s.index_select(1, torch.tensor([0])),
    ],
)
def test_operations_that_split_a_value_are_refused(operation):
    with pytest.raises(InvalidArgumentError, match="expand|reshape|flatten|unsqueeze|unbind|squeeze|index"):
        operation(OneHot(4, (2, 4)))


@pytest.mark.parametrize(
    "make", [lambda shape: OneHot(4, (*shape, 4)), lambda shape: MultiOneHot([1, 3], (*shape, 4))]
)
def test_an_ellipsis_ends_where_a_value_begins(make):
    spec = make((2, 3))
    assert spec[..., 0] == make((2,)) and spec[..., :1] == make((2, 1)) and spec[..., [0, 0]] == make((2, 2))
    assert spec[..., None] == make((2, 3, 1)) and spec[0, ..., None] == make((3, 1))
    assert (
        make(())[..., None] == make((1,)) and spec[..., None, :] == make((2, 3, 1)) and spec[..., :] == spec
    )
    stacked = torch.stack([OneHot(4, (3, 4)), OneHot(4, (3, 4), mask=bools("1000"))])
    assert stacked[..., 0] == stacked[:, 0] and stacked[..., 1, None][1] == OneHot(
        4, (1, 4), mask=bools("1000")
    )


def test_full_slices_reach_over_a_value():
    spec = MultiOneHot([2, 2], (3, 4))
    assert (
        spec[:, :] == spec == spec[..., :] and spec[1, :] == spec[1] and spec[None, :, :].shape == (1, 3, 4)
    )


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (lambda s: s[2], IndexRangeError),
        (lambda s: s[-3], IndexRangeError),
        (lambda s: s[torch.tensor([0, 2])], IndexRangeError),
        (lambda s: s[torch.ones(3, dtype=torch.bool)], IndexRangeError),
        (lambda s: s[0, 0, 0], IndexRangeError),
        (lambda s: s[..., ...], IndexRangeError),
        (lambda s: s.unsqueeze(4), IndexRangeError),
        (lambda s: s.unbind(2), IndexRangeError),
        (lambda s: s["a"], InvalidTypeError),
        (lambda s: s[1.5], InvalidTypeError),
        (lambda s: s[True], InvalidTypeError),
        (lambda s: s.index_select(0, torch.tensor([0, 2])), InvalidArgumentError),
        (lambda s: s.index_select(0, torch.tensor([-1])), InvalidArgumentError),
        (lambda s: s.index_select(0, torch.tensor([True, False])), InvalidArgumentError),
        (lambda s: s.index_select(2, torch.tensor([0])), IndexRangeError),
        (lambda s: s.expand("ab"), InvalidTypeError),
        (lambda s: s.expand(1.5, 2, 3), InvalidTypeError),
        (lambda s: s.expand(5, 3), InvalidArgumentError),
    ],
)
def test_bad_indices_and_shapes(operation, error):
    with pytest.raises(error):
        operation(Binary(shape=(2, 3)))


def test_helpers():
    assert as_size((2, 3)) == as_size(((2, 3),)) == as_size((torch.Size((2, 3)),)) == (2, 3)
    assert as_size((np.int64(2),)) == (2,) and as_size(((),)) == ()
    assert blank((4, 5)).shape == (4, 5) and blank(()).shape == ()


def test_repeating():
    assert repeated(Unbounded((2,)), 1, 3).shape == (2, 3) == repeated(Unbounded((2,)), -1, 3).shape
    with pytest.raises(IndexRangeError, match="dimension 3 is out of range"):
        repeated(Unbounded((2,)), 3, 3)


def test_a_spec_is_a_sequence_along_its_first_dimension():
    spec = Bounded(torch.tensor([0.0, 1.0]), 2)
    assert len(spec) == 2 and list(spec) == [Bounded(0, 2, ()), Bounded(1, 2, ())]
    with pytest.raises(InvalidTypeError, match="fixed first dimension"):
        len(spec[0])


ANY_SIZE = [
    Binary(shape=(-1, 3)),
    Bounded(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]]), (2, -1)),
    Categorical(3, (-1,), mask=torch.tensor([True, False, True])),
    Composite(a=OneHot(3, (-1, 3)), shape=(-1,)),
    MultiCategorical([2, 3], (-1, 2)),
    MultiOneHot([2, 3], (-1, 5), mask=torch.tensor([True, False, True, True, False])),
    NonTensor((-1,)),
    OneHot(3, (-1, 3)),
    Unbounded((-1, -1), dtype=torch.uint8),
]


@pytest.mark.parametrize("spec", ANY_SIZE, ids=repr)
def test_dimensions_of_any_size(spec):
    dim = list(spec.shape).index(-1)
    value = spec.rand((4,))
    assert value.shape[1 + dim] == 1 and spec.is_in(value)
    wide = value.expand(*value.shape[: 1 + dim], 5, *value.shape[2 + dim :])
    assert spec.is_in(wide) and spec.project(wide) is wide
    assert (
        spec.expand(3, *spec.shape).shape == (3, *spec.shape) and spec.unsqueeze(0)[0] == spec == spec.clone()
    )
    assert (
        torch.stack([spec, spec])[1] == spec and torch.stack([spec, spec]).flatten(0, 1 + dim).shape[0] == -1
    )


def test_sizes():
    assert concrete((2, -1)) == (2, 1) and outcome(blank((2, -1)).flatten()) == (-1,)
    assert (
        fits((4, 2, 5), (2, -1)) and not fits((5,), (2, -1)) and not fits((3, 5), (2, -1)) and fits((3,), ())
    )


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (lambda: Bounded(0, 1, (3,)), lambda s: setattr(s.space, "low", -1)),
        (lambda: Bounded(torch.zeros(3), torch.ones(3)), lambda s: setattr(s.space, "high", 3)),
        (lambda: Categorical(3, (3,)), lambda s: s.update_mask(torch.tensor([True, False, False]))),
        (lambda: OneHot(3, (3, 3)), lambda s: s.update_mask(None)),
        (lambda: MultiCategorical([3, 2], (3, 2)), lambda s: s.update_mask(torch.tensor([1, 0, 0, 1, 1]))),
        (lambda: Categorical(-1, (3,)), lambda s: s.set_provisional_n(4)),
        (lambda: Composite(k=Unbounded((3,)), shape=(3,)), lambda s: s.set("x", Unbounded())),
        (lambda: Composite(k=Unbounded((3,)), shape=(3,)), lambda s: s.__delitem__("k")),
        (
            lambda: Composite(k={"x": Bounded(0, 1, (3,))}, shape=(3,)),
            lambda s: setattr(s["k", "x"].space, "low", 9),
        ),
    ],
)
@pytest.mark.parametrize(
    "part", [lambda s: s[0], lambda s: s[:2][0], lambda s: s.unbind(0)[1], lambda s: s[[1, 2]][0]]
)
def test_part_of_a_spec_refuses_changes_and_its_clone_takes_them(spec, change, part):
    whole = spec()
    before = whole.clone()
    with pytest.raises(UnsupportedError, match=r"clone\(\)"):
        change(part(whole))
    assert whole == before
    change(part(whole).clone())
    assert whole == before


def test_part_that_is_put_into_a_composite_can_be_changed_there():
    whole = Bounded(0, 1, (3, 2))
    holder = Composite(k=whole[0])
    holder["k"].space.low -= 1
    assert holder["k"].low.tolist() == [-1, -1] and not bool(whole.low.any())


def test_bounds_of_a_new_spec_can_be_changed_in_place():
    spec = Bounded(0, 1, (3,))
    spec.space.low += 1
    assert spec.low.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "index", [slice(2, 0, -1), slice(None, None, -1), slice(None, None, -2), (Ellipsis, slice(3, None, -1))]
)
def test_slices_with_negative_steps_select_as_numpy(index):
    values = torch.arange(20.0).reshape(5, 4)
    spec = Bounded(values, values + 1)
    assert spec[index].low.tolist() == values.numpy()[index].tolist()
    assert Unbounded((5, 4))[index].shape == values.numpy()[index].shape


def test_slices_with_negative_steps_reverse_composites_and_stacks():
    composite = Composite(k=Bounded(torch.arange(3.0), torch.arange(3.0) + 1), shape=(3,))
    assert composite[::-1]["k"].low.tolist() == [2, 1, 0]
    stacked = torch.stack([Categorical(3), Categorical(4)])
    assert [spec.n for spec in stacked[::-1].specs] == [4, 3]
    with pytest.raises(InvalidArgumentError, match="part of one value"):
        OneHot(3)[::-1]
