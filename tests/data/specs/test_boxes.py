"""A box holds the bounds of a spec and follows in-place changes of them."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs import Bounded, Composite, Unbounded, stack_specs
from gleanrl.data.specs.boxes import ContinuousBox
from gleanrl.data.specs.mapping import SpecMapping
from tests.data.specs.statistics import frequencies, uniform

INT64 = torch.iinfo(torch.int64)


def test_common_bounds():
    assert ContinuousBox(torch.zeros(2, 2), torch.ones(2, 2)).common == (0.0, 1.0)
    assert ContinuousBox(torch.tensor([0.0, 1.0]), torch.ones(2)).common is None
    assert ContinuousBox(torch.zeros(0), torch.ones(0)).common is None


@pytest.mark.parametrize(("low", "high"), [(-2, 5), ([-2, 0], [5, 7]), (INT64.max - 7, INT64.max)])
def test_integers_are_drawn_from_the_whole_range(low, high):
    torch.manual_seed(0)
    space = ContinuousBox(*torch.broadcast_tensors(torch.tensor(low), torch.tensor(high)))
    drawn = space.draw((20000, *space.low.shape), None, torch.int64, None) - space.low
    for column in drawn.reshape(20000, -1).unbind(-1):
        assert uniform(frequencies(column, 8))


def test_cardinality_counts_elements_with_and_without_common_bounds():
    assert Bounded(0, 2, (3,), dtype=torch.int64).cardinality() == 27
    assert Bounded(torch.tensor([0, 1]), 2, dtype=torch.int64).cardinality() == 6
    assert Bounded(0, 2, (0,), dtype=torch.int64).cardinality() == 1
    assert Unbounded((2,), dtype=torch.uint8).cardinality() == 2**16
    assert Unbounded((), dtype=torch.int64).cardinality() == 2**64
    assert Bounded(0, 1).cardinality() == Unbounded().cardinality() == float("inf")


def test_ends_are_assigned_and_given():
    box = ContinuousBox(torch.zeros(2), torch.ones(2))
    low, high = box
    assert low is box.low and high is box.high and box.common == (0, 1)
    box.low = [-1, -2]
    assert box.low.tolist() == [-1, -2] and box.common is None and box.low.dtype == torch.float32
    assert box.clone() == box and box.clone().low is not box.low and box.to("cpu") == box
    with torch.inference_mode():
        assert ContinuousBox(torch.zeros(2), torch.ones(2)).common == (0, 1)


def test_bounds_changed_in_place_under_inference_mode_are_used_by_the_next_draw():
    with torch.inference_mode():
        spec = Bounded(0.0, 1.0, (3,))
        spec.rand()
        spec.space.low[...] = 0.75
        assert bool((spec.rand((50,)) >= 0.75).all())


@pytest.mark.parametrize("size", [(2, 3), (64, 64, 3)])
@pytest.mark.parametrize("assigned", [False, True])
def test_bounds_of_any_size_can_be_changed_in_place(size, assigned):
    spec = Bounded(0.0, 8.0, size)
    if assigned:
        spec.space.low = -1.0
        spec.space.low += 1
    spec.space.low += 1
    spec.space.high[0] = 7.0
    assert bool((spec.low == 1.0).all())
    assert bool((spec.high[0] == 7.0).all())
    assert bool((spec.high[1:] == 8.0).all())
    assert not spec.is_in(torch.full(size, 0.5))
    assert not spec.is_in(torch.full(size, 7.5))
    assert bool((spec.rand((50,))[:, 0] <= 7.0).all())


def test_library_keeps_one_number_of_the_bounds_of_a_frame():
    frame = Bounded(0, 255, (64, 64, 3), dtype=torch.uint8)
    frame.rand()
    frame.project(torch.full((64, 64, 3), 3.0))
    others = [
        frame.clone(),
        frame.expand(2, 64, 64, 3),
        frame.to("cpu"),
        frame.unsqueeze(0),
    ]
    assert all(other == other.clone() for other in others)
    assert repr(frame)
    assert frame.is_in(frame.zero())
    for spec in (frame, *others):
        assert all(end.untyped_storage().nbytes() <= 8 for end in spec.space.ends)


PARTS = {
    "index": (lambda: Bounded(0.0, 8.0, (2, 3)), lambda spec: spec[0]),
    "unbind": (lambda: Bounded(0.0, 8.0, (2, 3)), lambda spec: spec.unbind(0)[0]),
    "entry": (lambda: Composite(k=Bounded(0.0, 8.0, (2, 3)), shape=(2,)), lambda spec: spec[0]["k"]),
    "stack": (
        lambda: stack_specs([Bounded(0.0, high, (3,)) for high in (8.0, 9.0)], 0),
        lambda spec: spec[0],
    ),
    "entry_of_stack": (
        lambda: stack_specs([Composite(k=Bounded(0.0, high, (3,))) for high in (8.0, 9.0)], 0),
        lambda spec: spec[0]["k"],
    ),
}


@pytest.mark.parametrize("make, part", PARTS.values(), ids=PARTS)
def test_bound_of_a_part_changed_in_place_is_that_of_the_spec(make, part):
    spec = make()
    spec.rand()  # computes and caches the bounds
    part(spec).space.low[...] = 7.0
    assert part(spec).space.low.tolist() == [7.0] * 3
    for _ in range(20):
        drawn = spec.rand()
        first = (drawn["k"] if isinstance(spec, SpecMapping) else drawn)[0]
        assert bool((first >= 7.0).all())
    copied = part(spec).clone()
    copied.space.low[...] = 0.0
    assert part(spec).space.low.tolist() == [7.0] * 3


def test_bound_of_a_part_of_a_frame_is_never_changed_in_a_copy():
    frame = Bounded(0.0, 8.0, (2, 64, 64, 3))
    with pytest.raises(RuntimeError, match="single memory location"):
        frame[0].space.low[...] = 7.0
    assert bool((frame[0].space.low == 0.0).all())
