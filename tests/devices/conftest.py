"""Every test of this folder runs on each device that there is: the CPU, the pretended accelerator and CUDA.

``make test-devices`` has the pretended one, whose source is in `pretended`.
"""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu"]
if hasattr(torch, "pretended"):
    DEVICES.append("pretended:0")
if torch.cuda.is_available():
    DEVICES.append("cuda:0")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test's subject lives."""
    return torch.device(request.param)
