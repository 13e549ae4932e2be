"""Every test of this folder runs on each present device: the CPU, the pretended accelerator and CUDA.

``make test-devices`` provides the pretended one, whose source is in `pretended`.
"""

from __future__ import annotations

import pytest
import torch

from tests.devices.records import PLACES, at

DEVICES = ["cpu"]
if hasattr(torch, "pretended"):
    DEVICES.append("pretended:0")
if torch.cuda.is_available():
    DEVICES.append("cuda:0")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    return torch.device(request.param)


@pytest.fixture(params=PLACES)
def source(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """The device of the data: the CPU or the device under test."""
    return at(request.param, device)


@pytest.fixture(params=PLACES)
def home(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """The device of the storage: the CPU or the device under test."""
    return at(request.param, device)
