"""What a crew of collections is made of, and that its members are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gleanrl.collectors.workers.restarts import Restarts
from gleanrl.collectors.workers.servant import CollectorMaker, Description
from gleanrl.collectors.workers.weights import Following
from gleanrl.errors import SchemaError
from gleanrl.tree import as_key
from gleanrl.workers.handle import Timeouts

PRELOAD = ("gleanrl.envs", "gleanrl.collectors.workers.servant")
"""What the launcher imports: with it torch, tensordict and gymnasium."""


@dataclass(frozen=True)
class Team:
    """What a crew of collections is made of.

    Attributes:
        makers: of the workers' collections.
        timeouts: how long workers may take.
        num_threads: torch threads of each.
        restarts: what becomes of lost ones.
        policy: the user's, whose weights are followed; None if it is made in the workers.
        following: until when.
        enough: how many shares end the others; None for all.
        truncated: whether the last step of every share is marked as truncated.
    """

    makers: Sequence[CollectorMaker]
    timeouts: Timeouts
    num_threads: int
    restarts: Restarts
    policy: Any
    following: Following
    enough: int | None = None
    truncated: bool = False


def require_alike(descriptions: Sequence[Description]) -> None:
    """Raise unless all workers' collections have the same columns.

    Raises:
        SchemaError: naming the worker and what differs.
    """
    first = descriptions[0]
    for worker, other in enumerate(descriptions):
        if other.batch_size != first.batch_size:
            raise SchemaError(
                f"create_env_fn: worker {worker} has environments {tuple(other.batch_size)}, worker 0 "
                f"{tuple(first.batch_size)}; use a collector for each kind"
            )
        if other.schema != first.schema:
            mine, its = first.schema.items(), other.schema.items()
            unlike = sorted(str(as_key(path)) for path in {*mine, *its} if mine.get(path) != its.get(path))
            raise SchemaError(
                f"create_env_fn: worker {worker} and worker 0 differ in {unlike}; use a collector for each kind"
            )
