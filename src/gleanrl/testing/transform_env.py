"""Rules of `check_transform` about transforms in environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.envs.transforms import Compose, Transform, TransformedEnv
from gleanrl.errors import ConformanceError, GleanError
from gleanrl.rollouts.traits import Env
from gleanrl.testing.report import Skip
from gleanrl.testing.runs import Leaves, Subject, Trace, same, snapshot, with_action
from gleanrl.tree import Path, as_key, iter_leaves


@dataclass(frozen=True)
class Trial:
    """What is checked: makers of the environment and of the transform, and the runs."""

    env: Callable[[], Any]
    make: Callable[[], Transform]
    num_steps: int
    seed: int

    def transformed(self, *before: Transform) -> TransformedEnv:
        """Return a fresh environment with a fresh transform, which the last one of a chain is."""
        return TransformedEnv(self.env(), Compose(*before, self.make()))


class Holding(Transform):
    """Keeps what comes out of the environment, and copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Path, torch.Tensor, torch.Tensor]] = []

    def _call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.held = [(path, leaf, leaf.clone()) for path, leaf in iter_leaves(tensordict)]
        return tensordict

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def look(self, during: str) -> None:
        """Raise `ConformanceError` if any of it changed."""
        for path, leaf, copy in self.held:
            if not same(leaf, copy):
                raise ConformanceError(
                    "in place",
                    f"{as_key(path)!r} at a {during}",
                    "a new tensor for what is changed: the environment may keep the one that it returned",
                    "that tensor with other values",
                )


def in_place(trial: Trial) -> None:
    """The tensors that the environment returned hold what they held."""
    holding = Holding()
    env = trial.transformed(holding)
    env.set_seed(trial.seed)
    root = env.reset()
    holding.look("reset")
    for action in Subject(env, 8).actions(trial.seed):
        stepped = env.step(with_action(root, action))
        holding.look("step")
        root = Subject(env, 1).follow(env, stepped)[0]
        holding.look("reset")
    env.close()


def trajectories(trial: Trial) -> None:
    """After a reset of everything nothing is left of what came before."""
    if trial.make().learns:
        raise Skip("the transform learns")
    runs = []
    for env in (trial.env(), trial.transformed()):
        subject = Subject(env, trial.num_steps)
        actions = subject.actions(trial.seed)
        found = _difference(subject.run(trial.seed, actions), subject.run(trial.seed, actions))
        runs.append(found)
        env.close()
    if runs[0] is not None:
        raise Skip("the environment doesn't repeat itself after set_seed and reset")
    if runs[1] is not None:
        raise ConformanceError(
            "trajectories", runs[1], "the same as before, after the same seed and actions", "another value"
        )


def _difference(one: Trace, other: Trace) -> str | None:
    """Return where two runs differ; None if they don't."""
    pairs = [("the first root", one.first, other.first)]
    for t, (mine, its) in enumerate(zip(one.steps, other.steps, strict=True)):
        pairs.append((f"step {t}", mine.outcome, its.outcome))
        pairs.append((f"the root after step {t}", mine.following, its.following))
    for place, a, b in pairs:
        for path in a.keys() | b.keys():
            if path not in a or path not in b or not same(a[path], b[path]):
                return f"{as_key(path)!r} of {place}"
    return None


def state(trial: Trial) -> None:
    """One that loads a saved state goes on to the bit."""
    half = max(1, trial.num_steps // 2)
    actions = Subject(trial.transformed(), trial.num_steps).actions(trial.seed)
    env, twin = trial.transformed(), trial.transformed()
    root, _ = _run(env, None, actions[:half], trial.seed)
    _run(twin, None, actions[:half], trial.seed)  # for the sake of its base environment
    fresh = TransformedEnv(twin.base_env, Compose(trial.make()))
    saved = env.transform.state_dict()
    fresh.transform.load_state_dict(saved)
    before = fresh.transform.state_dict()
    _, want = _run(env, root, actions[half:], trial.seed)
    _, got = _run(fresh, root, actions[half:], trial.seed)
    for t, (a, b) in enumerate(zip(want, got, strict=True)):
        for path in a:
            if path not in b or not same(a[path], b[path]):
                raise ConformanceError(
                    "state",
                    f"{as_key(path)!r} {t} steps after a load",
                    "what the saved one gives; keep what lives from step to step in buffers or in `carried`",
                    "another value",
                )
    for name in before:
        try:
            fresh.transform.load_state_dict({key: value for key, value in before.items() if key != name})
        except GleanError:
            continue
        raise ConformanceError("state", f"a state without {name!r}", "an error", "none")
    env.close()
    twin.close()


def _run(env: Env, root: Any, actions: list[Leaves], seed: int) -> tuple[Any, list[Leaves]]:
    """Take `actions` from `root`, or from a seeded reset; return the root that follows and all outcomes."""
    if root is None:
        env.set_seed(seed)
        root = env.reset()
    outcomes = []
    for action in actions:
        stepped = env.step(with_action(root, action))
        outcomes.append(snapshot(stepped.get("next")))
        root = Subject(env, 1).follow(env, stepped)[0]
    return root, outcomes
