"""Rows that identify their origin: the observation is `(stream, episode, step)`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch.utils import _pytree

from gleanrl._arrays.schema import numpy_view

EPISODE = 7
KEYS = 11


def ted(num_steps: int, start: int = 0, streams: int | None = None) -> TensorDict:
    """Return rows with the eleven leaves of a collector's batch, `[T]` or `[P, T]`, from global step `start`.

    Step t of a stream is step `t % EPISODE` of episode `t // EPISODE`.
    """
    t = torch.arange(start, start + num_steps)
    if streams is None:
        stream = torch.zeros(num_steps, dtype=torch.int64)
    else:
        t = t.expand(streams, num_steps)
        stream = torch.arange(streams)[:, None].expand(streams, num_steps)
    size = list(t.shape)
    episode, step = t // EPISODE, t % EPISODE
    obs = torch.stack([stream, episode, step], -1).float()
    done = (step == EPISODE - 1)[..., None]
    flag = torch.zeros(*size, 1, dtype=torch.bool)
    following = TensorDict(
        {
            "done": done,
            "observation": torch.stack([stream, episode, step + 1], -1).float(),
            "reward": t[..., None].float(),
            "terminated": done.clone(),
            "truncated": flag,
        },
        size,
    )
    return TensorDict(
        {
            "action": torch.nn.functional.one_hot(t % 2, 2),
            "collector": TensorDict({"traj_ids": episode + 10_000 * stream}, size),
            "done": flag.clone(),
            "next": following,
            "observation": obs,
            "terminated": flag.clone(),
            "truncated": flag.clone(),
        },
        size,
        names=[None] * (len(size) - 1) + ["time"],
    )


def fill(storage: Any, data: Any, start: int = 0) -> None:
    """Write one or many records directly to a storage, beginning with a time step."""
    leaf = data if isinstance(data, list) or is_tensor_collection(data) else _pytree.tree_leaves(data)[0]
    many = isinstance(leaf, list) or getattr(leaf, "ndim", 0)
    storage.set(range(start, start + (len(leaf) if many else 1)), data)


def clock(rows: TensorDict) -> torch.Tensor:
    """Return the global step of each row, after checking that all leaves of a row belong to the same step."""
    stream, episode, step = rows["observation"].unbind(-1)
    t = (episode * EPISODE + step).long()
    assert torch.equal(rows["next", "observation"], rows["observation"] + torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(rows["next", "reward"][..., 0], t.float())
    assert torch.equal(rows["collector", "traj_ids"], (episode + 10_000 * stream).long())
    assert torch.equal(rows["action"].argmax(-1), t % 2)
    for key in ("done", "terminated"):
        assert torch.equal(rows["next", key][..., 0], step == EPISODE - 1)
    assert not any(rows[key].any() for key in ("done", "terminated", "truncated"))
    return t


def fingerprint(state: Any) -> str:
    """Return a hash of nested state, with every number, string and tensor except the unique content numbers."""
    digest = hashlib.sha256()
    for place, leaf in _pytree.tree_flatten_with_path(state)[0]:
        if {_pytree.MappingKey("version"), _pytree.MappingKey("content")} & set(place):
            continue
        digest.update(_pytree.keystr(place).encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(numpy_view(leaf.contiguous()).tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
