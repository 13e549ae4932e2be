"""Policies that are compiled, or captured as CUDA graphs, where they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict.nn import CudaGraphModule
from torch._dynamo.exc import TorchDynamoException

from gleanrl.errors import InvalidTypeError, UnsupportedError


class Compiler:
    """Makes faster callables of a policy's, each of them once.

    What is compiled is what an actor calls: the modules inside TensorDict modules that it takes apart, which see plain
    tensors; any other policy as a whole. The user's policy itself stays as it is.

    Args:
        compiling: keyword arguments of `torch.compile`; None for no compilation.
        capturing: keyword arguments of `CudaGraphModule`; None for no CUDA graphs.

    Raises:
        UnsupportedError: CUDA graphs on a machine without CUDA.
    """

    def __init__(self, compiling: Mapping[str, Any] | None, capturing: Mapping[str, Any] | None) -> None:
        if capturing is not None and not torch.cuda.is_available():
            raise UnsupportedError(
                "cudagraph_policy: CUDA graphs need a CUDA device, and torch finds none here"
            )
        self._compiling, self._capturing = compiling, capturing
        self._made: dict[int, tuple[Any, Callable[..., Any]]] = {}

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same as `call`, faster."""
        if id(call) not in self._made:  # the callable is held, so that its id stays its own
            self._made[id(call)] = call, self._faster(call)
        return self._made[id(call)][1]

    def _faster(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._compiling is not None:
            call = _compiled(call, self._compiling)
        return call if self._capturing is None else CudaGraphModule(call, **self._capturing)


def compiler_of(compile_policy: Any, cudagraph_policy: Any) -> Compiler | None:
    """Return what the arguments of a collector ask for; None if nothing.

    Args:
        compile_policy: None, a bool, or keyword arguments of `torch.compile`.
        cudagraph_policy: None, a bool, or keyword arguments of `CudaGraphModule`.
    """
    compiling, capturing = (
        _options("compile_policy", compile_policy),
        _options("cudagraph_policy", cudagraph_policy),
    )
    return None if compiling is None and capturing is None else Compiler(compiling, capturing)


def _options(name: str, value: Any) -> Mapping[str, Any] | None:
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidTypeError(f"{name}: expected True, False or keyword arguments, got {value!r}")
    return value


def _compiled(call: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    fast: Any = torch.compile(call, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except TorchDynamoException as cause:
            raise UnsupportedError(
                f"compile_policy: torch.compile can't compile the policy here ({type(cause).__name__}); its default "
                "backend needs a working C++ compiler (CXX), or Triton on a GPU: install one, choose another backend, "
                f'compile_policy={{"backend": "aot_eager"}} say, or leave compile_policy out. {cause}'
            ) from cause

    return run
