"""Compiled programs (``torch.compile``): they call the library and don't look into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_graphs(method: Method) -> Method:
    """Have compiled programs leave their graph for a call of `method`; elsewhere it costs nothing.

    What they would trace hands addresses to the native core, and those of traced tensors are nobody's.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # before torch 2.7
        return cast(Method, torch.compiler.disable(method))
    # What `torch.compiler.disable` does, without its wrapper, which costs each call half a microsecond.
    skip, function = eval_frame._FrameAction.SKIP, cast(Any, method)
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # the method itself, and whatever it calls
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    return method
