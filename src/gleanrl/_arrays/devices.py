"""Devices as users spell them, what lies on them, and the order in which they work.

Compiled programs (``torch.compile``): they call the library and don't look into it.
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


Result = TypeVar("Result")


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return `device` as a torch.device, with its index if it is an accelerator of this machine; None stays None.

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
    """Return the device that a user named, if torch knows it and data can live there.

    Raises:
        InvalidArgumentError: otherwise.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise InvalidArgumentError(f"device: torch doesn't know {device!r}: {cause}") from cause
    require_device("device", found)
    return found


def require_device(name: str, device: torch.device | None) -> torch.device | None:
    """Return `device` if data can live there.

    Args:
        name: the argument that the message names.
        device: None passes.

    Raises:
        InvalidArgumentError: if torch has no such device.
    """
    if device is None or device.type == "cpu":
        return device
    try:
        torch.zeros(1, device=device)
    except Exception as cause:  # torch raises AssertionError, RuntimeError and others
        raise InvalidArgumentError(f"{name}: {device} can't be used here: {cause}") from cause
    return device


def columns_device(device: torch.device | None) -> torch.device:
    """Return where the columns of an environment live whose TensorDicts say `device`."""
    return torch.device("cpu") if device is None else device


def said_of(here: torch.device | None, device: torch.device | None) -> torch.device | None:
    """Return what TensorDicts of columns say of their device.

    Args:
        here: where the columns are; None for the CPU.
        device: what those of their environment say, which may be elsewhere.
    """
    return device if same_device(here, device) else columns_device(here)


def same_device(one: torch.device | None, other: torch.device | None) -> bool:
    """Return whether data on `one` is on `other`, too: ``cpu:0`` is ``cpu``, and so is None."""
    return one == other or (on_cpu(one) and on_cpu(other))


def on_cpu(device: torch.device | None) -> bool:
    """Return whether data whose TensorDicts say `device` is on the CPU."""
    return device is None or device.type == "cpu"


def device_of(leaves: Iterable[Any]) -> torch.device:
    """Return the device of the first leaf that is a tensor, the CPU if none is."""
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def pinned(batch: Any) -> Any:
    """Return `batch` with what lies on the CPU in pinned memory."""
    if is_tensor_collection(batch):
        return batch.apply(pinned, filter_empty=False)
    return batch.pin_memory() if isinstance(batch, torch.Tensor) and batch.device.type == "cpu" else batch


def _module_of_streams(device: torch.device) -> Any:
    """Return what torch has for the streams of a device, `torch.cuda` say; None where work is done in one order."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "current_stream") else None


def in_this_stream(call: Callable[[], Result], device: torch.device | None) -> Callable[[], Result]:
    """Return a call for another thread to make, in the stream of a device in which this thread works now.

    So it comes after what this thread has asked for, and before what this thread does with the result.

    Args:
        call: any.
        device: None for CUDA's current one, if CUDA is in use.
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
    """Has memory of a device used in the order in which that is asked for, by whichever streams and threads.

    Programs that name no streams work in one, and need nothing of that. Not thread-safe: who writes holds a lock, and
    who reads beside it finds out afterwards whether something was written.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, _module_of_streams(device)
        self._last: Any = None  # the stream of the last use

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are of other memory."""
        return StreamOrder, (self._device,)

    def begin(self) -> None:
        """Let the present stream wait for what was asked for until now; it is used next."""
        if self._module is None:
            return
        stream, last = self._module.current_stream(self._device), self._last
        if last is not None and stream != last:
            stream.wait_stream(last)
        self._last = stream
