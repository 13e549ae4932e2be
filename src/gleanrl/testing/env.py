"""`check_env`: checks that an environment does what collectors, rollouts and users rely on.

To add a rule, write a function that takes `Runs` and raises `ConformanceError`, and name it in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import gymnasium
import torch

from gleanrl._arrays.ragged import values_of
from gleanrl._arrays.tensordicts import FLAGS, Path, as_key, as_path
from gleanrl._rollout.env_traits import Env, EnvTraits
from gleanrl._state.rng import torch_rng_preserved
from gleanrl._util import integer
from gleanrl.data.specs import Bounded, TensorSpec
from gleanrl.data.specs.base import fits
from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.envs.vector.factories import is_environment
from gleanrl.errors import ConformanceError, InvalidTypeError
from gleanrl.testing import env_episodes
from gleanrl.testing.report import EnvReport, Skip, check_rules, left_out
from gleanrl.testing.runs import (
    Leaves,
    Runs,
    Step,
    Subject,
    as_text,
    leaf_specs,
    rows,
    same,
    snapshot,
    with_action,
)


def contract(runs: Runs) -> None:
    """Check that a run keeps the environment's contract; any error but `EnvironmentContractError` passes unchanged."""
    _ = runs.first


def inputs(runs: Runs) -> None:
    """Check that a step doesn't change its input."""
    for origin, path in runs.first.changed:
        raise ConformanceError(
            "input", f"{as_key(path)!r} in the input of {origin}", "an unchanged value", "another value"
        )


def specs(runs: Runs) -> None:
    """Check that keys, shapes, dtypes and values are as declared."""
    root, outcome = runs.declared
    for origin, leaves, after in runs.origins():
        if after:
            as_declared("specs", origin, leaves, outcome, runs.states)
        else:
            as_declared("specs", origin, leaves, root, leaves)


def as_declared(
    rule: str, origin: str, leaves: Leaves, declared: dict[Path, TensorSpec], besides: Collection[Path]
) -> None:
    """Check keys, shapes, dtypes and domains of `leaves`.

    Args:
        rule: the rule that messages name.
        origin: origin of the data, for messages.
        leaves: the data.
        declared: the specs by path.
        besides: further paths that may exist.
    """
    missing, extra = set(declared) - set(leaves), set(leaves) - set(declared) - set(besides)
    if missing or extra:
        keys = sorted(map(str, map(as_key, missing or extra)))
        got = f"no {keys}" if missing else f"{keys} in addition"
        raise ConformanceError(rule, origin, f"the keys {sorted(map(str, map(as_key, declared)))}", got)
    for path, spec in declared.items():
        leaf, where = leaves[path], f"{as_key(path)!r} of {origin}"
        numbers = isinstance(leaf, torch.Tensor)
        if numbers and (not _shaped(leaf.shape, spec.shape) or leaf.dtype != spec.dtype):
            raise ConformanceError(
                rule, where, f"{tuple(spec.shape)} {spec.dtype}", f"{tuple(leaf.shape)} {leaf.dtype}"
            )
        if not all(part.is_in(value) for value, part in values_of(leaf, spec)):
            raise ConformanceError(rule, where, f"a value of {spec!r}", as_text(leaf))


def _shaped(shape: torch.Size, wanted: torch.Size) -> bool:
    return len(shape) == len(wanted) and fits(shape, wanted)


def finite(runs: Runs) -> None:
    """Check that observations and rewards are finite.

    If the environment loses last observations (see `EnvTraits.loses_last`), outcomes in which an episode ended aren't
    checked.
    """
    lost = EnvTraits.of(runs.env).loses_last
    for origin, leaves, after in runs.origins():
        if lost and after and bool(leaves[("done",)].any()):
            continue
        for path in runs.declared[1]:
            leaf = leaves.get(path)
            if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
                continue
            if not bool(leaf.isfinite().all()):
                raise ConformanceError(
                    "finite", f"{as_key(path)!r} of {origin}", "finite numbers", as_text(leaf)
                )


