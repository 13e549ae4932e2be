"""Argument checks that several classes share accept valid values and reject all other values with a clear error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl._util import integer, key_list, non_negative, positive, positive_or_none
from gleanrl.errors import InvalidArgumentError, InvalidTypeError


@pytest.mark.parametrize("value", [1, 7, np.int64(7), torch.tensor(7)])
def test_positive_accepts_integers_of_one_or_more(value):
    assert positive("size", value) == int(value) and type(positive("size", value)) is int
    assert positive_or_none("size", value) == int(value) and positive_or_none("size", None) is None


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, [1], torch.tensor(1.0)])
def test_positive_rejects_other_values_by_name(value):
    with pytest.raises(InvalidArgumentError, match="size: expected an integer of 1 or more, got"):
        positive("size", value)
    if value is not None:
        with pytest.raises(InvalidArgumentError, match="size: expected an integer of 1 or more, got"):
            positive_or_none("size", value)


def test_non_negative_accepts_integers_of_zero_or_more():
    assert non_negative("depth", np.int64(0)) == 0 and non_negative("depth", 3) == 3
    for value in (-1, False, 0.0, None):
        with pytest.raises(InvalidArgumentError, match="depth: expected an integer of 0 or more, got"):
            non_negative("depth", value)


@pytest.mark.parametrize("value", [-5, np.int64(-5), np.int8(-5), torch.tensor(-5)])
def test_integer_accepts_integers_of_any_kind(value):
    assert type(integer("n", value)) is int and integer("n", value) == -5
    for wrong in (True, 5.0, "5", None):
        with pytest.raises(InvalidArgumentError, match="n: expected an integer, got"):
            integer("n", wrong)


def test_key_list_accepts_one_key_or_several():
    assert key_list("a") == ("a",) and key_list(["a", ("b", "c")]) == ("a", ("b", "c"))
    with pytest.raises(InvalidTypeError, match="keys: expected a list of keys, got 7"):
        key_list(7)
