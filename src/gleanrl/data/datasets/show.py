"""A look at stored records: `show` prints a summary, for ``python -m gleanrl show``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gleanrl._arrays.results import text_table
from gleanrl._arrays.tensordicts import NestedKey
from gleanrl.data.datasets.opening import open_buffer
from gleanrl.data.replay_buffers.describe import BufferDescription, StoredEpisodes
from gleanrl.data.replay_buffers.storages.tensor import TensorStorage
from gleanrl.data.replay_buffers.verify import AuditReport
from gleanrl.errors import MissingKeyError, SchemaError, UnsupportedError

Array = np.ndarray[Any, Any]


class _Contents(NamedTuple):
    """Stored records, and the results of the three calls that describe them."""

    storage: TensorStorage
    description: BufferDescription
    episodes: StoredEpisodes | None
    reason: str
    """The reason why `episodes` is None."""
    report: AuditReport

    def first(self) -> Array:
        """Return the first slots of the episodes, ``(n,)`` int64; without episodes one for each stream."""
        if self.episodes is None:
            return self.storage.oldest_step * self.streams + np.arange(self.streams)
        first = self.episodes.first.numpy()
        return first if first.ndim == 1 else np.ravel_multi_index(tuple(first.T), self.storage.shape)

    def length(self) -> Array:
        """Return the lengths of the episodes, ``(n,)`` int64."""
        if self.episodes is None:
            return np.full(self.streams, self.storage.num_steps)
        return self.episodes.length.numpy()

    @property
    def streams(self) -> int:
        return max(self.storage.rows_per_step, 1)

    def position(self, slot: int) -> tuple[int, int] | None:
        """Return the number of the episode that holds a slot, and the step in it; None if no episode does."""
        first = self.first()
        step = (slot // self.streams - first // self.streams) % self.storage.capacity_steps
        here = np.flatnonzero((first % self.streams == slot % self.streams) & (step < self.length()))
        return (int(here[0]), int(step[here[0]])) if here.size else None


def _contents(buffer: Any) -> _Contents:
    """Read a buffer with columns."""
    episodes, reason = None, ""
    try:
        episodes = buffer.episodes()
    except (MissingKeyError, SchemaError, UnsupportedError) as cause:
        reason = str(cause.args[0])
    return _Contents(buffer.storage, buffer.describe(), episodes, reason, buffer.verify())


def show(source: str | os.PathLike[str], part: str | None = None) -> str:
    """Return a summary of the records at a path.

    It has the columns, statistics of returns and lengths, the ends of episodes, and the problems that
    `ReplayBuffer.verify` finds.

    Args:
        source: see `open_buffer`.
        part: see `open_buffer`.

    Raises:
        Exception: an error of `open_buffer`.
    """
    return _summary(_contents(open_buffer(source, part)))


def _summary(found: _Contents) -> str:
    rows, episodes = len(found.storage), found.episodes
    megabytes = sum(column.megabytes for column in found.description.values())
    count = "" if episodes is None else f" in {len(episodes)} episodes"
    parts = [f"{rows} transitions{count}, {megabytes:.4g} MB"]
    if rows:
        parts += [repr(found.description), "\n".join(_about_episodes(found))]
    parts.append("\n".join(_findings(found)))
    return "\n\n".join(parts)


def _about_episodes(found: _Contents) -> Iterator[str]:
    episodes = found.episodes
    if episodes is None:
        yield f"no episodes: {found.reason}"
        return
    columns = {"length": episodes.length.numpy(), **returns_of(episodes)}
    yield text_table(
        ("", "min", "mean", "median", "max", "not finite"), (_statistics(*item) for item in columns.items())
    )
    flags = {
        "complete": episodes.complete,
        "terminated": episodes.terminated,
        "truncated": episodes.truncated,
    }
    yield ", ".join(f"{int(flag.sum())} {name}" for name, flag in flags.items() if flag is not None)


def _statistics(name: str, values: Array) -> list[str]:
    finite = values[np.isfinite(values)]
    numbers = [finite.min(), finite.mean(), np.median(finite), finite.max()] if finite.size else [None] * 4
    return [name, *("" if one is None else f"{one:.6g}" for one in numbers), str(values.size - finite.size)]


def returns_of(episodes: StoredEpisodes) -> dict[str, Array]:
    """Return the returns of the episodes by name, ``(n,)`` float64 each; rewards of several values give several."""
    found: dict[str, Array] = {}
    for key, total in episodes.returns.items():
        name = "return" if key == "reward" else f"return of {_dotted(key)}"
        flat = total.reshape(len(episodes), -1).numpy()
        for number in range(flat.shape[1]):
            found[name if flat.shape[1] == 1 else f"{name}.{number}"] = flat[:, number]
    return found


def _dotted(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _findings(found: _Contents) -> Iterator[str]:
    for kind, findings in (("problems", found.report.problems), ("warnings", found.report.warnings)):
        if not findings:
            yield f"{kind}: none"
            continue
        yield f"{kind}:"
        rows = ((one.rule, one.rows, *_position_cells(found, one.slot), one.message) for one in findings)
        yield text_table(("rule", "rows", "first row", "episode", "step", "message"), rows)


def _position_cells(found: _Contents, slot: int) -> tuple[object, object, object]:
    at = found.position(slot) if found.episodes is not None else None
    return (slot, "", "") if at is None else (slot, *at)
