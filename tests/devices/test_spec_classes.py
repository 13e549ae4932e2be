"""Every spec class makes its values on its device, and answers as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.data import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from tests.devices.counting import leaves_on

MASK = torch.tensor([True, False, True])
SPECS: dict[str, Callable[[Any], Any]] = {
    "Bounded": lambda device: Bounded(-1.0, [1.0, 2.0], (2,), device=device),
    "Bounded integers": lambda device: Bounded(-2, 5, (3,), device=device, dtype=torch.int64),
    "bytes": lambda device: Bounded(0, 255, (2, 2), device=device, dtype=torch.uint8),
    "Unbounded": lambda device: Unbounded((3,), device=device),
    "Unbounded integers": lambda device: Unbounded((3,), device=device, dtype=torch.int64),
    "OneHot": lambda device: OneHot(4, device=device),
    "masked OneHot": lambda device: OneHot(3, device=device, mask=MASK),
    "Categorical": lambda device: Categorical(4, (2,), device=device),
    "masked Categorical": lambda device: Categorical(3, device=device, mask=MASK),
    "flags": lambda device: Categorical(2, (1,), device=device, dtype=torch.bool),
    "MultiCategorical": lambda device: MultiCategorical([2, 3], device=device),
    "MultiOneHot": lambda device: MultiOneHot([2, 3], device=device),
    "Binary": lambda device: Binary(4, device=device),
    "Composite": lambda device: Composite(
        a=Bounded(0.0, 1.0, (2, 3)),
        b=Composite(c=Categorical(3, (2,)), shape=(2,)),
        shape=(2,),
        device=device,
    ),
    "a stack": lambda device: torch.stack([Bounded(0.0, 1.0, (3,), device=device)] * 2),
    "a stack of unlike": lambda device: torch.stack(
        [Bounded(0.0, 1.0, (3,), device=device), Bounded(0.0, 1.0, (4,), device=device)]
    ),
    "a stack of composites": lambda device: torch.stack(
        [Composite(a=Unbounded((n,), device=device), device=device) for n in (2, 3)]
    ),
    "Choice": lambda device: Choice([Bounded(0.0, 1.0, (2,), device=device)] * 2),
}
WRONG: dict[str, tuple[Any, Any]] = {
    # a value outside of the spec, and the result of `project` for it
    "Bounded": ([-3.0, 9.0], [-1.0, 2.0]),
    "Bounded integers": ([-9, 0, 9], [-2, 0, 5]),
    "Categorical": ([-1, 9], [0, 3]),
    "MultiCategorical": ([5, 5], [1, 2]),
}
ENCODED: dict[str, tuple[Any, Any]] = {
    "Bounded": ([0.5, 1.5], [0.5, 1.5]),
    "Bounded integers": ([1, 2, 3], [1, 2, 3]),
    "Unbounded": ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
    "OneHot": (2, [False, False, True, False]),
    "Categorical": ([1, 3], [1, 3]),
    "MultiCategorical": ([1, 2], [1, 2]),
    "MultiOneHot": ([1, 2], [False, True, False, False, True]),
    "Binary": ([1, 0, 1, 0], [1, 0, 1, 0]),
}


def pieces(made: Any) -> list[torch.Tensor]:
    """Return the tensors of a value."""
    if isinstance(made, LazyStackedTensorDict):
        return [piece for part in made.tensordicts for piece in pieces(part)]
    if isinstance(made, TensorDictBase):
        return list(made.values(True, True))
    return list(made.unbind(0)) if made.is_nested else [made]


def places(made: Any) -> set[torch.device]:
    """Return the devices of a value's tensors."""
    return {piece.device for piece in pieces(made)}


@pytest.fixture
def name(device: torch.device, request: pytest.FixtureRequest) -> str:
    """The spec's name."""
    if request.param == "a stack of unlike" and device.type == "pretended":
        pytest.skip("it has no nested tensors")
    return str(request.param)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", SPECS, indirect=True)
class TestEveryClass:
    """Specs that are made on a device, or moved to it."""

    def test_values_are_made_on_the_device(self, device: torch.device, name: str) -> None:
        for spec in (SPECS[name](device), SPECS[name]("cpu").to(device)):
            assert spec.device == device
            for made in (spec.rand(), spec.zero(), spec.one()):
                assert places(made) == {device}
            assert spec.is_in(spec.rand())
            if name != "a stack of unlike":  # this spec has no further dimensions
                assert places(spec.rand((5,))) == places(spec.zero((5,))) == {device}
                assert spec.is_in(spec.rand((5,)))

    def test_moved_spec_is_equal(self, device: torch.device, name: str) -> None:
        here, there = SPECS[name]("cpu"), SPECS[name](device)
        assert here.to(device) == there and there.to("cpu") == here == there.cpu()
        assert there.clone() == there and there.clone().device == device
        assert here.device == torch.device("cpu"), "a copy moves"
        if device.type == "cuda":
            assert there.to("cuda").device == device == here.cuda().device, "the index is explicit"

    def test_equal_seeds_give_equal_values(self, device: torch.device, name: str) -> None:
        def draw() -> Any:
            torch.manual_seed(2)
            return SPECS[name](device).rand()

        one, other = pieces(draw()), pieces(draw())
        assert all(map(torch.equal, one, other))

    def test_values_in_the_spec_pass(self, device: torch.device, name: str) -> None:
        spec = SPECS[name](device)
        value = spec.rand()
        assert spec.project(value) is value
        spec.assert_is_in(value)
        assert spec.contains(value) and places(spec.project(value)) == {device}


