"""Exploration types: tensordict's interaction types under their RL names."""

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
set_exploration_mode = set_interaction_type  # older name


def exploration_from_string(mode: str) -> InteractionType:
    """Return the exploration type with the name `mode` ("random", "mean", …), in upper or lower case.

    Raises:
        InvalidArgumentError: if the name is unknown.
    """
    try:
        return InteractionType.from_str(mode)
    except ValueError as cause:
        known = [kind.name.lower() for kind in InteractionType]
        raise InvalidArgumentError(f"exploration mode: expected one of {known}, got {mode!r}") from cause


def exploration_mode() -> str | None:
    """Return the name of the current exploration type in lower case; None if none is set. An older API."""
    kind: Any = exploration_type()
    return None if kind is None else kind.name.lower()
