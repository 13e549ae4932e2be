"""A table format for calls that must be rejected: a subject, a call on it, and a pattern for the message."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from gleanrl.data import replay_buffers as parts
from tests.contract.buffers.tape import IDS, Tape
from tests.data.replay_buffers.oracle import fingerprint

TAPE = Tape((5, 3))
GRID = Tape((5, 3), (3,))
LONG = 7

NO_SIZES = (0, -1, 1.5, "3", True, float("nan"), [2])
NO_NUMBERS = (-0.1, float("nan"), float("inf"), "a", None)


class Thing:
    """An object of no valid type, whose repr is the same in every process."""

    def __repr__(self) -> str:
        return "Thing()"


THING = Thing()


class Bad(NamedTuple):
    """One call that must raise.

    Attributes:
        name: description of the mistake.
        call: takes the subject; for constructors there is none.
        match: regular expression for the message; it contains the name that the message must mention.
        subject: the kind of buffer, see `SUBJECTS`; "" for constructors.
        error: a built-in class that the error must also derive from.
    """

    name: str
    call: Callable[[Any], Any]
    match: str
    subject: str = ""
    error: type[BaseException] | tuple[type[BaseException], ...] = Exception


def storage(size: int = 12, **kwargs: Any) -> Any:
    """Return an empty storage."""
    return parts.LazyTensorStorage(size, **kwargs)


def _buffer(kind: str = "ReplayBuffer", **kwargs: Any) -> Any:
    options = {"storage": storage(), "batch_size": 4, "seed": 0, **kwargs}
    buffer = getattr(parts, kind)(**options)
    tape = GRID if options["storage"].ndim > 1 else TAPE
    for start in range(0, LONG, 3):
        buffer.extend(tape.rows(start, min(LONG, start + 3)))
    buffer.sample()
    return buffer


def _priorities(kind: str = "PrioritizedSampler", size: int = 12, **kwargs: Any) -> Any:
    return getattr(parts, kind)(max_capacity=size, alpha=0.6, beta=0.4, **kwargs)


SUBJECTS: dict[str, Callable[[], Any]] = {
    "plain": _buffer,
    "once": lambda: _buffer(sampler=parts.SamplerWithoutReplacement()),
    "prioritized": lambda: _buffer(sampler=_priorities()),
    "preset": lambda: _buffer("TensorDictPrioritizedReplayBuffer", alpha=0.6, beta=0.4),
    "tensordict": lambda: _buffer("TensorDictReplayBuffer"),
    "grid": lambda: _buffer(storage=storage(36, ndim=2)),
    "grid prioritized": lambda: _buffer(storage=storage(36, ndim=2), sampler=_priorities(size=36)),
    "list": lambda: _buffer(storage=parts.ListStorage(12), collate_fn=lambda records: records),
    "memmap": lambda: _buffer(storage=parts.LazyMemmapStorage(12)),
    "given": lambda: _buffer(storage=parts.TensorStorage(TAPE.rows(0, 12))),
    "slices": lambda: _buffer(sampler=parts.SliceSampler(slice_len=2, traj_key=IDS)),
    "slices once": lambda: _buffer(sampler=parts.SliceSamplerWithoutReplacement(num_slices=2)),
    "prioritized slices": lambda: _buffer(sampler=_priorities("PrioritizedSliceSampler", slice_len=2)),
    "fetching ahead": lambda: _buffer(prefetch=2),
    "best": lambda: _buffer(
        "TensorDictReplayBuffer", writer=parts.TensorDictMaxValueWriter(rank_key=("next", "reward"))
    ),
    "data set": lambda: parts.ReplayBuffer(
        storage=parts.TensorStorage(TAPE.rows(0, 12)), writer=parts.ImmutableDatasetWriter(), batch_size=4
    ),
}


def state(buffer: Any) -> str:
    """Return a hash of all state that a rejected call must not change."""
    text = f"{fingerprint(buffer.state_dict())} {len(buffer)} {buffer.stats()} {buffer.sampler.ran_out}"
    for name in ("alpha", "beta", "eps", "num_slices", "slice_len"):
        text += f" {getattr(buffer.sampler, name, None)}"
    parts_of = (buffer.storage, buffer.sampler, buffer.writer)
    return hashlib.sha256((text + str(list(map(id, parts_of)))).encode()).hexdigest()


def each(what: str, values: Iterable[Any], call: Callable[..., Any], match: str, **kwargs: Any) -> list[Bad]:
    """Return one row per value; `call` takes the value, or the subject and the value if there is a subject."""
    taken = "subject" in kwargs
    return [
        Bad(
            f"{what}: {value!r}"[:60].replace("\n", " "),
            (lambda s, v=value: call(s, v)) if taken else (lambda s, v=value: call(v)),
            match,
            **kwargs,
        )
        for value in values
    ]


def table(*lists: Iterable[Bad]) -> list[Bad]:
    """Return all rows of the lists."""
    return list(itertools.chain(*lists))


def names(rows: list[Bad]) -> list[str]:
    """Return the test id of each row."""
    return [f"{row.subject or 'constructor'}: {row.name}" for row in rows]
