"""`check_transform`: checks that a transform does what environments and replay buffers rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl._arrays.tensordicts import Path, as_key, as_path, iter_leaves
from gleanrl._rollout.env_traits import Env
from gleanrl._state.rng import torch_rng_preserved
from gleanrl.envs.transforms import Compose, Transform, TransformedEnv
from gleanrl.errors import ConformanceError, GleanError, InvalidArgumentError
from gleanrl.testing.env import RULES as ENV_RULES
from gleanrl.testing.env import check_env
from gleanrl.testing.report import EnvReport, PartReport, Skip, check_rules, left_out, made
from gleanrl.testing.runs import Leaves, Subject, Trace, same, snapshot, with_action


def read(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """Check that `forward` in eval mode returns a TensorDict, and writes to none of the given tensors.

    It may add or replace entries of the given batch.
    """
    inputs = batch.clone()
    tensors, before = dict(iter_leaves(inputs)), snapshot(inputs)
    out = make().eval()(inputs)
    if not isinstance(out, TensorDictBase):
        raise ConformanceError("read", "the result of forward", "a TensorDict", f"{type(out).__name__}")
    for path, value in before.items():
        if not same(tensors[path], value):
            raise ConformanceError(
                "read",
                f"{as_key(path)!r}",
                "an unchanged input, because it may be a buffer's memory",
                "other values; write to a new tensor",
            )


def written(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """Check that `inv` in eval mode returns a TensorDict or None, and changes neither keys nor values of its input."""
    inputs = batch.clone()
    before = snapshot(inputs)
    out = make().eval().inv(inputs)
    if out is not None and not isinstance(out, TensorDictBase):
        raise ConformanceError(
            "written", "the result of inv", "a TensorDict or None", f"{type(out).__name__}"
        )
    after = snapshot(inputs)
    for path in before.keys() | after.keys():
        if path not in before or path not in after or not same(before[path], after[path]):
            raise ConformanceError(
                "written", f"{as_key(path)!r}", "the user's data, unchanged", "other data; write to a copy"
            )


def inverse(make: Callable[[], Any], batch: TensorDictBase) -> None:
    """Check that `forward` after `inv` gives the mapped entries back unchanged.

    Raise `Skip` unless `pairs` and `pairs_inv` are equal and not empty, or if `inv` returns None.
    """
    transform = make().eval()
    both = set(transform.pairs()) & set(transform.pairs_inv())
    if not both or set(transform.pairs()) != set(transform.pairs_inv()):
        raise Skip("not every key is mapped in both directions")
    stored = transform.inv(batch.clone())
    if stored is None:
        raise Skip("the batch is held back")
    out, want = snapshot(transform(stored)), snapshot(batch)
    for key in sorted({out_key for _, out_key in both}, key=str):
        path = as_path(key)
        if path in want and (path not in out or not same(out[path], want[path])):
            raise ConformanceError("inverse", f"{key!r}", "the value that was written", "another one")


@dataclass(frozen=True)
class TransformTrial:
    """The subject of a check: makers of the environment and of the transform, and the size of the runs."""

    env: Callable[[], Any]
    make: Callable[[], Transform]
    num_steps: int
    seed: int

    def transformed(self, *before: Transform) -> TransformedEnv:
        """Return a fresh environment with a chain of transforms that ends in a fresh transform."""
        return TransformedEnv(self.env(), Compose(*before, self.make()))


class Holding(Transform):
    """Keeps the tensors that the environment returned, and copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[tuple[Path, torch.Tensor, torch.Tensor]] = []

    def _call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.returned = [(path, leaf, leaf.clone()) for path, leaf in iter_leaves(tensordict)]
        return tensordict

    def _reset(self, tensordict: Any, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def look(self, during: str) -> None:
        """Raise `ConformanceError` if one of the tensors changed."""
        for path, leaf, copy in self.returned:
            if not same(leaf, copy):
                raise ConformanceError(
                    "in place",
                    f"{as_key(path)!r} at a {during}",
                    "an unchanged tensor, because the environment may keep it",
                    "other values; write to a new tensor",
                )


def in_place(trial: TransformTrial) -> None:
    """Check that a transform doesn't write to the tensors that the environment returned, in a reset and eight steps."""
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


def trajectories(trial: TransformTrial) -> None:
    """Check that after a full reset no state of earlier trajectories is left: two equal runs give equal data.

    Raise `Skip` if the transform learns, or the environment without it doesn't repeat itself.
    """
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
    """Return the place where two runs differ; None if they are equal."""
    pairs = [("the first root", one.first, other.first)]
    for t, (first, second) in enumerate(zip(one.steps, other.steps, strict=True)):
        pairs.append((f"step {t}", first.outcome, second.outcome))
        pairs.append((f"the root after step {t}", first.following, second.following))
    for origin, a, b in pairs:
        for path in a.keys() | b.keys():
            if path not in a or path not in b or not same(a[path], b[path]):
                return f"{as_key(path)!r} of {origin}"
    return None


def state(trial: TransformTrial) -> None:
    """Check that a transform that loads a saved state continues as the original, and refuses a state without an entry.

    Any `GleanError` counts as a refusal.
    """
    half = max(1, trial.num_steps // 2)
    actions = Subject(trial.transformed(), trial.num_steps).actions(trial.seed)
    env, twin = trial.transformed(), trial.transformed()
    root, _ = _run(env, None, actions[:half], trial.seed)
    # The loaded transform needs a base environment in the same state as the original's. So a second environment takes
    # the same steps, and its base environment gets a fresh transform, which then loads the state.
    _run(twin, None, actions[:half], trial.seed)
    loaded = TransformedEnv(twin.base_env, Compose(trial.make()))
    saved = env.transform.state_dict()
    loaded.transform.load_state_dict(saved)
    before = loaded.transform.state_dict()
    _, want = _run(env, root, actions[half:], trial.seed)
    _, got = _run(loaded, root, actions[half:], trial.seed)
    for t, (a, b) in enumerate(zip(want, got, strict=True)):
        for path in a:
            if path not in b or not same(a[path], b[path]):
                raise ConformanceError(
                    "state",
                    f"{as_key(path)!r} {t} steps after a load",
                    "the saved transform's value; keep state that lasts from step to step in buffers or in `carried`",
                    "another value",
                )
    for name in before:
        try:
            loaded.transform.load_state_dict({key: value for key, value in before.items() if key != name})
        except GleanError:
            continue
        raise ConformanceError("state", f"a state without {name!r}", "an error", "none")
    env.close()
    twin.close()


def _run(env: Env, root: Any, actions: list[Leaves], seed: int) -> tuple[Any, list[Leaves]]:
    """Take `actions` from `root`, or from a seeded reset; return the following root and all outcomes."""
    if root is None:
        env.set_seed(seed)
        root = env.reset()
    outcomes = []
    for action in actions:
        stepped = env.step(with_action(root, action))
        outcomes.append(snapshot(stepped.get("next")))
        root = Subject(env, 1).follow(env, stepped)[0]
    return root, outcomes


IN_ENVIRONMENTS: dict[str, Callable[[TransformTrial], None]] = {
    "in place": in_place,
    "trajectories": trajectories,
    "state": state,
}
IN_BUFFERS: dict[str, Callable[[Callable[[], Any], TensorDictBase], None]] = {
    "read": read,
    "written": written,
    "inverse": inverse,
}


@torch_rng_preserved()  # an environment may seed torch itself
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

    With `env`, the transformed environment has to keep every rule of `check_env`. For example, specs declare the data,
    and rows of a rollout and TensorDicts agree bit for bit. A reset of some environments doesn't change the other ones.
    It also has to keep the first three rules below. With `batch`, the transform has to keep the last three. Torch's
    random state is restored afterwards.

    - `in place`: the tensors that the environment returned don't change.
    - `trajectories`: after a full reset no state of earlier trajectories is left, unless the transform `learns`.
    - `state`: a transform that loads a saved state continues bit for bit; a state that lacks an entry is refused.
    - `read`: `forward` returns a batch, and writes to none of the given tensors.
    - `written`: `inv` returns the data to be written, or None, and doesn't change its input.
    - `inverse`: written data are read back unchanged; skipped if a key is mapped in one direction only.

    Args:
        make: makes the transform, a fresh one at each call.
        env: makes an environment that keeps the rules of `check_env`, a fresh one at each call. None skips the rules
            for environments.
        batch: a batch to be written to a buffer. None skips the rules for buffers.
        num_steps: steps of a run; trajectories should end within them.
        seed: seed of the runs.
        skip: names of rules to leave out, also of rules of `check_env`.

    Returns:
        The rules that were checked, and the rules that weren't with the reasons.

    Raises:
        ConformanceError: the first broken rule (also an AssertionError).
        InvalidArgumentError: neither `env` nor `batch` is given, or `skip` names an unknown rule or `contract`.
        InvalidTypeError: `make` doesn't return a transform.

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
    env_report: EnvReport | None = None
    rules: dict[str, Callable[[], None]] = {}
    if env is not None:
        skipped = without & ENV_RULES.keys()
        env_report = check_env(_transformed(env, make), num_steps=num_steps, seed=seed, skip=skipped)
        trial = TransformTrial(env, make, num_steps, seed)
        rules |= {rule: partial(check, trial) for rule, check in IN_ENVIRONMENTS.items()}
    if batch is not None:
        rules |= {rule: partial(check, make, batch) for rule, check in IN_BUFFERS.items()}
    passed, left = check_rules(rules, without)
    if env_report is None:
        return PartReport(name, passed, left)
    return PartReport(name, (*env_report.passed, *passed), {**env_report.skipped, **left})


def _transformed(env: Callable[[], Any], make: Callable[[], Transform]) -> Callable[[], TransformedEnv]:
    return lambda: TransformedEnv(env(), Compose(make()))
