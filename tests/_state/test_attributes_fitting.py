"""A saved value may replace a present one of a fitting kind. `test_attributes_reading` tests whole states."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch

from gleanrl._state.attributes import MISSING, fits, fits_among, inherited, is_data, may_go, one_per_kind


class Slotted:
    __slots__ = ("left",)
    right = 1

    @cached_property
    def later(self) -> Any:
        return object()


def test_none_may_be_replaced_by_any_value() -> None:
    assert all(fits(value, now) for value in (None, 3, "x", [object()]) for now in (None, MISSING))


@pytest.mark.parametrize("value", [object(), len, torch.nn.Parameter(torch.zeros(1)), [].append, type])
def test_objects_functions_and_parameters_are_not_data(value: Any) -> None:
    assert not is_data(value) and not fits(None, value) and not fits(3, value)


def test_nested_rows_count_as_numbers() -> None:
    assert fits([[1, 2.5], (True,)], np.zeros((2, 2))) and not fits([[1, "x"]], np.zeros((2, 2)))
    assert not fits([1], 1) and not fits(1, [1])


def test_items_fit_if_any_present_item_has_their_kind() -> None:
    assert fits_among(3, []) and fits_among("x", [1, "y"]) and not fits_among([1], [1, "y"])
    assert len(one_per_kind([*range(1000), "x", *np.zeros((2, 3)), np.zeros(2, int)])) == 4


def test_class_attributes_are_defaults() -> None:
    assert inherited(Slotted, "right") == 1
    assert all(inherited(Slotted, name) is MISSING for name in ("left", "later", "nothing"))
    assert may_go(object(), Slotted, "later") and may_go(3, Slotted, "nothing")
    assert not may_go(object(), Slotted, "nothing")
