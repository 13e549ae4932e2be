"""Spaces of specs compare by content, and map a function over all their tensors."""

from __future__ import annotations

import pytest
import torch

from gleanrl.data.specs.boxes import ContinuousBox
from gleanrl.data.specs.choices import ChoiceSpace
from tests.data.specs.cases import bools


def test_spaces_compare_by_content():
    assert ChoiceSpace(3) == ChoiceSpace(3) != ChoiceSpace(4)
    assert ChoiceSpace(3, bools("110")) == ChoiceSpace(3, bools("110")) != ChoiceSpace(3)
    assert ChoiceSpace(3) != ChoiceSpace(3, bools("111")) and ChoiceSpace(3) != 3
    box = ContinuousBox(torch.zeros(2), torch.ones(2))
    assert box == box.map(torch.clone) != ContinuousBox(torch.zeros(2), torch.ones(2) * 2)
    assert box != ContinuousBox(torch.zeros(1), torch.ones(1)) and box != box.map(torch.Tensor.double)
    with pytest.raises(TypeError):
        hash(box)


def test_map_reaches_each_tensor():
    assert ChoiceSpace(3, bools("110")).map(lambda t: ~t) == ChoiceSpace(3, bools("001"))
    assert ChoiceSpace(3).map(lambda t: 1 / 0) == ChoiceSpace(3)
