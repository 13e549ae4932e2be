"""Exploration types: tensordict's interaction types under the names that reinforcement learning uses."""

from __future__ import annotations

from typing import Any

from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from gleanrl.errors import InvalidArgumentError

__all__ = [
    "ExplorationType",
    "exploration_from_string",
    "exploration_mode",
    "exploration_type",
    "set_exploration_mode",
    "set_exploration_type",
]

ExplorationType = InteractionType
set_exploration_type = set_interaction_type
set_exploration_mode = set_interaction_type  # the older spelling; takes the type's name as a string too


def exploration_from_string(mode: str) -> InteractionType:
    """Return the exploration type called `mode`, in any case ("random", "mean", …).

    Raises:
        InvalidArgumentError: for an unknown name.
    """
    try:
        return InteractionType.from_str(mode)
    except ValueError as cause:
        known = [kind.name.lower() for kind in InteractionType]
        raise InvalidArgumentError(f"exploration mode: expected one of {known}, got {mode!r}") from cause


def exploration_mode() -> str | None:
    """Return the current exploration type as a lower-case string, the older spelling; None if none is set."""
    kind: Any = exploration_type()
    return None if kind is None else kind.name.lower()