@pytest.mark.parametrize("name", WRONG, indirect=True)
def test_values_outside_the_spec_are_projected_on_the_device(device: torch.device, name: str) -> None:
    spec, (given, expected) = SPECS[name](device), WRONG[name]
    value = torch.tensor(given, dtype=spec.dtype, device=device)
    assert not spec.is_in(value)
    projected = spec.project(value)
    assert projected.device == device and projected.tolist() == expected
    assert value.tolist() == given and spec.is_in(projected)


@pytest.mark.parametrize("name", ENCODED, indirect=True)
def test_values_are_encoded_and_decoded(device: torch.device, name: str) -> None:
    spec, (given, expected) = SPECS[name](device), ENCODED[name]
    for value in (given, np.asarray(given), torch.as_tensor(given)):
        encoded = spec.encode(value)
        assert encoded.device == device and encoded.dtype is spec.dtype and encoded.tolist() == expected
    back = spec.to_numpy(spec.encode(given))
    assert not isinstance(back, torch.Tensor) and np.asarray(back).tolist() == given


def test_composites_move_and_encode_all_entries(device: torch.device) -> None:
    spec = Composite(a=Bounded(0.0, 1.0, (2,)), b=Composite(c=OneHot(3)), device=device)
    made = spec.rand()
    assert made.device == device and leaves_on(made) == {device} == {
        s.device for s in spec.values(True, True)
    }
    encoded = spec.encode({"a": np.array([0.25, 0.5], np.float32), "b": {"c": 1}})
    assert encoded["a"].device == device and encoded["b", "c"].tolist() == [False, True, False]
    wrong = made.clone()
    wrong["a"] = torch.tensor([2.0, -2.0], device=device)
    assert not spec.is_in(wrong) and spec.project(wrong)["a"].tolist() == [1.0, 0.0]
    spec["d"] = Unbounded((1,))
    assert spec["d"].device == device
    batched = spec.expand(4)
    assert batched.rand().shape == (4,) and batched[0].device == device == batched.device


@pytest.mark.parametrize("kind", [OneHot, Categorical])
def test_masks_hold(device: torch.device, kind: Any) -> None:
    spec = kind(3, device=device)
    spec.update_mask(torch.tensor([False, True, False], device=device))
    drawn = spec.rand((50,))
    assert (drawn == spec.encode(1)).all() and drawn.device == device
    two = 2 if kind is Categorical else [False, False, True]
    with_two = torch.tensor(two, dtype=spec.dtype, device=device)
    assert not spec.is_in(with_two)
    assert (spec.project(with_two) == spec.encode(1)).all()


@pytest.mark.parametrize(
    ("one", "other", "there", "back"),
    [
        (OneHot(3), Categorical(3), "to_categorical", "to_one_hot"),
        (MultiOneHot([2, 3]), MultiCategorical([2, 3]), "to_categorical", "to_one_hot"),
    ],
)
def test_one_hot_and_categorical_specs_convert(
    device: torch.device, one: Any, other: Any, there: str, back: str
) -> None:
    hot, categorical = one.to(device), other.to(device)
    value = hot.rand((6,))
    numbers = getattr(hot, there)(value)
    assert numbers.device == device and categorical.is_in(numbers)
    assert torch.equal(getattr(categorical, back)(numbers), value)
    assert hot.to_categorical_spec().device == device == categorical.to_one_hot_spec().device


def test_reshaped_specs_stay_on_the_device(device: torch.device) -> None:
    spec = Bounded(0.0, 1.0, (2, 3), device=device)
    changed = (
        spec.expand(4, 2, 3),
        spec.unsqueeze(0),
        spec.reshape(6),
        spec.flatten(0, 1),
        spec[0],
        spec.unbind(0)[1],
    )
    assert [tuple(each.shape) for each in changed] == [(4, 2, 3), (1, 2, 3), (6,), (6,), (3,), (3,)]
    for each in changed:
        assert each.device == device == each.rand().device == each.low.device and each.is_in(each.rand())
