"""`env.rollout`: one rollout of limited length, run by the collectors' loop.

Environments whose data can't be stacked densely use `lazy_steps` instead: there each step, and the result, is a lazy
stack. It calls the environment's `step` on TensorDicts, because columns can't hold data with different keys or shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl._arrays.block import Block
from gleanrl._arrays.ragged import cat_leaves
from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path
from gleanrl._rollout.env_traits import Env, EnvTraits, extra
from gleanrl._rollout.errors import StepFault, explain
from gleanrl._rollout.infer_outputs import device_of_policy
from gleanrl._rollout.loop import collect, with_gradients
from gleanrl._rollout.native_policies import Backend, check_backend
from gleanrl._rollout.plan import Handling, RolloutPlan, plan_rollout
from gleanrl._rollout.policies import OwnActions, wrap_policy
from gleanrl._rollout.protocol import EpisodeRules
from gleanrl._rollout.step_mdp import advance, end_flags
from gleanrl._rollout.tensordict_stepper import any_set
from gleanrl._util import positive
from gleanrl.envs.env_specs import KEEPING_STATE, RESIZED
from gleanrl.errors import MissingArgumentError, UnsupportedError


def lazy_steps(
    env: Env,
    max_steps: int,
    policy: Any,
    root: TensorDictBase,
    callback: Any = None,
    break_when_any_done: bool = True,
) -> TensorDictBase:
    """Run `policy` from `root` and return the steps, ``[n, *batch, T]``, lazily stacked along the first dimension.

    It runs without gradients and doesn't change `root`.

    Args:
        env: a batch of n environments with different data.
        max_steps: maximum number of steps.
        policy: any policy that the collectors accept; it is called on lazy stacks.
        root: the root to start from.
        callback: called as ``callback(env, step)`` after every step, whose TensorDict becomes part of the result.
        break_when_any_done: whether to stop as soon as one trajectory ends. If False, ended environments are reset.
    """
    wrapped = wrap_policy(policy, env, list(env.observation_spec.keys(True, True)))
    flags = end_flags(env)
    steps: list[TensorDictBase] = []
    with torch.no_grad():
        for _ in range(max_steps):
            stepped = env.step(wrapped(root.copy()))
            steps.append(stepped.clone())  # the environment may overwrite it later
            if callback is not None:
                callback(env, steps[-1])
            ended = any(bool(stepped.get(("next", *path)).any()) for path in flags)
            if ended and break_when_any_done:
                break
            root = advance(stepped, env)
            root = env.maybe_reset(root) if ended else root
    rows = zip(*(step.unbind(0) for step in steps), strict=True)
    return LazyStackedTensorDict.lazy_stack([_in_time(row) for row in rows], 0)


def _in_time(steps: tuple[TensorDictBase, ...]) -> TensorDictBase:
    """Return the steps of one environment, ``[*batch, T]``; the last dimension is called ``"time"``."""
    dim = steps[0].ndim
    row: Any = torch.stack(steps, dim)
    row.refine_names(..., "time")
    return row


_CHUNK = 1024
"""Number of steps per block. A rollout that ends early has allocated at most this many unused steps."""


@dataclass(frozen=True)
class RolloutOptions:
    """The options of `EnvBase.rollout`, by the same names."""

    auto_reset: bool = True
    auto_cast_to_device: bool = False
    break_when_any_done: bool = True
    break_when_all_done: bool = False
    return_contiguous: bool = True
    set_truncated: bool = False
    callback: Callable[[Any, TensorDictBase], Any] | None = None
    trust_policy: bool = False
    policy_backend: Backend = "auto"


def run_rollout(
    env: Env,
    max_steps: int,
    policy: Any,
    root: TensorDictBase | None,
    options: RolloutOptions,
    out: TensorDictBase | None,
) -> TensorDictBase:
    """Run `policy` in `env`; see `EnvBase.rollout`."""
    max_steps = positive("max_steps", max_steps)
    backend = check_backend(options.policy_backend)
    if root is not None and root.batch_size != env.batch_size and not extra(env, "batch_locked", True):
        # A `rand_action` that the class overrides must be called on `env` itself, not on the resized environment.
        if policy is None and EnvTraits.of(env).own_actions:
            policy = OwnActions(env)
        env = RESIZED[0](env, root.batch_size)
    if not options.auto_reset and root is None:
        raise MissingArgumentError("rollout: auto_reset=False needs the tensordict to start from")
    policy_device = device_of_policy(policy) if options.auto_cast_to_device else None
    original = env
    if EnvTraits.of(env).stackable:
        # A recurrent policy may need state entries in the root. `env` then is a wrapper; callbacks and errors use
        # `original`.
        env = KEEPING_STATE[0](env, policy, policy_device)
    start = root
    if root is not None:
        start = env.reset(root) if options.auto_reset else _undone(env, root)
        if env is not original:
            start = _with_state(env, start)
    if not EnvTraits.of(env).stackable:
        return _unstacked(env, max_steps, policy, env.reset() if start is None else start, options, out)
    handling = Handling(trusted=options.trust_policy, backend=backend)
    rules = EpisodeRules(reset_when_done=not options.break_when_any_done)
    # A call that shows the policy's outputs is torch's, so the native way doesn't act by it.
    act_now = backend != "native" or torch.is_grad_enabled()
    plan = plan_rollout(env, policy, policy_device, start, act_now, rules, handling=handling)
    try:
        blocks = with_gradients(plan.gradients, _run, original, plan, max_steps, options)
    except StepFault as fault:
        raise explain(fault, original) from fault.cause
    batch = _joined(plan, blocks, env.device)
    if options.set_truncated:
        mark_truncated(batch, env.done_keys)
    if options.break_when_all_done and batch.ndim > 1:
        batch = waiting(batch, _ends(env))
    if out is not None:
        batch = out.copy_(batch)
    if not options.return_contiguous and not isinstance(batch, LazyStackedTensorDict):
        batch = LazyStackedTensorDict.lazy_stack(list(batch.unbind(-1)), -1)
        batch.names = [*[None] * (batch.ndim - 1), "time"]
    return batch


def _with_state(env: Env, root: TensorDictBase) -> TensorDictBase:
    """Return `root` with zeros for each entry of the policy's state that it lacks."""
    zeros = env.full_observation_spec.zero()
    missing = [key for key in EnvTraits.of(env).primed_keys if root.get(key, None) is None]
    return root.copy().update(zeros.select(*missing)) if missing else root


