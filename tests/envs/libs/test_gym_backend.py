"""Programs can choose their backend: gymnasium, or gym where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import gymnasium
import pytest

from gleanrl.envs import GymEnv, GymWrapper, check_env_specs, get_available_libraries
from gleanrl.envs.libs.gym_backend import gym_backend, set_gym_backend
from gleanrl.errors import UnsupportedError

HAS_GYM = all(importlib.util.find_spec(package) for package in ("gym", "shimmy"))


def returns_gymnasium() -> Any:
    return gymnasium


@pytest.mark.parametrize("backend", ["gymnasium", gymnasium, returns_gymnasium])
def test_gymnasium_is_chosen_by_name_module_context_and_decorator(backend: Any) -> None:
    with set_gym_backend(backend):
        assert gym_backend() is gymnasium
    set_gym_backend(backend).set()

    @set_gym_backend(backend)
    def double(x: int, *, y: int) -> int:
        """Docstring."""
        return 2 * x + y

    assert double(2, y=1) == 5 and double.__name__ == "double"


@pytest.mark.parametrize("backend", ["jax", pytest, None])
def test_other_backends_are_refused(backend: Any) -> None:
    with pytest.raises(UnsupportedError, match="expected 'gymnasium' or 'gym'"):
        set_gym_backend(backend)


@pytest.mark.skipif(HAS_GYM, reason="gym and shimmy are installed")
def test_missing_gym_names_the_packages_to_install() -> None:
    with pytest.raises(UnsupportedError, match="packages that aren't installed: .*shimmy"):
        set_gym_backend("gym")


@pytest.mark.skipif(not HAS_GYM, reason="needs gym and shimmy")
def test_gym_backend_makes_environments_of_gym() -> None:
    gym = importlib.import_module("gym")
    with set_gym_backend("gym"):
        assert gym_backend() is gym and gym_backend("spaces") is gym.spaces
        made = [GymEnv("CartPole-v1"), GymEnv("CartPole-v1", num_envs=2)]
    assert gym_backend() is gymnasium
    for env in (*made, GymWrapper(gym.make("CartPole-v1", disable_env_checker=True))):
        unwrapped = getattr(env._env, "envs", [env._env])[0].unwrapped
        assert isinstance(getattr(unwrapped, "gym_env", unwrapped), gym.Env)
        check_env_specs(env)
        batch = env.rollout(300)
        assert bool(batch["next", "terminated"].any())
        env.close()
    assert made[0].env_name == "CartPole-v1"
    made[0].rollout(2)  # made again by gym, though the `with` block has ended


def test_backend_submodules_are_imported() -> None:
    assert gym_backend("wrappers") is gymnasium.wrappers


def test_available_libraries_lists_installed_ones() -> None:
    assert get_available_libraries()["gymnasium"] is True and "dm_control" in get_available_libraries()
