"""Every test of this folder runs on the CPU, on the pretended device (see `pretended`) and on CUDA, where there are."""

from __future__ import annotations

import pytest
import torch


def _where(available: bool, name: str) -> pytest.ParameterSet:
    return pytest.param(f"{name}:0", marks=pytest.mark.skipif(not available, reason=f"needs {name}"), id=name)


@pytest.fixture(
    params=[
        "cpu",
        _where(hasattr(torch, "pretended"), "pretended"),
        _where(torch.cuda.is_available(), "cuda"),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test's subject lives."""
    return torch.device(request.param)
