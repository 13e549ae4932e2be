"""Wrappers for environments of other libraries: gymnasium, and gym through shimmy."""

from gleanrl.envs.libs.gym import GymEnv, GymLikeEnv, GymWrapper, gym_backend, set_gym_backend
from gleanrl.envs.libs.gym_spaces import register_gym_spec_conversion

__all__ = [
    "GymEnv",
    "GymLikeEnv",
    "GymWrapper",
    "gym_backend",
    "register_gym_spec_conversion",
    "set_gym_backend",
]
