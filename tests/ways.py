"""A fixture for two implementations with the same result: the native core reads tensors, or Python queries them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def both_ways(module: ModuleType, name: str = "EXCHANGE", autouse: bool = False) -> Any:
    """Return a fixture that runs each test with both implementations, "core" and "asked".

    "asked" simulates releases of torch that lack the interface for the core.

    Args:
        module: the module that chooses between the implementations.
        name: the module's variable that is None if the core can't read tensors.
        autouse: see `pytest.fixture`.
    """

    @pytest.fixture(params=["core", "asked"], autouse=autouse)
    def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        if request.param == "asked":
            monkeypatch.setattr(module, name, None)
        elif getattr(module, name) is None:
            pytest.skip("this release of torch doesn't show its tensors")
        return request.param

    return way
