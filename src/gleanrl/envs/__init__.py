"""Environments: the base class, gymnasium's environments, and helpers."""

from gleanrl.compat import bind
from gleanrl.envs import transforms as _transforms
from gleanrl.envs.base import EnvBase
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
from gleanrl.envs.vector.creator import EnvCreator, env_creator, get_env_metadata
from gleanrl.envs.vector.metadata import EnvMetaData
from gleanrl.envs.vector.parallel import ParallelEnv
from gleanrl.envs.vector.serial import SerialEnv
from gleanrl.workers.handle import Timeouts

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

bind(__name__, globals())