def _undone(env: Env, root: TensorDictBase) -> TensorDictBase:
    """Return `root` after a reset of the environments that are done there; `root` itself if it lacks a done flag."""
    flags = [root.get(key, None) for key in env.done_keys if as_path(key)[-1] == "done"]
    return root if any(flag is None for flag in flags) else env.maybe_reset(root)


def _unstacked(
    env: Env, max_steps: int, policy: Any, root: TensorDictBase, options: RolloutOptions, out: Any
) -> TensorDictBase:
    """Run `policy` in environments whose steps can only be stacked lazily; reject options that need dense data."""
    options_of_dense_data = {
        "out": out is not None,
        "set_truncated": options.set_truncated,
        "break_when_all_done": options.break_when_all_done,
        "policy_backend='native'": options.policy_backend == "native",
    }
    for name, wanted in options_of_dense_data.items():
        if wanted:
            raise UnsupportedError(f"rollout: {name} needs environments whose data can be stacked densely")
    return lazy_steps(env, max_steps, policy, root, options.callback, options.break_when_any_done)


def _run(env: Env, plan: RolloutPlan, max_steps: int, options: RolloutOptions) -> list[tuple[Block, int]]:
    """Fill blocks until `max_steps` or the end of the rollout; return each block with its number of steps."""
    blocks: list[tuple[Block, int]] = []
    done, callback = 0, options.callback
    ends = options.break_when_any_done or options.break_when_all_done
    end = _End(_ends(env), plan.batch_size, options.break_when_all_done) if ends else None
    while done < max_steps:
        block = plan.block(min(_CHUNK, max_steps - done))
        over = None if end is None else end.test(block)
        count = collect(plan.actor, plan.stepper, block, _observed(env, block, over, callback))
        blocks.append((block.owned(), count))
        done += count
        if over is not None and over(count - 1):
            break
    return blocks


