"""Memory that outlives `torch.inference_mode`: a tensor that is made within it can't be written once it's over.

Programs evaluate policies in that mode, with environments and buffers that they go on using.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def lasting(make: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return `make`, which allocates, so that what it makes can be written in inference mode and outside of it.

    The mode is left and entered again by calls of C, so that no interrupt leaves it otherwise than it was.
    """

    @wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch._C._InferenceMode(False):
            return make(*args, **kwargs)

    return made
