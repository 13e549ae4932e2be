"""Helpers of the contract tests: the oracle's check of a stream of batches, the ledger check, small policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import nn

from gleanrl.collectors import SyncDataCollector
from tests.fakes import Script

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def counter(collector: SyncDataCollector, name: str) -> int:
    """Return one counter of `collector.stats()`, a mapping or a record."""
    stats = collector.stats()
    return int(stats[name] if isinstance(stats, Mapping) else getattr(stats, name))


def check_ledger(collector: SyncDataCollector) -> None:
    """Check that every stepped frame is counted as delivered, flagged or discarded."""
    parts = {name: counter(collector, name) for name in ("stepped", "delivered", "flagged", "discarded")}
    assert parts["stepped"] == parts["delivered"] + parts["flagged"] + parts["discarded"], parts
    assert min(parts.values()) >= 0, parts


def leaf_keys(data: TensorDictBase) -> set[Any]:
    """Return the keys of all leaves, nested ones as tuples."""
    return set(data.keys(True, True))


def snapshot(data: TensorDictBase) -> dict[Any, torch.Tensor]:
    """Return a deep copy of every leaf."""
    return {key: data[key].clone() for key in leaf_keys(data)}


def same(data: TensorDictBase, frozen: dict[Any, torch.Tensor]) -> bool:
    """Return whether `data` still equals the copy by `snapshot`."""
    return leaf_keys(data) == set(frozen) and all(
        torch.equal(data[key], value) for key, value in frozen.items()
    )


def valid_rows(batch: TensorDictBase) -> int:
    """Return the number of real frames of a batch: rows with a true mask, or all rows without a mask."""
    return int(batch[MASK].sum()) if MASK in leaf_keys(batch) else batch.numel()


def rows_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """Return the rows ``[T]`` of a batch ``[T]`` or ``[*P, T]``, without masked steps."""
    rows = [batch] if batch.ndim == 1 else list(batch.reshape(-1, batch.shape[-1]).unbind(0))
    return [row[row[MASK]] if MASK in leaf_keys(row) else row for row in rows]


def check_stream(
    batches: Sequence[TensorDictBase],
    script: Script,
    *,
    obs_key: Any = "observation",
    fresh_batches: bool = False,
    first_step: int | None = 0,
    limit: int | None = None,
) -> None:
    """Check every row of consecutive batches of one collector against the oracle `(stream, episode, step)`.

    Args:
        batches: all batches of one collector, in order, ``[T]`` or ``[P, T]``.
        script: the script of the environments.
        obs_key: key of the oracle's triple.
        fresh_batches: whether each batch begins with a reset.
        first_step: the step in the very first root observation; None: don't check.
        limit: steps after which the collector truncates a trajectory.
    """
    names: dict[int, tuple[int, int]] = {}
    owners: dict[tuple[int, int], int] = {}
    for p in range(len(rows_of(batches[0]))):
        previous: tuple[list[int], int, bool] | None = None  # last next observation, id, done
        for batch in batches:
            row = rows_of(batch)[p]
            roots, nexts = row[obs_key].long().tolist(), row["next"][obs_key].long().tolist()
            ids = row[IDS].tolist()
            flags = torch.cat([row["next", key] for key in ("done", "terminated", "truncated")], -1).tolist()
            for key in ("done", "terminated", "truncated"):
                assert not row[key].any(), f"root {key} must be False on every row that was stepped from"
            for t, (root, after) in enumerate(zip(roots, nexts, strict=True)):
                stream, episode, step = root
                where = f"row {p}, t {t}, root {root}, next {after}, previous {previous}"
                assert after == [stream, episode, step + 1], where
                terminated, truncated = script.flags(stream, episode, step + 1)
                truncated |= step + 1 == limit
                assert flags[t] == [terminated or truncated, terminated, truncated], where
                if previous is None:
                    assert first_step is None or step == first_step, where
                elif previous[2] or (fresh_batches and t == 0):
                    assert step == 0 and episode > previous[0][1], where
                    assert ids[t] > previous[1], where
                else:
                    assert root == previous[0], where
                    assert ids[t] == previous[1], where
                assert names.setdefault(ids[t], (stream, episode)) == (stream, episode), (
                    f"id {ids[t]} twice: {where}"
                )
                assert owners.setdefault((stream, episode), ids[t]) == ids[t], (
                    f"two ids for one episode: {where}"
                )
                previous = (after, ids[t], flags[t][0])
            reward = row["next"].get("reward", None)
            if reward is not None:
                expected = [script.reward(*after) for after in nexts]
                assert reward.dtype == torch.float32 and reward.squeeze(-1).tolist() == expected


class Constant(nn.Module):
    """A plain module: `forward(observation)` returns its one parameter as the action of every row."""

    def __init__(self, value: float = 0.5, size: int = 2) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((size,), value))
        self.calls = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the action, ``[*batch, size]`` float32."""
        self.calls += 1
        return self.value.expand(*observation.shape[:-1], -1)


def on_td(function: Any) -> Any:
    """Return a policy on tensordicts that sets "action" to the result of `function(td)`."""

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", function(tensordict))

    return policy


def tensors_below(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested dictionaries and tensordicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping) or is_tensor_collection(value):
        return [leaf for item in value.values() for leaf in tensors_below(item)]
    return []
