"""Public helpers for environments: `step_mdp`, exploration types, checks, specs from data, the random policy."""

from gleanrl._rollout.policies import Greedy, RandomPolicy
from gleanrl._rollout.step_mdp import step_mdp
from gleanrl.compat import bind
from gleanrl.envs.check import check_env_specs
from gleanrl.envs.env_specs import make_composite_from_td, make_tensordict
from gleanrl.envs.exploration import (
    ExplorationType,
    exploration_mode,
    exploration_type,
    set_exploration_mode,
    set_exploration_type,
)
from gleanrl.envs.libs.gym_backend import get_available_libraries
from gleanrl.envs.marl import MarlGroupMapType, check_marl_grouping
from gleanrl.envs.outcomes import terminated_or_truncated

__all__ = [
    "ExplorationType",
    "Greedy",
    "MarlGroupMapType",
    "RandomPolicy",
    "check_env_specs",
    "check_marl_grouping",
    "exploration_mode",
    "exploration_type",
    "get_available_libraries",
    "make_composite_from_td",
    "make_tensordict",
    "set_exploration_mode",
    "set_exploration_type",
    "step_mdp",
    "terminated_or_truncated",
]

bind(__name__, globals())
