"""Environments: the base class, gymnasium's environments, and helpers."""

from gleanrl.envs.base import EnvBase
from gleanrl.envs.utils import (
    ExplorationType,
    RandomPolicy,
    check_env_specs,
    exploration_mode,
    exploration_type,
    set_exploration_mode,
    set_exploration_type,
    step_mdp,
)

__all__ = [
    "EnvBase",
    "ExplorationType",
    "RandomPolicy",
    "check_env_specs",
    "exploration_mode",
    "exploration_type",
    "set_exploration_mode",
    "set_exploration_type",
    "step_mdp",
]
