"""Post-processing of collected batches: n-step returns (`MultiStep`) and discounted sums (`DensifyReward`)."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from gleanrl._arrays.tensordicts import NestedKey, Path, as_key, as_path, iter_leaves, set_leaf
from gleanrl._util import positive
from gleanrl.compat import bind
from gleanrl.compat.unserved import TellingModule
from gleanrl.data.trajectories import take_rows, trajectory_ends
from gleanrl.errors import InvalidArgumentError, MissingKeyError, SchemaError, UnsupportedError

__all__ = ["DensifyReward", "MultiStep"]


class MultiStep(nn.Module):
    """Turn a batch of single steps into n-step transitions; a `postproc` for collectors.

    The transition at t covers k steps, itself included. k is the smallest of ``n_steps``, the steps to the end of the
    trajectory, and the steps to the end of the batch. The outcome of the transition is that of its last step:

    - every entry below ``"next"`` at t, including flags, is that of step t+k-1. So observation, ``done``,
      ``terminated`` and ``truncated`` belong to one step;
    - every reward is ``sum(gamma**j * reward[t + j] for j in range(k))``;
    - ``gamma`` is ``gamma**k``, the discount of this observation's value.

    So ``reward + gamma.unsqueeze(-1) * ~terminated * value(next observation)`` is the n-step target at every step. At a
    truncation and at the end of the batch k is smaller. The flags there are unchanged (False in the middle of a
    trajectory), so that the learner bootstraps. No sum crosses the end of a trajectory, as defined by
    `gleanrl.data.trajectories.trajectory_ends`. A masked step is unchanged, with k = 1.

    Added entries have shape ``[*B, T]``. Rewards usually have one more dimension: multiply them by
    ``gamma.unsqueeze(-1)``.

    - ``steps_to_next_obs``: k, int64;
    - ``gamma``: ``gamma**k``, in the dtype of the rewards;
    - ``nonterminal``: whether k is not 1, bool. It isn't the negation of ``terminated``: it is also False on masked
      steps, at the end of the batch, and everywhere if ``n_steps`` is 1;
    - ``original_reward``, next to each reward below ``"next"``: the reward of the step itself.

    Source: n-step returns, https://arxiv.org/abs/1710.02298.

    Args:
        gamma: discount of one step, in (0, 1].
        n_steps: largest number of steps in a transition, at least 1. 1 adds the entries and changes no other data.
        reward_keys: keys of the rewards, without the leading ``"next"``: one key (a tuple is one nested key) or a
            list of keys. None takes every entry named ``"reward"`` below ``"next"``, at any depth (groups of agents).

    Raises:
        InvalidArgumentError: if `gamma` or `n_steps` is out of range, `n_steps` isn't an integer, or `reward_keys` is
            empty or names a key twice (a `ValueError`).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
        >>> batch = TensorDict({"next": {"obs": torch.arange(6), "reward": torch.ones(6), "done": done}}, [6])
        >>> steps = MultiStep(gamma=0.5, n_steps=3)(batch)
        >>> steps["steps_to_next_obs"]
        tensor([3, 2, 1, 3, 2, 1])
        >>> steps["next", "reward"]
        tensor([1.7500, 1.5000, 1.0000, 1.7500, 1.5000, 1.0000])
        >>> steps["gamma"]
        tensor([0.1250, 0.2500, 0.5000, 0.1250, 0.2500, 0.5000])
        >>> steps["next", "obs"]
        tensor([2, 2, 2, 5, 5, 5])
        >>> steps["next", "done"]
        tensor([ True,  True,  True, False, False, False])
    """

    def __init__(
        self, gamma: float, n_steps: int, *, reward_keys: list[NestedKey] | NestedKey | None = None
    ) -> None:
        super().__init__()
        self.gamma = _discount(gamma)
        self.n_steps = positive("n_steps", n_steps)
        self.reward_keys = _reward_paths(reward_keys)

    def extra_repr(self) -> str:
        """Return the arguments for the repr."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the n-step batch.

        Args:
            batch: ``[*B, T]``, with rewards of a floating dtype and shape ``[*B, T]``, ``[*B, T, 1]`` or
                ``[*B, T, n_agents, 1]``. It isn't changed.

        Returns:
            A new TensorDict of the same shape and names. Entries outside ``"next"`` are the tensors of
            `batch`, not copies.

        Raises:
            MissingKeyError: if the batch has no reward, or neither flags nor ids that mark ends of trajectories.
            SchemaError: if a reward isn't floating, or flags can't be mapped onto the batch (a `RuntimeError`; see
                `gleanrl.data.trajectories.trajectory_ends`).
            UnsupportedError: if the batch has one of the added entries, because it was processed already.
        """
        return self.bounded(batch, trajectory_ends(batch))

    def bounded(self, batch: TensorDictBase, ends: Tensor) -> TensorDictBase:
        """Return the n-step batch like `forward`; no sum crosses a step where `ends`, ``[*B, T]`` bool, is True.

        `ends` must be True at the last step in time.
        """
        following = batch.get("next", None)
        leaves = {} if following is None else dict(iter_leaves(following, ("next",), batch.ndim))
        rewards = self._rewards(batch, leaves)
        steps = _steps_ahead(ends, self.n_steps)  # (*B, T) int64
        last = _last_rows(steps)  # (prod(B) * T,) int64
        out = batch.copy()
        for path, leaf in leaves.items():
            if path in rewards:
                out.set(path, self._summed(leaf, steps))
                out.set((*path[:-1], "original_reward"), leaf.clone())
            else:
                set_leaf(out, path, take_rows(leaf, steps.ndim, last).reshape(leaf.shape))
        out.set("steps_to_next_obs", steps)
        out.set("gamma", self._discounts([leaves[path] for path in rewards], steps))
        out.set("nonterminal", steps != 1)
        return out

    def _rewards(self, batch: TensorDictBase, leaves: dict[Path, Tensor]) -> list[Path]:
        """Return the paths of the rewards, including ``"next"``, after checking them and the keys to be added."""
        if self.reward_keys is None:
            rewards = sorted((path for path in leaves if path[-1] == "reward"), key=len)
        else:
            rewards = [("next", *path) for path in self.reward_keys]
        missing = [path for path in rewards if path not in leaves]
        if missing or not rewards:
            raise MissingKeyError(
                f"reward {missing[0] if missing else ('next', 'reward')!r} not found; "
                f"keys below 'next': {[as_key(path[1:]) for path in leaves]}"
            )
        for path in rewards:
            if not leaves[path].is_floating_point():
                raise SchemaError(
                    f"reward {path!r} expected a floating dtype, got {leaves[path].dtype}; cast it first"
                )
        added = [
            ("steps_to_next_obs",),
            ("gamma",),
            ("nonterminal",),
            *((*path[:-1], "original_reward") for path in rewards),
        ]
        present = [as_key(path) for path in added if batch.get(path, None) is not None]
        if present:
            raise UnsupportedError(
                f"MultiStep adds {present}, which the batch has already; n-step data can't be processed "
                "twice: apply it once, or rename the entries"
            )
        return rewards

    def _summed(self, reward: Tensor, steps: Tensor) -> Tensor:
        """Return the discounted sum of the next ``steps`` rewards at each step, in O(n_steps) operations."""
        steps = steps.to(reward.device)
        time = steps.ndim - 1
        length = steps.shape[time]
        total = reward.clone(memory_format=torch.contiguous_format)
        extra = (1,) * (reward.ndim - steps.ndim)
        for ahead in range(1, self._reach(steps)):
            beyond = (steps <= ahead).narrow(time, 0, length - ahead)
            later = self.gamma**ahead * reward.narrow(time, ahead, length - ahead)
            # `masked_fill` instead of a product with zero, because NaN * 0 is NaN: a NaN in the next trajectory must
            # not reach this one.
            later = later.masked_fill(beyond.reshape(*beyond.shape, *extra), 0)
            total.narrow(time, 0, length - ahead).add_(later)
        return total

    def _discounts(self, rewards: list[Tensor], steps: Tensor) -> Tensor:
        """Return ``gamma ** steps`` in the widest dtype of `rewards`, on the device of `steps`."""
        dtype = rewards[0].dtype
        for reward in rewards[1:]:
            dtype = torch.promote_types(dtype, reward.dtype)
        powers = [self.gamma**k for k in range(self._reach(steps) + 1)]
        return torch.tensor(powers, dtype=dtype, device=steps.device)[steps]

    def _reach(self, steps: Tensor) -> int:
        """Return the largest possible number of steps: the smaller of `n_steps` and the length of the batch."""
        return min(self.n_steps, steps.shape[-1])


def _steps_ahead(ends: Tensor, n_steps: int) -> Tensor:
    """Return ``min(n_steps, steps to the next end, both included)``, ``[*B, T]`` int64."""
    length = ends.shape[-1]
    position = torch.arange(length, device=ends.device)
    candidates = torch.where(ends, position, length)
    # The running minimum from the right is the nearest end at or after each step. The last step is always an end.
    nearest = candidates.flip(-1).cummin(-1).values.flip(-1) if length else candidates
    return (nearest - position + 1).clamp(max=n_steps)


def _last_rows(steps: Tensor) -> Tensor:
    """Return the row of the step that is ``steps - 1`` later, in the flattened batch: ``[B * T]`` int64."""
    own = torch.arange(steps.numel(), device=steps.device)
    return own + steps.flatten() - 1


class DensifyReward(TellingModule):
    """Replace each reward by the discounted sum of the rewards from its step to the end of its trajectory.

    It serves tasks with a reward at the end of a trajectory only. If a trajectory continues after the batch, the sum
    ends at the last step of the batch. Trajectory ids and masks end a sum, too (see
    `gleanrl.data.trajectories.trajectory_ends`). Other flags than `done_key` don't.

    Args:
        reward_key: key of the reward, below ``"next"``.
        done_key: key of the flag that ends trajectories, below ``"next"``.
        reward_key_out: key of the sums, below ``"next"``; None: the key of the reward.
        time_dim: has no effect; time is always the last batch dimension.
        discount: discount of one step, in (0, 1].

    Raises:
        InvalidArgumentError: if `discount` is out of range.
    """

    def __init__(
        self,
        *,
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        reward_key_out: NestedKey | None = None,
        time_dim: int = 2,
        discount: float = 1.0,
    ) -> None:
        super().__init__()
        self.reward_key, self.done_key = as_path(reward_key), as_path(done_key)
        self.reward_key_out = self.reward_key if reward_key_out is None else as_path(reward_key_out)
        self.time_dim, self.discount = time_dim, _discount(discount)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the sums into the batch ``[*B, T]``, in place, and return it.

        Raises:
            MissingKeyError: if the reward or the flag is missing.
            SchemaError: if the rewards aren't floating-point, the batch has no time dimension, or the flag can't be
                mapped onto it (see `gleanrl.data.trajectories.trajectory_ends`).
        """
        reward = tensordict.get(("next", *self.reward_key), None)
        if reward is None:
            raise MissingKeyError(f"DensifyReward: no {('next', *self.reward_key)} in the batch")
        ends = trajectory_ends(tensordict, done_key=as_key(self.done_key))
        sums = discounted_sum(reward, ends, self.discount)
        return tensordict.set(("next", *self.reward_key_out), sums)


