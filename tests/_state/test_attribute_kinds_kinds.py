"""Attribute values are classified as constants, random generators or objects with attributes."""

from __future__ import annotations

import copy
import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl._state.attribute_kinds import (
    attributes,
    constant_name,
    generator,
    generator_state,
    has_hooks,
    is_constant,
    left_out,
)
from gleanrl.errors import SchemaError, UnsupportedError


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self) -> None:
        self.left = 1


class Both(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.more = 2


@pytest.mark.parametrize("value", [int, len, np.sin, np.dtype("f4"), torch.float32, partial(len), range(3)])
def test_constants_have_names(value: Any) -> None:
    assert is_constant(value) and constant_name(value)


def test_builtin_method_of_a_mutable_object_is_not_constant() -> None:
    assert not is_constant([].append)


def test_slots_are_attributes() -> None:
    assert attributes(Both()) == {"left": 1, "more": 2}


@pytest.mark.parametrize("value", [threading.Lock(), iter([]), torch.zeros(1), np.zeros(1), open.__self__])
def test_c_level_state_is_not_an_attribute(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="state outside of its attributes"):
        attributes(value)


@pytest.mark.parametrize(
    "made",
    [
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda: np.random.RandomState(3),
    ],
)
def test_numpy_generators_continue(made: Any) -> None:
    one = made()
    one.normal()
    name = f"{type(one).__module__}.{type(one).__qualname__}"
    other = generator(name, generator_state(one))
    assert one.normal() == other.normal() and one.uniform() == other.uniform()


def test_python_and_torch_generators_continue() -> None:
    plain, torchs = random.Random(3), torch.Generator().manual_seed(3)
    assert generator("random.Random", generator_state(plain)).gauss(0, 1) == plain.gauss(0, 1)
    again = generator("torch._C.Generator", generator_state(torchs))
    assert torch.rand(2, generator=again).equal(torch.rand(2, generator=torchs))
    assert generator_state(3) is None
    with pytest.raises(SchemaError, match="os.system"):
        generator("os.system", "true")


def test_state_hooks_need_both_methods() -> None:
    class One:
        def get_state(self) -> int:
            return 1

    class Two(One):
        def set_state(self, state: int) -> None:
            pass

    assert has_hooks(Two()) and not has_hooks(One())


def test_left_out_attributes_are_found_by_class() -> None:
    assert left_out(Both(), {Slotted: ("left",), Both: ("more",), int: ("real",)}) == {"left", "more"}


@pytest.mark.parametrize("made", [np.random.Generator(np.random.MT19937(0)), np.random.RandomState(0)])
def test_generator_position_out_of_range_is_refused(made: Any) -> None:
    state = copy.deepcopy(generator_state(made))
    kind = f"{type(made).__module__}.{type(made).__qualname__}"
    assert generator(kind, state).random() == made.random()
    state["state"]["pos"] = 10**6
    with pytest.raises(ValueError, match=r"position.*\b624\b"):
        generator(kind, state)
