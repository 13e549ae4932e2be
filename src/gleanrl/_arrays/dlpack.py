"""DLPack's exchange interface of newer torch releases: the core uses it to read tensors and to make some."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl._arrays.native import knows_exchange


def _offered() -> Any:
    offered = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return offered if offered is not None and knows_exchange(offered) else None


EXCHANGE = _offered()
"""The interface's capsule; None if torch has none, or has one that the core doesn't support."""
