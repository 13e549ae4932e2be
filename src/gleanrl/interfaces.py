"""Protocols that parts agree on without importing each other."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A part whose state can be saved and restored.

    The state owns its tensors: it aliases neither the part nor, once loaded, the caller's copy. It holds
    tensors, numbers, strings and containers of those, so that ``torch.load(weights_only=True)`` reads it
    back. Loading a bad state raises and changes nothing.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, random generators included."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, exactly as the part that was saved would have."""
