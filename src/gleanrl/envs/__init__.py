"""Environments: the base class, gymnasium's environments, and helpers."""

from gleanrl.envs import transforms as _transforms
from gleanrl.envs.base import EnvBase
from gleanrl.envs.batched_envs import (
    EnvCreator,
    EnvMetaData,
    ParallelEnv,
    SerialEnv,
    Timeouts,
    env_creator,
    get_env_metadata,
)
from gleanrl.envs.libs.gym import GymEnv, GymWrapper, gym_backend, set_gym_backend
from gleanrl.envs.transforms import *  # noqa: F403 - every transform, under its own list of names
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
    "EnvCreator",
    "EnvMetaData",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "MarlGroupMapType",
    "ParallelEnv",
    "RandomPolicy",
    "SerialEnv",
    "Timeouts",
    "check_env_specs",
    "check_marl_grouping",
    "env_creator",
    "exploration_mode",
    "exploration_type",
    "get_env_metadata",
    "gym_backend",
    "set_exploration_mode",
    "set_exploration_type",
    "set_gym_backend",
    "step_mdp",
]
__all__ += _transforms.__all__
