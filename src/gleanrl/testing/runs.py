"""Runs of an environment through its public protocol, recorded with copies of all data that it returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.ragged import Leaf, ObjectColumn
from gleanrl._arrays.tensordicts import Path, as_key, as_path, is_private, iter_leaves, outermost
from gleanrl._rollout.env_traits import Env, is_closed
from gleanrl._rollout.policies import RandomPolicy
from gleanrl._rollout.step_mdp import advance
from gleanrl._state.rng import torch_rng_preserved
from gleanrl.data.specs import TensorSpec
from gleanrl.envs.vector.factories import is_environment
from gleanrl.errors import ConformanceError, EnvironmentContractError, UnsupportedError

Leaves: TypeAlias = dict[Path, torch.Tensor]
OTHER_SEED = 1000
"""Difference between the second seed and the first."""


@dataclass(frozen=True)
class ReturnedLeaf:
    """A tensor that the environment returned, and a copy of its values at that time."""

    origin: str
    path: Path
    leaf: torch.Tensor
    copy: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One step: copies of its root, its outcome and the root that followed, ``[*batch, *leaf]`` each."""

    root: Leaves
    outcome: Leaves
    following: Leaves
    done: torch.Tensor
    """Which environments' episodes ended, ``(*batch,)`` bool."""
    restarted: torch.Tensor
    """Which environments' following root begins a new episode, ``(*batch,)`` bool."""


@dataclass
class Trace:
    """A run: its first root, its steps, and the tensors that were returned."""

    first: Leaves
    steps: list[Step] = field(default_factory=list)
    returned: list[ReturnedLeaf] = field(default_factory=list)
    changed: list[tuple[str, Path]] = field(default_factory=list)
    """Entries of its input that a step changed: the step and the path."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes that ended."""
        return sum(int(step.done.sum()) for step in self.steps)


class Subject:
    """The environment to check. Its runs are repeatable as far as the environment is.

    Args:
        env: an environment, or a callable that makes one; each run then gets a fresh one.
        num_steps: steps of a run.
    """

    def __init__(self, env: Any, num_steps: int) -> None:
        self.make: Callable[[], Any] | None = None if is_environment(env) else env
        self.env = env if self.make is None else self.make()
        self.num_steps = num_steps
        self.batch_size = torch.Size(self.env.batch_size)
        self.name = type(self.env).__name__

    def env_for_run(self) -> Any:
        """Return the environment for another run; a maker makes a new one, and the last one is closed."""
        if self.make is not None:
            self.close()
            self.env = self.make()
        return self.env

    def close(self) -> None:
        """Close the environment if this object made it."""
        if self.make is not None and not is_closed(self.env):
            self.env.close()

    def actions(self, seed: int) -> list[Leaves]:
        """Return random actions for one run, drawn without touching torch's random state."""
        with torch_rng_preserved():
            torch.manual_seed(seed)
            drawn = RandomPolicy(self.env.full_action_spec).draw((self.num_steps,))
        return [{as_path(path): rows[t] for path, rows in drawn.items()} for t in range(self.num_steps)]

    def done(self, leaves: Leaves) -> torch.Tensor:
        """Return which environments' episodes ended according to their done flags, ``(*batch,)`` bool."""
        groups = outermost(as_path(key)[:-1] for key in self.env.done_keys)
        flags = [leaves[(*group, "done")].reshape(*self.batch_size, -1).any(-1) for group in groups]
        return torch.stack(flags).any(0)

    def run(self, seed: int, actions: Sequence[Leaves]) -> Trace:
        """Seed the environment, reset it and take `actions`; an episode that ends is followed by a new one.

        Raises:
            ConformanceError: the environment raised an `EnvironmentContractError`. Its other errors pass unchanged.
        """
        env = self.env_for_run()
        try:
            env.set_seed(seed)
            root = env.reset()
            trace = Trace(snapshot(root))
            hold(trace, "reset", root)
            for t, action in enumerate(actions):
                root = self._step(env, trace, t, root, action)
        except EnvironmentContractError as cause:
            raise ConformanceError("contract", self.name, "data as declared", str(cause)) from cause
        return trace

    def _step(self, env: Env, trace: Trace, t: int, root: TensorDictBase, action: Leaves) -> TensorDictBase:
        origin = f"step {t}"
        inputs = with_action(root, action)
        before = snapshot(inputs)
        stepped = env.step(inputs)
        after = snapshot(stepped.exclude("next"))
        for path, value in before.items():
            if path not in after or not same(value, after[path]):
                trace.changed.append((origin, path))
        outcome = stepped.get("next")
        hold(trace, origin, outcome)
        leaves = snapshot(outcome)
        done = self.done(leaves)
        following, all_reset = self.follow(env, stepped)
        if bool(done.any()):
            hold(trace, f"the reset after {origin}", following)
        restarted = torch.ones_like(done) if all_reset else done
        trace.steps.append(Step(before, leaves, snapshot(following), done, restarted))
        return following

    def follow(self, env: Env, stepped: TensorDictBase) -> tuple[TensorDictBase, bool]:
        """Return the root after a step, and whether all environments had to be reset because some ended.

        Environments that ended are reset. Without partial resets, all are.
        """
        root = advance(stepped, env)
        try:
            return env.maybe_reset(root), False
        except UnsupportedError:
            return env.reset(), True


