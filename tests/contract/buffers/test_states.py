"""Loading an invalid state changes nothing, and loading a valid state makes an equal buffer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gleanrl.data import replay_buffers as parts
from gleanrl.errors import SchemaError
from tests.contract.buffers.cases import SLICES, make_buffer, make_sampler, make_storage, pairwise
from tests.contract.buffers.tape import Tape

pytestmark = pytest.mark.slow

CAPACITY, BATCH = 8, 4
TAPE = Tape((3, 2))


class Scale(nn.Module):
    """A user's transform with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, batch: Any) -> Any:
        return batch


class Make(NamedTuple):
    storage: str
    sampler: str
    writer: str
    prefetch: int | None
    transform: bool

    @property
    def possible(self) -> bool:
        """Return whether the combination is valid: slices need columns, and records in their order of writing."""
        return not (self.sampler in SLICES and (self.storage == "list" or self.writer == "best"))

    def __str__(self) -> str:
        return "-".join(map(str, self))

    def buffer(self, written: int) -> Any:
        """Return a buffer with `written` steps and one batch drawn."""
        writer = {
            "ring": parts.RoundRobinWriter,
            "best": lambda: parts.TensorDictMaxValueWriter(rank_key=("next", "reward")),
        }[self.writer]()
        slices = {"num_slices": 2} if self.sampler in SLICES else {}
        made = make_buffer(
            "plain",
            make_storage(self.storage, CAPACITY, TAPE),
            make_sampler(self.sampler, CAPACITY, **slices),
            self.prefetch,
            BATCH,
            writer=writer,
            transform=Scale() if self.transform else None,
        )
        made.extend(TAPE.rows(0, written))
        made.sample()
        return made


FACTORS = {
    "storage": ("list", "tensor", "memmap"),
    "sampler": ("random", "once", "prioritized", *SLICES),
    "writer": ("ring", "best"),
    "prefetch": (None, 2),
    "transform": (False, True),
}
CASES = pairwise(FACTORS, Make, lambda made: made.possible)


def fields(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each entry in a state, groups included."""
    if path:
        yield path
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in pairs:
        # Objects of a list storage and the structure of records belong to the user.
        if key not in ("items", "format"):
            yield from fields(value, (*path, key))


def at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def parted(state: Any, path: Sequence[Any]) -> Any:
    """Return a copy in which all groups along a path are copied; other objects are shared."""
    made = copy.copy(state)
    if path:
        made[path[0]] = parted(state[path[0]], path[1:])
    return made


def wrong_values(value: Any) -> Iterator[Any]:
    """Yield values that are invalid, or nearly always invalid, for a field with this value."""
    yield object()
    yield None
    yield torch.empty(0)  # has no truth value
    if isinstance(value, torch.Tensor):
        yield value.tolist()
        yield value[None]
        yield value.to(torch.complex64)
        if value.ndim:
            yield value[:-1]
            yield torch.cat([value, value])
        if value.dtype.is_floating_point:
            yield torch.full_like(value, math.nan)
            yield torch.full_like(value, -1.0)
        elif value.dtype == torch.int64:
            yield torch.full_like(value, -5)
            yield torch.full_like(value, 1 << 40)
    elif isinstance(value, bool):
        yield int(value)
    elif isinstance(value, (int, float)):
        yield from (math.nan, math.inf, -3, 1 << 40, str(value), True)
    elif isinstance(value, dict):
        yield {}
        yield [*value]
    elif isinstance(value, list):
        yield [*value, *value, 1]


def life(buffer: Any) -> str:
    """Return all state of a buffer, without memory-dependent generations and content numbers."""
    found: list[str] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict) or hasattr(value, "keys"):
            for key in value.keys():
                if key not in ("generations", "version", "mark", "content"):
                    walk(f"{path}/{key}", value[key] if isinstance(value, dict) else value.get(key))
        elif isinstance(value, (list, tuple)):
            for place, part in enumerate(value):
                walk(f"{path}[{place}]", part)
        else:
            found.append(f"{path}={value.tolist() if isinstance(value, torch.Tensor) else value!r}")

    walk("", buffer.state_dict())
    return "\n".join(found)


@pytest.mark.parametrize("made", CASES, ids=str)
def test_a_wrong_field_changes_nothing(made: Make) -> None:
    saved = made.buffer(11).state_dict()
    target = made.buffer(6)
    before, rows = life(target), len(target)
    refused = 0
    for path in fields(saved):
        *above, last = path
        for value in wrong_values(at(saved, path)):
            state = parted(saved, above)
            at(state, tuple(above))[last] = value
            try:
                target.load_state_dict(state)
            except SchemaError:
                refused += 1
                assert life(target) == before, f"{path}: {value!r} changed the buffer although it was refused"
            else:
                # An accepted state must be consistent: it loads again with the same result.
                loaded = life(target)
                again = made.buffer(6)
                again.load_state_dict(target.state_dict())
                assert life(again) == loaded, f"{path}: {value!r} was taken, but isn't kept"
                target = made.buffer(6)
                before = life(target)
        if isinstance(at(saved, tuple(above)), dict):
            state = parted(saved, above)
            del at(state, tuple(above))[last]
            try:
                target.load_state_dict(state)
            except SchemaError:
                assert life(target) == before, f"without {path} the buffer changed"
            else:
                optional = (
                    at(saved, path) is None
                    or last == "content"
                    or path in (("_transforms",), ("_prefetched",))
                )
                assert optional, f"{path} may be missing"
                target = made.buffer(6)
                before = life(target)
    assert refused > 40 and len(target) == rows
    target.sample()
    target.load_state_dict(saved)
    assert len(target) == CAPACITY
