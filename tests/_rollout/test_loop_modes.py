"""The loop's modes of torch and tensordict hold during a call and are restored after an interrupt at any line."""

from __future__ import annotations

import pytest
import tensordict.nn.probabilistic
import torch
import torch.autograd.grad_mode
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from gleanrl._rollout.loop import exploring, with_gradients
from tests.interrupts import interruptions

THEIRS = (torch.autograd.grad_mode.__file__, tensordict.nn.probabilistic.__file__)


def modes():
    return torch.is_grad_enabled(), interaction_type()


@pytest.mark.parametrize("kind", [None, InteractionType.RANDOM, InteractionType.MEAN])
@pytest.mark.parametrize("outside", [True, False])
def test_calls_run_in_the_expected_modes(kind, outside):
    with torch.set_grad_enabled(outside), set_interaction_type(InteractionType.MEAN):
        for enabled in (True, False):
            assert with_gradients(enabled, exploring, kind, modes) == (enabled, kind)
            assert modes() == (outside, InteractionType.MEAN)


def test_error_restores_the_modes():
    with pytest.raises(ZeroDivisionError):
        with_gradients(False, exploring, InteractionType.RANDOM, lambda: 1 / 0)
    assert modes() == (True, None)


def test_interrupt_at_any_line_restores_the_modes():
    found = []
    for _, _ in interruptions(
        lambda: None, lambda _: with_gradients(False, exploring, InteractionType.RANDOM, modes), also=THEIRS
    ):
        found.append(modes())
        torch.set_grad_enabled(True)
        set_interaction_type(None).__enter__()
    assert set(found) == {(True, None)}
    assert len(found) > 15
