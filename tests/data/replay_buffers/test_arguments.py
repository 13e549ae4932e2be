"""Checks that arguments of several classes share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gleanrl.data.replay_buffers.arguments import positive
from gleanrl.errors import InvalidArgumentError


@pytest.mark.parametrize("value", [1, 7, np.int64(7), torch.tensor(7)])
def test_integers_of_one_or_more(value):
    assert positive("size", value) == int(value) and type(positive("size", value)) is int


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, [1], torch.tensor(1.0)])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(InvalidArgumentError, match="size: expected an integer of 1 or more, got"):
        positive("size", value)
