"""`step_mdp`: makes the root of the next step from the outcome of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from gleanrl._arrays.devices import on_cpu
from gleanrl._arrays.tensordicts import (
    NestedKey,
    Path,
    as_key,
    as_path,
    dict_batch,
    level_of,
    num_entries,
    outermost,
    put_leaf,
)
from gleanrl._rollout.env_traits import Env
from gleanrl.errors import MissingKeyError, UnsupportedError

_TENSORS = {torch.Tensor}


def step_mdp(
    tensordict: TensorDictBase,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: NestedKey | Sequence[NestedKey] = "reward",
    done_keys: NestedKey | Sequence[NestedKey] = "done",
    action_keys: NestedKey | Sequence[NestedKey] = "action",
) -> TensorDictBase:
    """Return the root of the step that follows `tensordict`: the entries of its ``"next"`` and kept root entries.

    The entries aren't copied, and `tensordict` isn't changed. Root masks at ``"_reset"`` are dropped. Lazily stacked
    inputs give a lazy stack.

    Args:
        tensordict: the result of `env.step`, ``[*batch]``.
        next_tensordict: a TensorDict to write the result into, which keeps its other entries; None for a new one.
        keep_other: whether to keep root entries that ``"next"`` doesn't replace.
        exclude_reward: whether to drop rewards.
        exclude_done: whether to drop `done_keys`; other flags are kept.
        exclude_action: whether to drop actions; kept actions come from the root.
        reward_keys: the reward keys.
        done_keys: the done keys.
        action_keys: the action keys.

    Returns:
        The root of step t + 1, ``[*batch]``.

    Raises:
        MissingKeyError: if there is no ``"next"`` entry (also a KeyError).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> after = TensorDict({"obs": torch.ones(1), "reward": torch.ones(1), "done": torch.zeros(1)}, [])
        >>> td = TensorDict({"obs": torch.zeros(1), "action": torch.ones(1), "next": after}, [])
        >>> sorted(step_mdp(td).keys())
        ['done', 'obs']
    """
    excluded: set[Path] = set()
    if exclude_reward:
        excluded |= paths_of(reward_keys)
    if exclude_done:
        excluded |= paths_of(done_keys)
    actions = paths_of(action_keys)
    if isinstance(tensordict, LazyStackedTensorDict):
        pieces = [
            _stepped(piece, keep_other, excluded, actions, exclude_action)
            for piece in tensordict.unbind(tensordict.stack_dim)
        ]
        out: TensorDictBase = LazyStackedTensorDict.lazy_stack(pieces, tensordict.stack_dim)
    else:
        out = _stepped(tensordict, keep_other, excluded, actions, exclude_action)
    if next_tensordict is not None:
        return next_tensordict.update(out)
    return out


def advance(stepped: TensorDictBase, env: Env) -> TensorDictBase:
    """Return `step_mdp` of `stepped` with the keys of `env`."""
    return step_mdp(
        stepped, reward_keys=env.reward_keys, done_keys=env.done_keys, action_keys=env.action_keys
    )


def end_flags(env: Env) -> list[Path]:
    """Return the paths of the outermost done, terminated and truncated flags: they tell which trajectories ended."""
    paths = [as_path(key) for key in env.done_keys]
    groups = outermost([path[:-1] for path in paths])
    return [path for path in paths if path[:-1] in groups]


def ended(outcome: TensorDictBase, env: Env) -> torch.Tensor:
    """Return the environments whose trajectories have ended in a step's outcome, ``(*batch,)`` bool.

    Only the done flags of the outermost groups count.
    """
    groups = outermost([as_path(key)[:-1] for key in env.done_keys])
    flags = [outcome.get(as_key((*group, "done"))) for group in groups]
    return torch.stack([flag.reshape(*outcome.batch_size, -1).any(-1) for flag in flags]).any(0)


def step_on(
    root: TensorDictBase, outcome: TensorDictBase, actions: Mapping[NestedKey, torch.Tensor], env: Env
) -> tuple[TensorDictBase, TensorDictBase, torch.Tensor]:
    """Step again the environments that took the last step and whose trajectories haven't ended.

    Args:
        root: root of the last step. Its ``"_step"`` mask, if any, marks the environments that took that step. If an
            environment is stepped, `outcome` is set as its ``"next"``.
        outcome: outcome of the last step.
        actions: the next actions, by key.
        env: the environment to step.

    Returns:
        The new root, the new outcome, and the mask of environments that were stepped, ``(*batch,)`` bool. In the
        outcome, all other environments keep their root, with zero rewards. If no environment is left to step, `root`
        and `outcome` are returned unchanged.

    Raises:
        UnsupportedError: if `env` can't leave some of its environments out.
    """
    going, mask = ~ended(outcome, env), root.get("_step", None)
    if mask is not None:
        going = going & mask
    if not bool(going.any()):
        return root, outcome, going
    root = advance(root.set("next", outcome), env)
    for key, action in actions.items():
        root.set(key, action)
    if not bool(going.all()):
        root.set("_step", going)
    try:
        return root, env.step(root).get("next"), going
    except UnsupportedError as cause:
        left = (~going).flatten().nonzero().flatten().tolist()
        raise UnsupportedError(
            f"environments {left} ended before the others' step was over; {cause}"
        ) from cause


def following_root(batch: TensorDictBase, after: TensorDictBase, excluded: set[Path]) -> TensorDictBase:
    """Return the root of the next step, like `step_mdp` but faster for plain TensorDicts.

    If the outcome has no device, the result is moved to the root's device.

    Args:
        batch: the root of a step.
        after: its outcome.
        excluded: paths that aren't part of a root: rewards, actions, ``"next"`` and others.
    """
    joined = _joined((batch, after), excluded)
    root = _advance(batch, after, excluded) if joined is None else joined
    return root.to(batch.device) if root.device is None and batch.device is not None else root


def _joined(levels: Sequence[Any], excluded: set[Path], prefix: Path = ()) -> TensorDict | None:
    """Return the entries of one level of several TensorDicts; later TensorDicts take precedence.

    Args:
        levels: one TensorDict at least.
        excluded: paths to drop. A group that becomes empty is dropped, too.
        prefix: path of the level.

    Returns:
        A TensorDict. None if an entry is neither a plain tensor nor a TensorDict, or if groups differ in size or
        device.
    """
    entries: dict[str, Any] = {}
    last = levels[-1]
    for level in levels:
        if type(level) is not TensorDict or (prefix and not _alike(level, last)):
            return None
        entries |= level_of(level)
    for path in excluded:
        if path[:-1] == prefix:
            entries.pop(path[-1], None)
    if {*map(type, entries.values())} != _TENSORS:
        for key in [key for key, value in entries.items() if type(value) is not torch.Tensor]:
            groups = [group for level in levels if (group := level_of(level).get(key)) is not None]
            joined = _joined(groups, excluded, (*prefix, key))
            if joined is None:
                return None
            if num_entries(joined):
                entries[key] = joined
            else:
                del entries[key]
    device = last.device
    if device is None and not prefix and on_cpu(levels[0].device):
        device = levels[0].device  # saves a copy of the whole root in `following_root`
    return dict_batch(entries, last.batch_size, device)


def _alike(one: Any, other: Any) -> bool:
    return one is other or (one.batch_size == other.batch_size and one.device == other.device)


def paths_of(keys: NestedKey | Sequence[NestedKey]) -> set[Path]:
    """Return the paths of one key or several keys. A tuple is one nested key, a list holds several keys."""
    if isinstance(keys, (str, tuple)):
        return {as_path(keys)}
    return {as_path(key) for key in keys}


def _stepped(
    batch: TensorDictBase, keep_other: bool, excluded: set[Path], actions: set[Path], exclude_action: bool
) -> TensorDictBase:
    after = batch.get("next", None)
    if after is None:
        keys = sorted(map(str, batch.keys()))
        raise MissingKeyError(f"step_mdp: expected the result of a step, with a 'next' entry; got {keys}")
    excluded = excluded | actions if exclude_action else excluded
    if not keep_other:
        batch = batch.select(*(() if exclude_action else actions), strict=False)
    return _advance(batch, after, excluded, {("next",), ("_reset",)})


def _advance(
    batch: TensorDictBase, after: TensorDictBase, excluded: set[Path], root_only: Collection[Path] = ()
) -> TensorDictBase:
    """Merge an outcome with the root; the outcome takes precedence.

    Drops the paths `excluded` from both and the paths `root_only` from the root.
    """
    out = _filtered(after, excluded)
    _add_missing(out, _filtered(batch, excluded.union(root_only)))
    return out


def _filtered(batch: TensorDictBase, excluded: set[Path], prefix: Path = ()) -> TensorDictBase:
    """Return a shallow copy of `batch` without the `excluded` paths and without groups that become empty."""
    if isinstance(batch, LazyStackedTensorDict):
        pieces = [_filtered(piece, excluded, prefix) for piece in batch.unbind(batch.stack_dim)]
        return LazyStackedTensorDict.lazy_stack(pieces, batch.stack_dim)
    out: dict[str, Any] = {}
    for key, value in level_of(batch).items():
        path = (*prefix, key)
        if path in excluded:
            continue
        if (
            not isinstance(value, torch.Tensor)
            and isinstance(value, TensorDictBase)
            and not is_non_tensor(value)
        ):
            value = _filtered(value, excluded, path)
            if value.is_empty():
                continue
        out[key] = value
    return dict_batch(out, batch.batch_size, batch.device)


def _add_missing(target: TensorDictBase, source: TensorDictBase) -> None:
    if isinstance(target, LazyStackedTensorDict):
        dim = target.stack_dim
        for below, above in zip(target.unbind(dim), source.unbind(dim), strict=True):
            _add_missing(below, above)
        return
    have = level_of(target)
    for key, value in level_of(source).items():
        if key not in have:
            put_leaf(target, (key,), value)
        elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
            _add_missing(have[key], value)
