"""Rules of `check_env` about episodes, seeds and rollouts."""

from __future__ import annotations

from typing import Any

import torch

from gleanrl._arrays.tensordicts import Path, as_key, as_path, flatten
from gleanrl.envs.base import EnvBase
from gleanrl.envs.rollout import RolloutOptions, run_rollout
from gleanrl.errors import ConformanceError
from gleanrl.testing.report import Skip
from gleanrl.testing.runs import OTHER_SEED, Leaves, Runs, Trace, as_text, leaf_specs, rows, same

_ENOUGH = 3
"""Number of ended episodes that the rule on last observations needs."""


def following_root(runs: Runs) -> None:
    """Check that the root after a step is that step's outcome, in each environment that wasn't reset between them."""
    for t, step in enumerate(runs.first.steps):
        for path, leaf in step.outcome.items():
            root = step.following.get(path)
            if root is None:
                continue  # rewards aren't part of a root
            continuing = ~step.restarted
            if not same(rows(root, continuing), rows(leaf, continuing)):
                raise ConformanceError(
                    "following root",
                    f"{as_key(path)!r} after step {t}",
                    f"{as_text(rows(leaf, continuing))}, the step's outcome",
                    as_text(rows(root, continuing)),
                )


def last_observation(runs: Runs) -> None:
    """Check that an episode's last observation isn't the first one of the next episode.

    An environment that resets itself returns the wrong one. A single observation doesn't show that, so the rule
    compares shares. It takes the range of all first observations, widened by its width on both sides. The rule is
    broken if both conditions hold: at least 75 % of the last observations lie in this range, and at most 25 % of the
    observations before them. Raise `Skip` if fewer than `_ENOUGH` episodes ended.
    """
    ended = [(t, step) for t, step in enumerate(runs.first.steps) if bool(step.done.any())]
    if runs.first.num_episodes < _ENOUGH:
        raise Skip(
            f"fewer than {_ENOUGH} episodes ended within {runs.subject.num_steps} steps; pass num_steps"
        )
    declared = leaf_specs(runs.env.full_observation_spec)
    paths = [path for path, spec in declared if spec.dtype is not None and -1 not in spec.shape]
    everyone = torch.ones_like(ended[0][1].done)
    firsts = {
        path: torch.cat(
            [
                rows(runs.first.first[path], everyone),
                *(rows(s.following[path], s.restarted) for _, s in ended),
            ]
        ).double()
        for path in paths
    }
    low = {path: values.amin(0) for path, values in firsts.items()}
    width = {path: values.amax(0) - low[path] for path, values in firsts.items()}

    def share(parts: list[tuple[Leaves, torch.Tensor]]) -> float:
        """Return the share of the rows that lie in the widened range of first observations."""
        inside = []
        for leaves, mask in parts:
            in_range = torch.ones(int(mask.sum()), dtype=torch.bool)
            for path in firsts:
                values = rows(leaves[path], mask).double() - low[path]
                in_range &= (
                    ((values >= -width[path]) & (values <= 2 * width[path]))
                    .reshape(len(in_range), -1)
                    .all(-1)
                    .cpu()
                )
            inside.append(in_range)
        return float(torch.cat(inside).double().mean())

    last = share([(step.outcome, step.done) for _, step in ended])
    before = share([(step.root, step.done) for _, step in ended])
    if last >= 0.75 and before <= 0.25:
        t, step = ended[0]
        path = next(iter(firsts))
        raise ConformanceError(
            "last observation",
            f"{as_key(('next', *path))!r} of step {t}, which ended an episode",
            "the observation that ended it",
            f"{as_text(rows(step.outcome[path], step.done))}, which looks like the first one of an episode (as do "
            f"{last:.0%} of all last ones): the environment resets by itself; return the last observation instead",
        )