def flags(runs: Runs) -> None:
    """Check that done is terminated or truncated, and that all flags are False after a reset.

    The second check is left out if the environment allows done after a reset.

    Collectors reset by done, and value estimators bootstrap by terminated, so flags that disagree give wrong returns.
    """
    groups = {as_path(key)[:-1] for key in runs.env.done_keys}
    for origin, leaves, _ in runs.origins():
        for group in groups:
            done, terminated = leaves[(*group, "done")], leaves[(*group, "terminated")]
            either = terminated | leaves.get((*group, "truncated"), torch.zeros_like(terminated))
            if not torch.equal(done, either):
                where = f"{as_key((*group, 'done'))!r} of {origin}"
                got = f"done {done.tolist()}, terminated or truncated {either.tolist()}"
                raise ConformanceError("flags", where, "terminated or truncated", got)
    may = EnvTraits.of(runs.env).allow_done_after_reset
    starts = [("reset", runs.first.first, torch.ones(runs.subject.batch_size, dtype=torch.bool))]
    starts += [
        (f"the reset after step {t}", step.following, step.restarted)
        for t, step in enumerate(runs.first.steps)
    ]
    for origin, leaves, restarted in starts:
        for group in groups:
            for name in FLAGS:
                flag = leaves.get((*group, name))
                if flag is not None and not may and bool(rows(flag, restarted).any()):
                    raise ConformanceError(
                        "flags", f"{as_key((*group, name))!r} of {origin}", "False", as_text(flag)
                    )


def aliasing(runs: Runs) -> None:
    """Check that a returned tensor never changes later."""
    for item in runs.first.returned:
        if not same(item.leaf, item.copy):
            raise ConformanceError(
                "aliasing",
                f"{as_key(item.path)!r} of {item.origin}",
                f"{as_text(item.copy)}, as it was returned",
                f"{as_text(item.leaf)} later: the environment overwrites its own tensors; return copies",
            )


_ODD = 1.5
"""Distance of an odd action from its bounds, in multiples of their width; `_FAR` limits that width."""
_FAR = 1e3
"""Largest width of bounds that `_ODD` multiplies, so that an odd action remains finite."""


def partial_reset(runs: Runs) -> None:
    """Check that a reset of some rows doesn't change the other rows, and that the flags of the reset rows are False.

    Raise `Skip` as `_reset_some` does.
    """
    mask, before, after, _ = _reset_some(runs)
    for path, leaf in before.items():
        if path in after and not same(rows(leaf, ~mask), rows(after[path], ~mask)):
            raise ConformanceError(
                "partial reset",
                f"{as_key(path)!r} of the rows {(~mask).nonzero().tolist()}, which weren't reset",
                as_text(rows(leaf, ~mask)),
                as_text(rows(after[path], ~mask)),
            )
    for key in runs.env.done_keys:
        flag = after[as_path(key)]
        if bool(rows(flag, mask).any()):
            where = f"{key!r} of the rows {mask.nonzero().tolist()}, which were reset"
            raise ConformanceError("partial reset", where, "False", as_text(rows(flag, mask)))


def other_rows(runs: Runs) -> None:
    """Check that environments that weren't reset continue as if no other one had been.

    Raise `Skip` as `_reset_some` does.
    """
    mask, _, _, step = _reset_some(runs)
    undisturbed = runs.first.steps[len(_lead_in(runs))]
    unreset = ~mask
    for path, leaf in undisturbed.outcome.items():
        if not same(rows(leaf, unreset), rows(step[path], unreset)):
            raise ConformanceError(
                "other rows",
                f"{as_key(('next', *path))!r} of the rows {unreset.nonzero().tolist()}, one step after a reset of the "
                "other rows",
                f"{as_text(rows(leaf, unreset))}, as without that reset",
                as_text(rows(step[path], unreset)),
            )


