"""Two ways to the same end: what the core does with tensors that it is shown, and what is asked of them in Python."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def both_ways(module: ModuleType, name: str = "EXCHANGE", autouse: bool = False) -> Any:
    """Return a fixture: "core", or "asked", as with releases of torch that don't offer the interface.

    Args:
        module: whose way it is.
        name: what is None there where the core isn't shown anything.
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
