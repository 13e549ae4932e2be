"""gleanrl's specs convert to TorchRL's and back (`make test-foreign`)."""

from __future__ import annotations

import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from torchrl import data as theirs  # noqa: E402

from gleanrl import data as ours  # noqa: E402
from gleanrl.data import (  # noqa: E402
    from_torchrl,
    to_torchrl,
)

pytestmark = pytest.mark.filterwarnings("default")

MASK = torch.tensor([True, False, True])
ROW = torch.tensor([True, False, True, True, False])


def masked_binary():
    spec = ours.Binary(2)
    spec.update_mask(torch.tensor([[True, False], [True, True]]))
    return spec


SPECS = [
    ours.Binary(3),
    masked_binary(),
    ours.Binary(shape=(), dtype=torch.bool),
    ours.Bounded(-2, 2, (3,)),
    ours.Bounded(torch.tensor([0.0, -torch.inf]), torch.tensor([torch.inf, 3.0]), dtype=torch.float64),
    ours.Bounded(torch.tensor([0, -3]), 5, dtype=torch.int32),
    ours.Bounded(0, 255, (2, 2, 3), dtype=torch.uint8),
    ours.Categorical(3),
    ours.Categorical(3, (2, 4), dtype=torch.int32),
    ours.Categorical(2, (1,), dtype=torch.bool),
    ours.Categorical(3, (2,), mask=MASK),
    ours.Composite(),
    ours.Composite({("a", "b"): ours.Unbounded((2, 3)), "c": None}, shape=(2,)),
    ours.Composite(a=ours.Composite(b=ours.OneHot(2))).lock_(),
    ours.MultiCategorical([2, 3]),
    ours.MultiCategorical([2, 3], (4, 2)),
    ours.MultiCategorical([2, 3], mask=ROW),
    ours.MultiCategorical([[2, 3], [3, 4]]),
    ours.MultiOneHot([2, 3], mask=ROW),
    ours.MultiOneHot([2, 3], (4, 5), dtype=torch.float32),
    ours.NonTensor((2,), example_data="a"),
    ours.OneHot(3, mask=MASK),
    ours.OneHot(3, (4, 3), dtype=torch.int64),
    torch.stack([ours.Unbounded(3), ours.Bounded(0, 1, (3,))]),
    torch.stack([ours.Unbounded((2, 3)), ours.Unbounded((2, 4))], 1),
    torch.stack([ours.Composite(a=ours.Unbounded(3)), ours.Composite(b=ours.Unbounded(3))]),
    ours.Unbounded(()),
    ours.Unbounded((2, 3), dtype=torch.float16),
    ours.Unbounded(3, dtype=torch.int32),
    ours.Unbounded(3, dtype=torch.bool),
]

each = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: " ".join(repr(spec).split()))


@each
def test_specs_survive_a_round_trip(spec):
    other = to_torchrl(spec.to("cpu"))
    assert isinstance(other, theirs.TensorSpec)
    assert type(other).__name__ == type(spec).__name__
    assert other.shape == spec.shape
    assert from_torchrl(other) == spec.to("cpu")


@each
def test_converted_spec_contains_the_values(spec):
    if not isinstance(spec, ours.Stacked):  # TorchRL's values of it are nested tensors
        assert to_torchrl(spec).is_in(spec.rand())


def test_lock_is_converted():
    assert to_torchrl(ours.Composite(a=ours.Unbounded()).lock_()).is_locked


def test_conversions_are_copies():
    spec = ours.Categorical(3, mask=MASK)
    other = to_torchrl(spec)
    spec.update_mask(~MASK)
    assert torch.equal(other.mask, MASK)
    back = from_torchrl(other)
    other.update_mask(~MASK)
    assert torch.equal(back.mask, MASK)


def test_other_values_pass_unchanged():
    assert to_torchrl(None) is None
    assert to_torchrl("one-hot") == "one-hot"
    other = theirs.OneHot(3)
    assert to_torchrl(other) is other
