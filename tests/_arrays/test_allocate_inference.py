"""Memory that is allocated in inference mode can be written outside it."""

import pytest
import torch

from gleanrl._arrays.allocate import lasting


@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_made_in_inference_mode_are_writable_outside_it(gradients):
    with torch.set_grad_enabled(gradients):
        with torch.inference_mode():
            column = lasting(torch.zeros)(3, dtype=torch.int64)
            assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            column[0] = 1
        assert torch.is_grad_enabled() is gradients
        column[1] = 1
    assert column.tolist() == [1, 1, 0] and not column.is_inference()


def test_an_error_leaves_the_mode_on():
    with torch.inference_mode():
        with pytest.raises(TypeError):
            lasting(torch.zeros)("three")
        assert torch.is_inference_mode_enabled()