def _lead_in(runs: Runs) -> list[Step]:
    """Return at most three steps before the first end: no row is reset during them.

    Raises:
        Skip: if an episode ends with the first step.
    """
    steps = runs.first.steps
    lead = next((t for t, step in enumerate(steps) if bool(step.restarted.any())), len(steps) - 1)
    if lead < 1:
        raise Skip("an episode ends with the first step")
    return steps[: min(lead, 3)]


def _reset_some(runs: Runs) -> tuple[torch.Tensor, Leaves, Leaves, Leaves]:
    """Take some steps, reset every second row and take another step.

    The steps repeat the start of the first run (same seed and actions), so that rules can compare the other rows with
    it.

    Returns:
        The mask ``(*batch,)``, the root before and after the reset, and the outcome of the following step.

    Raises:
        Skip: if the environment isn't a batch of several, has no partial resets, or an episode ends with the first
            step.
    """
    size = runs.subject.batch_size
    if size.numel() < 2 or not size:
        raise Skip("the environment isn't a batch of several")
    lead = _lead_in(runs)
    mask = torch.arange(size.numel()).reshape(size) % 2 == 1
    env = runs.subject.env_for_run()
    env.set_seed(runs.seed)
    root = env.reset()
    for action in runs.actions[: len(lead)]:
        root, _ = runs.subject.follow(env, env.step(with_action(root, action)))
    before, request = snapshot(root), root.copy()
    for key in env.done_keys:
        if as_path(key)[-1] == "done":
            flag = root.get(key)
            shaped = mask.reshape((*size, *[1] * (flag.ndim - len(size)))).expand(flag.shape)
            request.set(as_key((*as_path(key)[:-1], "_reset")), shaped.to(flag.device, copy=True))
    try:
        following = env.reset(request)
    except NotImplementedError as cause:
        raise Skip(f"the environment has no partial resets: {cause}") from cause
    after = snapshot(following)
    outcome = env.step(with_action(following, runs.actions[len(lead)])).get("next")
    return mask, before, after, snapshot(outcome)


def odd_actions(runs: Runs) -> None:
    """Check that an action outside its domain raises or leads to data as declared, and that a reset works afterwards.

    Otherwise a policy's mistake could go unnoticed as NaN in the data, or break the environment for later episodes.
    Raise `Skip` if `odd_action` finds no such action.
    """
    odd = {path: odd_action(spec) for path, spec in leaf_specs(runs.env.full_action_spec)}
    action = {path: value for path, value in odd.items() if value is not None}
    if not action:
        raise Skip("no action lies outside the action's domain")
    env = runs.subject.env_for_run()
    env.set_seed(runs.seed)
    try:
        inputs = with_action(env.reset(), {**runs.actions[0], **action})
        leaves = snapshot(env.step(inputs).get("next"))
    except Exception:  # any error will do: the environment has noticed the action
        leaves = None
    if leaves is not None:
        as_declared(
            "odd actions", "a step with an action out of its domain", leaves, runs.declared[1], runs.states
        )
        tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
        runs_finite = all(bool(v.isfinite().all()) for v in tensors if v.dtype.is_floating_point)
        if not runs_finite:
            raise ConformanceError(
                "odd actions",
                "a step with an action out of its domain",
                "an error or finite data",
                "NaN or infinity",
            )
    try:
        env.reset()
    except Exception as cause:
        raise ConformanceError(
            "odd actions",
            "reset, after an action out of its domain",
            "a new episode",
            f"{type(cause).__name__}: {cause}",
        ) from cause


def odd_action(spec: Any) -> torch.Tensor | None:
    """Return an action outside the domain of `spec`; None if no candidate is outside."""
    zero = spec.zero()
    candidates = [torch.full_like(zero, 2), torch.full_like(zero, int(getattr(spec, "n", 0) or 0))]
    if isinstance(spec, Bounded):
        low, high = spec.space.low, spec.space.high
        far = (high - low).clamp(max=_FAR) * _ODD if zero.dtype.is_floating_point else torch.ones_like(high)
        candidates = [high + far]
    elif hasattr(spec, "nvec"):
        candidates.append(torch.full_like(zero, max(torch.as_tensor(spec.nvec).flatten().tolist())))
    if zero.dtype == torch.bool:
        candidates = [zero, ~zero]  # none of the choices, and all of them
    return next((value for value in candidates if not spec.is_in(value)), None)


