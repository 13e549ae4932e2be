"""What a buffer's actor and its clients say to each other."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


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
    """Whether what was sent to the caller ahead isn't to be handed out any more."""
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
