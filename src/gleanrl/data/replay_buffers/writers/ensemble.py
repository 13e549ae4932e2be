"""The writers of a buffer ensemble."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from gleanrl.data.replay_buffers.component_base import Part
from gleanrl.data.replay_buffers.storages.indexing import members_at
from gleanrl.data.replay_buffers.utils import load_all, states_in
from gleanrl.data.replay_buffers.writers.base import Writer
from gleanrl.errors import InvalidArgumentError, UnsupportedError


class WriterEnsemble(Part):
    """Several writers; each member of an ensemble is written to through its own writer.

    It isn't a `Writer`, because an ensemble as a whole has no place for new records.

    Args:
        writers: one for each buffer.

    Raises:
        InvalidArgumentError: no writer is given, or an argument isn't a `Writer`.

    Examples:
        >>> from gleanrl.data.replay_buffers import RoundRobinWriter
        >>> writers = WriterEnsemble(RoundRobinWriter(), RoundRobinWriter())
        >>> len(writers), len(writers[:1])
        (2, 1)
    """

    def __init__(self, *writers: Writer) -> None:
        for writer in writers:
            if not isinstance(writer, Writer):
                raise InvalidArgumentError(f"writers: expected Writers, got {writer!r}")
        if not writers:
            raise InvalidArgumentError("writers: expected at least one, got none")
        self._writers = writers

    def __len__(self) -> int:
        """Return the number of writers."""
        return len(self._writers)

    def __iter__(self) -> Iterator[Writer]:
        """Yield the writers."""
        return iter(self._writers)

    def __getitem__(self, index: Any) -> Any:
        """Return the writer at an int, or an ensemble of the writers at a slice, list or tensor.

        Raises:
            IndexRangeError: a writer doesn't exist, or none is selected.
        """
        chosen = members_at(index, len(self._writers))
        if isinstance(chosen, int):
            return self._writers[chosen]
        return WriterEnsemble(*(self._writers[position] for position in chosen))

    def add(self, data: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        refuse("add")

    def extend(self, data: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        refuse("extend")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each writer."""
        return {"writers": [writer.state_dict() for writer in self._writers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue each writer from its saved state.

        Raises:
            SchemaError: another number of writers, or a state that doesn't fit; nothing changed.
        """
        load_all(self._writers, states_in(state_dict, "writers", len(self._writers)))


def refuse(where: str) -> NoReturn:
    """Raise `UnsupportedError`, because users write to the members of an ensemble, not to the ensemble."""
    raise UnsupportedError(
        f"{where}: an ensemble is only read; write to one of its members, ensemble[0].{where}(...)"
    )
