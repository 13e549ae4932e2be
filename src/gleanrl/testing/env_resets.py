"""Rules of `check_env` about partial resets and odd actions."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl.data.specs import Bounded
from gleanrl.errors import ConformanceError
from gleanrl.testing.env_data import as_declared
from gleanrl.testing.report import Skip
from gleanrl.testing.runs import Leaves, Runs, Step, leaf_specs, rows, same, shown, snapshot, with_action
from gleanrl.tree import as_key, as_path

_ODD = 1.5
"""How far an odd action lies outside its bounds, in multiples of their distance ..."""
_FAR = 1e3
"""... of which no more than this counts."""


def partial_reset(runs: Runs) -> None:
    """A reset of some rows leaves the values of the others."""
    mask, before, after, _ = _reset_some(runs)
    for path, leaf in before.items():
        if path in after and not same(rows(leaf, ~mask), rows(after[path], ~mask)):
            raise ConformanceError(
                "partial reset",
                f"{as_key(path)!r} of the rows {(~mask).nonzero().tolist()}, which weren't reset",
                shown(rows(leaf, ~mask)),
                shown(rows(after[path], ~mask)),
            )
    for key in runs.env.done_keys:
        flag = after[as_path(key)]
        if bool(rows(flag, mask).any()):
            where = f"{key!r} of the rows {mask.nonzero().tolist()}, which were reset"
            raise ConformanceError("partial reset", where, "False", shown(rows(flag, mask)))


def other_rows(runs: Runs) -> None:
    """Environments that weren't reset go on as if nothing had happened."""
    mask, _, _, step = _reset_some(runs)
    undisturbed = runs.first.steps[len(_lead_in(runs))]
    others = ~mask
    for path, leaf in undisturbed.outcome.items():
        if not same(rows(leaf, others), rows(step[path], others)):
            raise ConformanceError(
                "other rows",
                f"{as_key(('next', *path))!r} of the rows {others.nonzero().tolist()}, a step after others' reset",
                f"{shown(rows(leaf, others))}, as without it",
                shown(rows(step[path], others)),
            )


def _lead_in(runs: Runs) -> list[Step]:
    """Return the steps before the first end: no row is reset in them."""
    steps = runs.first.steps
    lead = next((t for t, step in enumerate(steps) if bool(step.fresh.any())), len(steps) - 1)
    if lead < 1:
        raise Skip("an episode ends with the first step")
    return steps[: min(lead, 3)]


def _reset_some(runs: Runs) -> tuple[torch.Tensor, Leaves, Leaves, Leaves]:
    """Take some steps, reset every second row and take another step.

    Returns:
        The mask ``(*batch,)``, the root before and after the reset, and the outcome of the following step.
    """
    size = runs.subject.batch_size
    if size.numel() < 2 or not size:
        raise Skip("the environment isn't a batch of several")
    lead = _lead_in(runs)
    mask = torch.arange(size.numel()).reshape(size) % 2 == 1
    env = runs.subject.fresh()
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
        fresh = env.reset(request)
    except NotImplementedError as cause:
        raise Skip(f"it has no partial resets: {cause}") from cause
    after = snapshot(fresh)
    outcome = env.step(with_action(fresh, runs.actions[len(lead)])).get("next")
    return mask, before, after, snapshot(outcome)


def odd_actions(runs: Runs) -> None:
    """An action outside its domain raises, or leads to data as declared; a reset works afterwards."""
    odd = {path: odd_action(spec) for path, spec in leaf_specs(runs.env.full_action_spec)}
    action = {path: value for path, value in odd.items() if value is not None}
    if not action:
        raise Skip("no action lies outside the action's domain")
    env = runs.subject.fresh()
    env.set_seed(runs.seed)
    try:
        given = with_action(env.reset(), {**runs.actions[0], **action})
        leaves = snapshot(env.step(given).get("next"))
    except Exception:  # whatever the environment raises: it noticed
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
    """Return an action outside the domain of `spec`; None if there is none."""
    zero = spec.zero()
    candidates = [torch.full_like(zero, 2), torch.full_like(zero, int(getattr(spec, "n", 0) or 0))]
    if isinstance(spec, Bounded):
        low, high = spec.space.low, spec.space.high
        far = (high - low).clamp(max=_FAR) * _ODD if zero.dtype.is_floating_point else torch.ones_like(high)
        candidates = [high + far]
    elif hasattr(spec, "nvec"):
        candidates.append(torch.full_like(zero, max(torch.as_tensor(spec.nvec).flatten().tolist())))
    if zero.dtype == torch.bool:
        candidates = [zero, ~zero]  # no choice, and all of them
    return next((value for value in candidates if not spec.is_in(value)), None)
