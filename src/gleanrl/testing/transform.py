"""`check_transform`: does a transform do what environments and replay buffers rely on?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from gleanrl.envs.transforms import Compose, Transform, TransformedEnv
from gleanrl.errors import InvalidArgumentError
from gleanrl.testing import transform_buffer, transform_env
from gleanrl.testing.env import RULES as ENV_RULES
from gleanrl.testing.env import check_env
from gleanrl.testing.report import EnvReport, PartReport, check_rules, left_out, made

IN_ENVIRONMENTS: dict[str, Callable[[transform_env.Trial], None]] = {
    "in place": transform_env.in_place,
    "trajectories": transform_env.trajectories,
    "state": transform_env.state,
}
IN_BUFFERS: dict[str, Callable[[Callable[[], Any], TensorDictBase], None]] = {
    "read": transform_buffer.read,
    "written": transform_buffer.written,
    "inverse": transform_buffer.inverse,
}


def check_transform(
    make: Callable[[], Transform],
    *,
    env: Callable[[], Any] | None = None,
    batch: TensorDictBase | None = None,
    num_steps: int = 60,
    seed: int = 0,
    skip: Iterable[str] = (),
) -> PartReport:
    """Check a transform in an environment, in a replay buffer, or in both.

    With `env`, the transformed environment has to keep every rule of `check_env`: specs declare what comes, rows of a
    rollout and TensorDicts agree to the bit, a reset of some environments leaves the others alone. And these:

    | rule | what it asks for |
    | --- | --- |
    | in place | the tensors that the environment returned hold afterwards what they held before |
    | trajectories | after a reset of everything nothing is left of what came before, unless the transform `learns` |
    | state | one that loads a saved state goes on to the bit; a state that lacks an entry is refused |
    | read | `forward` returns a batch, and writes into none of the tensors that it is given |
    | written | `inv` returns what is to be written, or None, and leaves what it is given as it is |
    | inverse | what was written is read as it was; left out where a key is mapped in one direction only |

    Args:
        make: makes the transform, a fresh one at each call.
        env: makes an environment that keeps `check_env`'s rules, a fresh one at each call; None: environments aren't
            looked at.
        batch: what a buffer gets to store; None: buffers aren't looked at.
        num_steps: steps of a run; trajectories should end within them.
        seed: of the runs.
        skip: names of rules to leave out, those of `check_env` included.

    Returns:
        Which rules were checked, and which weren't, with the reasons.

    Raises:
        ConformanceError: at the first broken rule (also an AssertionError).
        InvalidArgumentError: without `env` and `batch`, or if `skip` names an unknown rule.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> from gleanrl.envs.transforms import RewardSum
        >>> report = check_transform(RewardSum, env=lambda: GymEnv("CartPole-v1"), num_steps=40)
        >>> "state" in report.passed
        True
    """
    without = left_out(skip, [*ENV_RULES, *IN_ENVIRONMENTS, *IN_BUFFERS])
    if env is None and batch is None:
        raise InvalidArgumentError("check_transform: give env, batch, or both")
    name = type(made(make, Transform)).__name__
    of_env: EnvReport | None = None
    rules: dict[str, Callable[[], None]] = {}
    if env is not None:
        skipped = without & ENV_RULES.keys()
        of_env = check_env(_transformed(env, make), num_steps=num_steps, seed=seed, skip=skipped)
        trial = transform_env.Trial(env, make, num_steps, seed)
        rules |= {rule: partial(check, trial) for rule, check in IN_ENVIRONMENTS.items()}
    if batch is not None:
        rules |= {rule: partial(check, make, batch) for rule, check in IN_BUFFERS.items()}
    passed, left = check_rules(rules, without)
    if of_env is None:
        return PartReport(name, passed, left)
    return PartReport(name, (*of_env.passed, *passed), {**of_env.skipped, **left})


def _transformed(env: Callable[[], Any], make: Callable[[], Transform]) -> Callable[[], TransformedEnv]:
    return lambda: TransformedEnv(env(), Compose(make()))
