"""Modes: autograd and the type of exploration for one call; afterwards they are as before, whatever interrupts it.

`torch.no_grad` and its like are left by functions written in Python: an interrupt there leaves gradients off in the
thread of the caller, who then trains nothing. A call of C, as here, is done before a signal handler runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

Result = TypeVar("Result")


def with_gradients(enabled: bool, call: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `call(*arguments)` returns with autograd on or off."""
    former = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(enabled)
        return call(*arguments)
    finally:
        torch._C._set_grad_enabled(former)


def exploring(kind: InteractionType | None, call: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `call(*arguments)` returns where policies explore this way; None: as each module says."""
    former = interaction_type()
    try:
        with set_interaction_type(kind):
            return call(*arguments)
    except BaseException:
        if kind is not former and interaction_type() is kind:
            set_interaction_type(former).__enter__()
        raise