def _observed(env: Env, block: Block, over: Callable[[int], bool] | None, callback: Any) -> Any:
    """Return the callback for each step: the user's callback, then the test for the end. None if neither is needed."""
    if callback is None:
        return over

    def stop(t: int) -> bool:
        callback(env, block.record(t, env.device))
        return over is not None and over(t)

    return stop


def _ends(env: Env) -> list[Path]:
    """Return the paths of the flags that end a rollout; truncated is among them, because it can come without done."""
    return [("next", *path) for path in end_flags(env)]


class _End:
    """Tests whether a rollout is over: at the first end of a trajectory, or after one in every environment.

    Args:
        paths: the flags.
        batch_size: batch size of the environments.
        wait: whether every environment must have ended a trajectory.
    """

    def __init__(self, paths: Sequence[Path], batch_size: torch.Size, wait: bool) -> None:
        self._paths, self._wait = paths, wait
        self._ended = torch.zeros(batch_size, dtype=torch.bool)

    def test(self, block: Block) -> Callable[[int], bool]:
        """Return a function that tells, after step `t` of `block`, whether the rollout is over; call it at each `t`."""
        flags = [block.rows(path) for path in self._paths]

        def all_ended(t: int) -> bool:
            for rows in flags:
                self._ended |= rows[t].reshape(*self._ended.shape, -1).any(-1).cpu()
            return bool(self._ended.all())

        if self._wait:
            return all_ended
        arrays = [array for path in self._paths if (array := block.row_arrays(path)) is not None]
        if len(arrays) == len(flags):  # takes a third of the time that tensors take
            return lambda t: any_set(arrays, t)
        return lambda t: any(bool(rows[t].any()) for rows in flags)


def waiting(batch: TensorDictBase, done_paths: Sequence[Path]) -> TensorDictBase:
    """Return `batch` with each environment's steps after its first end replaced by the step of that end.

    Args:
        batch: ``[*batch, T]``.
        done_paths: the flags that end trajectories.
    """
    size, steps = batch.batch_size[:-1], batch.batch_size[-1]
    flags = [batch.get(as_key(path)).reshape(*batch.batch_size, -1).any(-1) for path in done_paths]
    before = torch.stack(flags).any(0).cpu().cumsum(-1).clamp(max=1)  # (*batch, T), 1 from the first end on
    last = steps - before.sum(-1, keepdim=True)  # (*batch, 1), index of the first end or `steps`
    index = torch.minimum(torch.arange(steps).expand(batch.batch_size), last).reshape(-1, steps)
    rows = torch.arange(index.shape[0]).unsqueeze(-1)
    out = batch.reshape(-1, steps)[rows, index].reshape(*size, steps)
    out.names = batch.names
    return out


def _joined(
    plan: RolloutPlan, blocks: list[tuple[Block, int]], device: torch.device | None
) -> TensorDictBase:
    if len(blocks) == 1 and blocks[0][1] == blocks[0][0].num_steps:
        return blocks[0][0].batch(device=device)
    dim = len(plan.batch_size)
    columns = [
        cat_leaves([block.column(path).narrow(dim, 0, count) for block, count in blocks], dim)
        for path in plan.schema.paths
    ]
    total = sum(count for _, count in blocks)
    return plan.schema.layout.build(
        columns, torch.Size((*plan.batch_size, total)), device, [*[None] * dim, "time"]
    )


def mark_truncated(batch: TensorDictBase, done_keys: Sequence[NestedKey]) -> None:
    """Set truncated and done at the last time index of `batch`, in place, in each group of flags with truncated.

    Terminated is unchanged.

    Raises:
        UnsupportedError: if the environment has no truncated flag.
    """
    paths = [as_path(key) for key in done_keys]
    groups = {path[:-1] for path in paths if path[-1] == "truncated"}
    if not groups:
        raise UnsupportedError(
            "set_truncated: the environment has no 'truncated' flag; call env.add_truncated_keys() first"
        )
    last = (slice(None),) * (len(batch.batch_size) - 1) + (-1,)
    for group in groups:
        for flag in ("truncated", "done"):
            key = as_key(("next", *group, flag))
            flags = batch.get(key)
            flags[last] = True
            if isinstance(batch, LazyStackedTensorDict):  # `get` returned a copy
                batch.set_(key, flags)
