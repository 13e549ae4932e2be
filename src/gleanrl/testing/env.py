"""`check_env`: does an environment do what the loops of this library, and its users, rely on?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium

from gleanrl.arguments import integer
from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.envs.vector.factories import is_environment
from gleanrl.errors import InvalidTypeError
from gleanrl.rollouts.traits import Env
from gleanrl.testing import env_data, env_episodes, env_resets
from gleanrl.testing.report import EnvReport, check_rules, left_out
from gleanrl.testing.runs import Runs, Subject

RULES: dict[str, Callable[[Runs], None]] = {
    "contract": env_data.contract,
    "specs": env_data.specs,
    "finite": env_data.finite,
    "flags": env_data.flags,
    "aliasing": env_data.aliasing,
    "input": env_data.inputs,
    "following root": env_episodes.following_root,
    "last observation": env_episodes.last_observation,
    "determinism": env_episodes.determinism,
    "seed": env_episodes.seed,
    "partial reset": env_resets.partial_reset,
    "other rows": env_resets.other_rows,
    "odd actions": env_resets.odd_actions,
    "rollout": env_episodes.rollout,
}
"""The rules by name, in the order in which they are checked."""


def check_env(env: Any, *, num_steps: int = 100, seed: int = 0, skip: Iterable[str] = ()) -> EnvReport:
    """Check an environment against the rules in the table below, with random actions.

    | rule | what it asks for |
    | --- | --- |
    | contract | a run doesn't break off: resets aren't done, declared keys are there |
    | specs | keys, shapes, dtypes and values are as declared |
    | finite | no NaN and no infinity in observations and rewards |
    | flags | done is terminated or truncated; after a reset all flags are False |
    | aliasing | a tensor that was returned never changes later |
    | input | a step changes none of the entries it is given |
    | following root | the root after a step that ended nothing is that step's outcome |
    | last observation | a step that ends an episode returns its last observation, not the next one's first |
    | determinism | the same seed and the same actions give the same data, to the bit |
    | seed | another seed gives other data, unless all episodes are alike; set_seed returns an integer |
    | partial reset | a reset of some rows of a batch leaves the values of the others |
    | other rows | and their environments go on as if nothing had happened |
    | odd actions | an action outside its domain raises, or leads to data as declared; a reset works afterwards |
    | rollout | the environment's own path into a rollout stores what its `step` and `reset` return |

    The environment is seeded, reset and stepped several hundred times; it isn't closed. Torch's random state is as
    before afterwards.

    Args:
        env: an environment that keeps EnvBase's protocol, a gymnasium environment or vector environment, or a
            callable that makes one: each run then gets a fresh one, which is closed afterwards. An environment that
            counts its resets, say, is only repeatable that way.
        num_steps: steps of a run; episodes should end within them, else rules about ends are skipped.
        seed: of the runs.
        skip: names of rules to leave out.

    Returns:
        Which rules were checked, and which weren't, with the reasons.

    Raises:
        ConformanceError: at the first broken rule: its name, the key or the call, what was expected and what came
            (also an AssertionError).
        InvalidArgumentError: if `skip` names the first rule or an unknown one, or `num_steps` isn't positive.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> report = check_env(GymEnv("CartPole-v1"), num_steps=50)
        >>> "last observation" in report.passed
        True
    """
    num_steps = integer("num_steps", num_steps, 2)
    without = left_out(skip, [*RULES][1:])  # "contract" stays: without a run there is nothing to check
    subject = Subject(_environment(env), num_steps)
    runs = Runs(subject, seed)
    try:
        found = check_rules({name: partial(rule, runs) for name, rule in RULES.items()}, without)
    finally:
        subject.close()
    return EnvReport(subject.name, num_steps, runs.first.num_episodes, *found)


def _environment(env: Env) -> Any:
    """Return an environment of the protocol, or a callable that makes one."""
    if isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        return GymWrapper(env)
    if is_environment(env):
        return env
    if not callable(env):
        raise InvalidTypeError(
            f"env: expected an environment or a callable that makes one, got {type(env).__name__}"
        )
    return lambda: _made(env())


def _made(env: Env) -> Any:
    made = _environment(env)
    if not is_environment(made):
        raise InvalidTypeError(f"env: the callable made {type(env).__name__}, expected an environment")
    return made
