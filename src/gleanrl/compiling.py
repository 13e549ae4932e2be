"""Compiled programs (``torch.compile``): they call the library and don't look into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_graphs(method: Method) -> Method:
    """Have compiled programs leave their graph for a call of `method`; elsewhere it costs a tenth of a microsecond.

    What they would trace hands addresses to the native core, and those of traced tensors are nobody's.
    """
    outside = torch.compiler.disable(method)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # torch's wrapper sets the compiler's state twice a call: half a microsecond, where mostly there is no compiler.
        return method(*args, **kwargs) if compiler() is None else outside(*args, **kwargs)

    return cast(Method, torch.compiler.disable(checked, recursive=False))
