"""What a buffer's actor and its clients say to each other."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

SAVES = frozenset(("checkpointed_state", "dumps", "state_dict"))
"""Methods that save what was drawn ahead, and wasn't handed out."""
_LEAVES = SAVES | {
    "__getitem__",
    "__len__",
    "__repr__",
    "__setitem__",
    "add",
    "extend",
    "generation",
    "mark_update",
    "stats",
    "update_priority",
    "update_tensordict_priority",
    "verify",
}


def leaves_draws(path: tuple[str, ...]) -> bool:
    """Return whether a call leaves alone what was drawn ahead, as that of a local buffer does; those of parts do."""
    return len(path) > 1 or path[0] in _LEAVES


class Caller(NamedTuple):
    """Who calls, and what became of the batches that were sent to it ahead."""

    client: bytes
    """One process's client, and no other one's."""
    era: int
    """Counts up when the client throws away what is on its way to it."""
    taken: int
    """The number of the last batch that it handed out."""


class Opened(NamedTuple):
    """What a client needs to know of a buffer that was made."""

    depth: int
    """Batches on their way to a client at once; 0 for none ahead."""
    batch_size: int | None
    """The buffer's."""


class Reply(NamedTuple):
    """What a call came to."""

    value: Any
    """A parcel of what it returned, or a `Token`."""
    depth: int
    """See `Opened`; exchanging the sampler may change it."""
    void: bool
    """Whether what was sent to the caller ahead isn't to be handed out any more: the storage has another content."""
    stale: tuple[int, ...]
    """The numbers of batches sent to the caller ahead whose records were overwritten: they are drawn again."""
    warnings: tuple[Warning, ...]
    """What it warned of."""


class Dumping(NamedTuple):
    """Stands for a checkpoint that the actor writes in the background."""

    number: int


class Token(Enum):
    """What stands for something that stays in the actor."""

    BUFFER = 1
    METHOD = 2
    PART = 3