RULES: dict[str, Callable[[Runs], None]] = {
    "contract": contract,
    "specs": specs,
    "finite": finite,
    "flags": flags,
    "aliasing": aliasing,
    "input": inputs,
    "following root": env_episodes.following_root,
    "last observation": env_episodes.last_observation,
    "determinism": env_episodes.determinism,
    "seed": env_episodes.seed,
    "partial reset": partial_reset,
    "other rows": other_rows,
    "odd actions": odd_actions,
    "rollout": env_episodes.rollout,
}
"""The rules by name, in the order of their checks."""


@torch_rng_preserved()  # an environment may seed torch itself
def check_env(env: Any, *, num_steps: int = 100, seed: int = 0, skip: Iterable[str] = ()) -> EnvReport:
    """Check an environment against the rules below, with random actions.

    - `contract`: a run doesn't raise: a reset isn't done, and the declared keys exist.
    - `specs`: keys, shapes, dtypes and values are as declared.
    - `finite`: no NaN and no infinity in observations and rewards.
    - `flags`: done is terminated or truncated; after a reset all flags are False.
    - `aliasing`: a returned tensor never changes later.
    - `input`: a step changes none of its input's entries.
    - `following root`: the root after a step that ended nothing is that step's outcome.
    - `last observation`: a step that ends an episode returns its last observation, not the first one of the next.
    - `determinism`: the same seed and the same actions give the same data, bit for bit.
    - `seed`: another seed gives other data, unless all episodes are alike; set_seed returns an integer.
    - `partial reset`: a reset of some rows of a batch doesn't change the values of the other rows.
    - `other rows`: the environments of these other rows continue as if no row had been reset.
    - `odd actions`: an action outside its domain raises, or leads to data as declared; a reset works afterwards.
    - `rollout`: the environment's own path into a rollout stores the data that its `step` and `reset` return.

    The environment is seeded, reset and stepped several hundred times. It isn't closed. Torch's random state is
    restored afterwards.

    Args:
        env: an environment by EnvBase's protocol, a gymnasium environment or vector environment, or a callable that
            makes one. With a callable, each run gets a fresh environment, which is closed afterwards. An environment
            that counts its resets, for example, is repeatable only with a callable.
        num_steps: steps of a run. Episodes should end within them; otherwise rules about ends are skipped.
        seed: seed of the runs.
        skip: names of rules to leave out.

    Returns:
        The rules that were checked, and the rules that weren't with the reasons.

    Raises:
        ConformanceError: the first broken rule: its name, the key or the call, the expected and the actual value (also
            an AssertionError).
        InvalidArgumentError: `skip` names `contract` or an unknown rule, or `num_steps` isn't an integer of 2 or more.
        InvalidTypeError: `env` is neither an environment nor a callable that makes one.
        Exception: any error of the environment's `reset` or `step`, except where a rule catches it.

    Examples:
        >>> from gleanrl.envs import GymEnv
        >>> report = check_env(GymEnv("CartPole-v1"), num_steps=50)
        >>> "last observation" in report.passed
        True
    """
    num_steps = integer("num_steps", num_steps, 2)
    without = left_out(skip, [*RULES][1:])  # "contract" can't be skipped: the other rules need its run
    subject = Subject(_environment(env), num_steps)
    runs = Runs(subject, seed)
    try:
        found = check_rules({name: partial(rule, runs) for name, rule in RULES.items()}, without)
    finally:
        subject.close()
    return EnvReport(subject.name, num_steps, runs.first.num_episodes, *found)


def _environment(env: Env) -> Any:
    """Return an environment by EnvBase's protocol, or a callable that makes one; gymnasium's environments are wrapped.

    Raises:
        InvalidTypeError: `env` is neither an environment nor callable.
    """
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
