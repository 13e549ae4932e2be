"""Helpers for devices, and for the order of work on them.

`outside_graphs` keeps programs under ``torch.compile`` from tracing into the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from tensordict import is_tensor_collection
from torch._C._dynamo import eval_frame

from gleanrl.errors import InvalidArgumentError

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_graphs(method: Method) -> Method:
    """Make compiled programs leave their graph when they call `method`. Programs that aren't compiled pay nothing.

    The result is `method` itself, marked in place. Before torch 2.7 it is a wrapper.

    The library passes tensor addresses to the native core, and traced tensors have no memory. So ``torch.compile`` must
    not trace it.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # before torch 2.7
        return cast(Method, torch.compiler.disable(method))
    # The same effect as `torch.compiler.disable`, without its wrapper, which costs each call half a microsecond.
    skip, function = eval_frame._FrameAction.SKIP, cast(Any, method)
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # the method itself, and the functions that it calls
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    return method


Result = TypeVar("Result")


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return `device` as a torch.device, or None for None.

    An accelerator of this machine without an index gets the index of the current device.

    Raises:
        InvalidArgumentError: if torch doesn't know the device.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise InvalidArgumentError(f"device: torch doesn't know {device!r}: {cause}") from cause
    if found.index is None and found.type not in ("cpu", "meta"):
        module = getattr(torch, found.type, None)
        if module is not None and module.is_available():
            return torch.device(found.type, module.current_device())
    return found


def usable_device(device: torch.device | str | int) -> torch.device:
    """Return the device that the user named, without an index if the user gave none.

    Raises:
        InvalidArgumentError: if torch doesn't know the device, or can't allocate on it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise InvalidArgumentError(f"device: torch doesn't know {device!r}: {cause}") from cause
    require_device("device", found)
    return found


def require_device(name: str, device: torch.device | None) -> torch.device | None:
    """Return `device` if torch can allocate on it.

    Args:
        name: the argument that the error message names.
        device: the device to check; None is always accepted.

    Raises:
        InvalidArgumentError: if torch can't allocate on the device.
    """
    if device is None or device.type == "cpu":
        return device
    try:
        torch.zeros(1, device=device)
    except Exception as cause:  # torch raises AssertionError, RuntimeError and other types
        raise InvalidArgumentError(f"{name}: {device} can't be used here: {cause}") from cause
    return device


def columns_device(device: torch.device | None) -> torch.device:
    """Return the device of columns whose TensorDicts have the device attribute `device`; None means the CPU."""
    return torch.device("cpu") if device is None else device


def said_of(here: torch.device | None, device: torch.device | None) -> torch.device | None:
    """Return the device attribute for TensorDicts over columns on the device `here`.

    Args:
        here: the device of the columns; None for the CPU.
        device: the device attribute of the environment's TensorDicts, which may be another device.
    """
    return device if same_device(here, device) else columns_device(here)


def same_device(one: torch.device | None, other: torch.device | None) -> bool:
    """Return whether two device attributes mean the same device: ``cpu:0``, ``cpu`` and None are the same."""
    return one == other or (on_cpu(one) and on_cpu(other))


def on_cpu(device: torch.device | None) -> bool:
    """Return whether the data of TensorDicts with the attribute `device` are on the CPU."""
    return device is None or device.type == "cpu"


def device_of(leaves: Iterable[Any]) -> torch.device:
    """Return the device of the first leaf that is a tensor, or the CPU if no leaf is a tensor."""
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def pinned(batch: Any) -> Any:
    """Return `batch`, a tensor or a TensorDict, with its CPU tensors copied to pinned memory.

    Other objects, such as lists of tensors, are returned unchanged.
    """
    if is_tensor_collection(batch):
        return batch.apply(pinned, filter_empty=False)
    return batch.pin_memory() if isinstance(batch, torch.Tensor) and batch.device.type == "cpu" else batch


def _module_of_streams(device: torch.device) -> Any:
    """Return torch's module for a device's streams, for example `torch.cuda`; None for a device without streams."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "current_stream") else None


def in_this_stream(call: Callable[[], Result], device: torch.device | None) -> Callable[[], Result]:
    """Return a function that makes `call` in another thread, in the device stream that this thread uses now.

    The work of `call` is then ordered after all earlier work of this thread, and before this thread's use of the
    result.

    Args:
        call: a function without arguments.
        device: the device; None for CUDA's current device if the program uses CUDA.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    module = _module_of_streams(device)
    if module is None:
        return call
    stream = module.current_stream(device)

    def made() -> Result:
        with module.stream(stream):
            return call()

    return made


class StreamOrder:
    """Orders all uses of a device's memory, for any number of streams and threads.

    A program that names no streams works in one stream and needs no extra order. The object isn't thread-safe. Writers
    hold a lock. A reader takes no lock and finds out afterwards whether a writer changed the rows meanwhile.

    Args:
        device: the device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, _module_of_streams(device)
        self._last: Any = None  # the stream of the last use

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the device only, because the copy orders other memory."""
        return StreamOrder, (self._device,)

    def begin(self) -> None:
        """Make the current stream wait for all earlier work on the memory, and record it as the last user."""
        if self._module is None:
            return
        stream, last = self._module.current_stream(self._device), self._last
        if last is not None and stream != last:
            stream.wait_stream(last)
        self._last = stream
