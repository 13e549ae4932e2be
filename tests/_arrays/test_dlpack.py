"""The DLPack exchange API is torch's, or absent."""

from __future__ import annotations

import torch

from gleanrl._arrays.dlpack import EXCHANGE


def test_exchange_api_is_torchs_or_none():
    assert EXCHANGE is None or EXCHANGE is torch.Tensor.__dlpack_c_exchange_api__
