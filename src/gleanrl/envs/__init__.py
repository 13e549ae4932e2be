"""Environments: the base class, gymnasium's environments, and helpers."""

from gleanrl.envs.base import EnvBase
from gleanrl.envs.batched_envs import ParallelEnv, SerialEnv
from gleanrl.envs.libs.gym import GymEnv, GymWrapper, gym_backend, set_gym_backend
from gleanrl.envs.utils import (
    ExplorationType,
    MarlGroupMapType,
    RandomPolicy,
    check_env_specs,
    check_marl_grouping,
    exploration_mode,
    exploration_type,
    set_exploration_mode,
    set_exploration_type,
    step_mdp,
)

__all__ = [
    "EnvBase",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "MarlGroupMapType",
    "ParallelEnv",
    "RandomPolicy",
    "SerialEnv",
    "check_env_specs",
    "check_marl_grouping",
    "exploration_mode",
    "exploration_type",
    "gym_backend",
    "set_exploration_mode",
    "set_exploration_type",
    "set_gym_backend",
    "step_mdp",
]
