"""Buffers made of parts that lie side by side: the members of an ensemble."""

from __future__ import annotations

from typing import Any

from gleanrl.data.replay_buffers.buffer import ReplayBuffer
from gleanrl.data.replay_buffers.storages.ensemble import StorageEnsemble
from gleanrl.errors import InvalidArgumentError


def assemble(storages: Any, samplers: Any, writers: Any, collate_fns: Any) -> tuple[ReplayBuffer, ...]:
    """Return buffers made of parts, which lie side by side in ensembles or sequences of equal length.

    Raises:
        InvalidArgumentError: no storages or samplers, or parts of another number.
    """
    if storages is None or samplers is None:
        raise InvalidArgumentError(
            "rbs: expected ReplayBuffers, or else storages= and samplers= to make them of"
        )
    held = storages.storages if isinstance(storages, StorageEnsemble) else tuple(storages)
    transforms = storages.transforms if isinstance(storages, StorageEnsemble) else (None,) * len(held)
    columns = {
        "samplers": tuple(samplers),
        "writers": (None,) * len(held) if writers is None else tuple(writers),
        "collate_fns": (None,) * len(held) if collate_fns is None else tuple(collate_fns),
    }
    for name, column in columns.items():
        if len(column) != len(held):
            raise InvalidArgumentError(
                f"{name}: expected {len(held)}, one for each storage, got {len(column)}"
            )
    return tuple(
        ReplayBuffer(storage=storage, transform=transform, sampler=sampler, writer=writer, collate_fn=collate)
        for storage, transform, sampler, writer, collate in zip(
            held, transforms, *columns.values(), strict=True
        )
    )
