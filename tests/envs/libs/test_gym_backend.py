"""The only backend is gymnasium; programs that name it work."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from gleanrl.envs import get_available_libraries
from gleanrl.envs.libs.gym_backend import gym_backend, set_gym_backend
from gleanrl.errors import UnsupportedError


def returns_gymnasium() -> Any:
    return gymnasium


@pytest.mark.parametrize("backend", ["gymnasium", gymnasium, returns_gymnasium])
def test_gymnasium(backend: Any) -> None:
    with set_gym_backend(backend):
        assert gym_backend() is gymnasium
    set_gym_backend(backend).set()

    @set_gym_backend(backend)
    def double(x: int, *, y: int) -> int:
        """Docstring."""
        return 2 * x + y

    assert double(2, y=1) == 5 and double.__name__ == "double"


@pytest.mark.parametrize("backend", ["gym", "jax", pytest, None])
def test_any_other_is_refused(backend: Any) -> None:
    with pytest.raises(UnsupportedError, match="gymnasium"):
        set_gym_backend(backend)


def test_submodules() -> None:
    assert gym_backend("wrappers") is gymnasium.wrappers


def test_what_is_installed() -> None:
    assert get_available_libraries()["gymnasium"] is True and "dm_control" in get_available_libraries()