def with_action(root: TensorDictBase, action: Leaves) -> TensorDictBase:
    """Return a shallow copy of `root` with copies of the actions set."""
    out = root.copy()
    for path, value in action.items():
        out.set(as_key(path), value.clone())
    return out


def snapshot(batch: TensorDictBase) -> Leaves:
    """Return copies of the public leaves, including those below ``"next"``."""
    return {path: leaf.clone() for path, leaf in iter_leaves(batch) if not is_private(path)}


def hold(trace: Trace, origin: str, batch: TensorDictBase) -> None:
    """Append the public leaves of `batch` outside ``"next"`` to `trace.returned`, with copies of them."""
    for path, leaf in iter_leaves(batch):
        if not is_private(path) and path[0] != "next":
            trace.returned.append(ReturnedLeaf(origin, path, leaf, leaf.clone()))


def _record(leaf: Leaf) -> Leaf:
    """Return the tensor of a single record if it is stored as an object because records differ in shape."""
    single = isinstance(leaf, ObjectColumn) and leaf.blank is not None and not leaf.ndim
    return leaf.array.item() if single else leaf


def same(a: Leaf, b: Leaf) -> bool:
    """Return whether two leaves have the same shape, dtype and values; NaN equals NaN, and -0.0 equals 0.0.

    Empty tensors of one dtype are equal.
    """
    a, b = _record(a), _record(b)
    if isinstance(a, ObjectColumn) or isinstance(b, ObjectColumn):
        return isinstance(a, ObjectColumn) and a.equal(b)
    if not a.numel() and not b.numel():  # empty tensors are equal, even if their shapes differ
        return bool(a.dtype == b.dtype)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


class Runs:
    """The runs that rules compare, each made when a rule first reads it.

    Args:
        subject: the environment.
        seed: seed of the runs.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.seed = subject, seed

    @property
    def env(self) -> Any:
        """The environment of the last run."""
        return self.subject.env

    @cached_property
    def actions(self) -> list[Leaves]:
        """The actions of all runs."""
        return self.subject.actions(self.seed)

    @cached_property
    def first(self) -> Trace:
        """The run that most rules read."""
        return self.subject.run(self.seed, self.actions)

    @cached_property
    def again(self) -> Trace:
        """A second run with the same seed and the same actions."""
        return self.subject.run(self.seed, self.actions)

    @cached_property
    def other(self) -> Trace:
        """A run with another seed and the same actions."""
        return self.subject.run(self.seed + OTHER_SEED, self.actions)

    @cached_property
    def declared(self) -> tuple[dict[Path, TensorSpec], dict[Path, TensorSpec]]:
        """The specs of a root's leaves and of an outcome's."""
        root = dict(leaf_specs(self.env.full_observation_spec, self.env.full_done_spec))
        return root, {**root, **dict(leaf_specs(self.env.full_reward_spec))}

    @cached_property
    def states(self) -> set[Path]:
        """Entries that steps read in addition to actions, and may return for the next step."""
        return {as_path(key) for key in self.env.state_keys}

    def origins(self) -> Iterator[tuple[str, Leaves, bool]]:
        """Yield the origin of data, the data, and whether they are an outcome (otherwise a root)."""
        yield "reset", self.first.first, False
        for t, step in enumerate(self.first.steps):
            yield f"step {t}", step.outcome, True
            if bool(step.restarted.any()):
                yield f"the reset after step {t}", step.following, False


def leaf_specs(*specs: Any) -> Iterator[tuple[Path, TensorSpec]]:
    """Yield path and spec of every leaf of composite specs."""
    for spec in specs:
        for key in spec.keys(True, True):
            yield as_path(key), spec[key]


def rows(leaf: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the rows of `leaf` where `mask`, over its first dimensions, is True: ``(n, *leaf)``."""
    return leaf[mask.to(leaf.device)]


def as_text(value: Leaf) -> str:
    """Return a value as text for a message, at most 120 characters."""
    text = str(value.items() if isinstance(value, ObjectColumn) else value.tolist())
    return text if len(text) <= 120 else f"{text[:117]}..."
