"""Records with their number in every leaf, on any device."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

CPU = torch.device("cpu")
PLACES = ["cpu", "device"]


def at(place: str, device: torch.device) -> torch.device:
    """Return the device of one of `PLACES`."""
    return device if place == "device" else CPU


def rows(start: int, stop: int, device: torch.device | str = "cpu") -> TensorDict:
    """Return the records `start` to `stop`."""
    n, size = torch.arange(start, stop, device=device), [stop - start]
    pixels = n[:, None, None].expand(-1, 2, 3).to(torch.uint8)
    below = TensorDict({"x": n + 1, "reward": n[:, None] / 2}, size)
    return TensorDict({"x": n, "pixels": pixels, "next": below}, size)


def numbers(records: Any) -> Any:
    """Return the numbers of records, after a check that the leaves of each record agree."""
    n = records["x"].cpu()
    assert torch.equal(records["next", "x"].cpu(), n + 1)
    assert torch.equal(records["next", "reward"].cpu()[..., 0], n / 2)
    assert torch.equal(records["pixels"].cpu(), n[..., None, None].expand(*n.shape, 2, 3).to(torch.uint8))
    return n.tolist()


def on(device: torch.device, records: Any) -> bool:
    """Return whether every leaf is on the device."""
    return all(leaf.device == device for leaf in records.values(True, True))


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bytes of a tensor."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()


def plain(batch: Any) -> dict[Any, Any]:
    """Return a TensorDict on any device as a dictionary of key to dtype, shape and bytes."""
    return {
        key: (leaf.dtype, tuple(leaf.shape), bits(leaf))
        for key, leaf in batch.items(True, True)
        if isinstance(leaf, torch.Tensor)
    }
