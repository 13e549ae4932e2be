"""Devices as users spell them, and what lies on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import is_tensor_collection

from gleanrl.errors import InvalidArgumentError


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
