"""Environments: the base class, gymnasium's environments, and helpers."""

from gleanrl._process.worker import Timeouts
from gleanrl.compat import bind
from gleanrl.envs import policy_state as _policy_state  # noqa: F401 - `rollout` finds it in KEEPING_STATE
from gleanrl.envs import transforms as _transforms
from gleanrl.envs.base import EnvBase
from gleanrl.envs.custom import PendulumEnv, TicTacToeEnv
from gleanrl.envs.env_creator import EnvCreator, env_creator, get_env_metadata
from gleanrl.envs.libs.gym import (
    BaseInfoDictReader,
    GymEnv,
    GymLikeEnv,
    GymWrapper,
    default_info_dict_reader,
    gym_backend,
    register_gym_spec_conversion,
    set_gym_backend,
)
from gleanrl.envs.model_based import ModelBasedEnvBase
from gleanrl.envs.transforms import *  # noqa: F403 - every transform, under its own list of names
from gleanrl.envs.utils import (
    ExplorationType,
    Greedy,
    MarlGroupMapType,
    RandomPolicy,
    check_env_specs,
    check_marl_grouping,
    exploration_mode,
    exploration_type,
    get_available_libraries,
    make_composite_from_td,
    make_tensordict,
    set_exploration_mode,
    set_exploration_type,
    step_mdp,
    terminated_or_truncated,
)
from gleanrl.envs.vector.async_pool import AsyncEnvPool, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool
from gleanrl.envs.vector.factories import EnvMetaData
from gleanrl.envs.vector.parallel import ParallelEnv
from gleanrl.envs.vector.serial import SerialEnv

__all__ = [
    "AsyncEnvPool",
    "BaseInfoDictReader",
    "EnvBase",
    "EnvCreator",
    "EnvMetaData",
    "ExplorationType",
    "Greedy",
    "GymEnv",
    "GymLikeEnv",
    "GymWrapper",
    "MarlGroupMapType",
    "ModelBasedEnvBase",
    "ParallelEnv",
    "PendulumEnv",
    "ProcessorAsyncEnvPool",
    "RandomPolicy",
    "SerialEnv",
    "ThreadingAsyncEnvPool",
    "TicTacToeEnv",
    "Timeouts",
    "check_env_specs",
    "check_marl_grouping",
    "default_info_dict_reader",
    "env_creator",
    "exploration_mode",
    "exploration_type",
    "get_available_libraries",
    "get_env_metadata",
    "gym_backend",
    "make_composite_from_td",
    "make_tensordict",
    "register_gym_spec_conversion",
    "set_exploration_mode",
    "set_exploration_type",
    "set_gym_backend",
    "step_mdp",
    "terminated_or_truncated",
]
__all__ += _transforms.__all__

bind(__name__, globals())