def determinism(runs: Runs) -> None:
    """Check that the same seed and the same actions give the same data."""
    difference = _difference(runs.first, runs.again)
    if difference is not None:
        origin, path, a, b = difference
        raise ConformanceError(
            "determinism", f"{as_key(path)!r} of {origin}", f"{as_text(a)}, as in the first run", as_text(b)
        )


def seed(runs: Runs) -> None:
    """Check that `set_seed` returns an integer, and that another seed gives other data.

    For environments that derive from `EnvBase`, the integer is the last seed that was used. Raise `Skip` if the data of
    both seeds and all first observations are alike.
    """
    env = runs.subject.env_for_run()
    last = env.set_seed(runs.seed)
    ours = isinstance(env, EnvBase)
    expected = runs.seed + max(1, runs.subject.batch_size.numel()) - 1
    if isinstance(last, bool) or not isinstance(last, int) or (ours and last != expected):
        wanted = f"{expected}, the last seed that was used" if ours else "an integer"
        raise ConformanceError("seed", "the result of set_seed", wanted, repr(last))
    if _difference(runs.first, runs.other) is not None:
        return
    first, paths = runs.first.first, [as_path(key) for key in env.full_observation_spec.keys(True, True)]
    starts = [step for step in runs.first.steps if bool(step.restarted.any())]
    if all(
        same(rows(s.following[p], s.restarted), rows(first[p], s.restarted)) for s in starts for p in paths
    ):
        raise Skip("all data are alike: the environment shows no randomness")
    raise ConformanceError(
        "seed",
        f"runs with the seeds {runs.seed} and {runs.seed + OTHER_SEED}",
        "other data (if nothing in the environment is random, pass skip=['seed'])",
        "the same data",
    )


def _difference(a: Trace, b: Trace) -> tuple[str, Path, torch.Tensor, torch.Tensor] | None:
    """Return the first difference of two runs: its place, its path, and both values; None if there is none.

    Entries that only `b` has don't count. A value that `b` lacks is shown as an empty tensor.
    """
    pairs = [("reset", a.first, b.first)]
    for t, (one, two) in enumerate(zip(a.steps, b.steps, strict=True)):
        pairs += [
            (f"step {t}", one.outcome, two.outcome),
            (f"the root after step {t}", one.following, two.following),
        ]
    for origin, left, right in pairs:
        for path, leaf in left.items():
            if path not in right or not same(leaf, right[path]):
                return origin, path, leaf, right.get(path, torch.empty(0))
    return None


def rollout(runs: Runs) -> None:
    """Check that the environment's own path into a rollout stores the data that `step` and `reset` return.

    The path (a stepper that writes rows directly) replays the actions of the first run. Raise `Skip` if the rollout
    holds masked steps.
    """
    first = runs.first
    env = runs.subject.env_for_run()
    env.set_seed(runs.seed)
    queue = iter(runs.actions)

    def replay(tensordict: Any) -> Any:
        for path, value in next(queue).items():
            tensordict.set(as_key(path), value.clone())
        return tensordict

    options = RolloutOptions(break_when_any_done=False)
    # Without gradients, as in collectors: with gradients a rollout calls `step`, and the rule would check nothing.
    with torch.no_grad():
        data = flatten(run_rollout(env, runs.subject.num_steps, replay, None, options, None))
    if ("collector", "mask") in data:
        raise Skip("some steps of the rollout are resets, which the recorded run doesn't have")
    dims = len(runs.subject.batch_size)
    for t, step in enumerate(first.steps):
        for prefix, leaves in (((), step.root), (("next",), step.outcome)):
            for path, leaf in leaves.items():
                column = data.get((*prefix, *path))
                if column is None:
                    continue  # a rollout doesn't store entries that the specs don't declare
                row = column.select(dims, t)
                if not same(row, leaf):
                    raise ConformanceError(
                        "rollout",
                        f"{as_key((*prefix, *path))!r} at step {t} of a rollout",
                        f"{as_text(leaf)}, as its methods return",
                        as_text(row),
                    )