def discounted_sum(reward: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each step to the next end, ``[*B, T, *feature]``.

    Args:
        reward: ``[*B, T, *feature]``.
        ends: ``[*B, T]`` bool, True at the last step of each trajectory.
        gamma: discount of one step.

    Raises:
        SchemaError: if the rewards aren't floating-point, so that the sums would be rounded or wrap around.
    """
    if not reward.is_floating_point():
        raise SchemaError(
            f"rewards: expected a floating dtype to sum up, got {reward.dtype}; cast them first"
        )
    time = ends.ndim - 1
    out = torch.empty_like(reward)
    total = torch.zeros_like(reward.select(time, 0)) if reward.shape[time] else None
    for t in reversed(range(reward.shape[time])):
        assert total is not None
        end = ends.select(time, t).to(reward.device)
        end = end.reshape((*end.shape, *[1] * (total.ndim - end.ndim)))
        total = reward.select(time, t) + gamma * total.masked_fill(end, 0)
        out.select(time, t).copy_(total)
    return out


def _discount(gamma: float) -> float:
    try:
        value = float(gamma)
    except (TypeError, ValueError):
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise InvalidArgumentError(f"gamma expected a number in (0, 1], got {gamma!r}")
    return value


def _reward_paths(keys: list[NestedKey] | NestedKey | None) -> list[Path] | None:
    """Return the paths of `keys`; a string or a tuple is one (nested) key, a list holds several keys.

    Raises:
        InvalidArgumentError: the list is empty, or has a key twice.
    """
    if keys is None:
        return None
    if isinstance(keys, (str, tuple)):
        return [as_path(keys)]
    paths = [as_path(key) for key in keys]
    if not paths or len(set(paths)) != len(paths):
        raise InvalidArgumentError(f"reward_keys expected at least one key, and none twice, got {keys!r}")
    return paths


bind(__name__, globals())
