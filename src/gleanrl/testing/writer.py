"""`check_writer`: checks that a writer does what replay buffers rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl._arrays.results import Placement
from gleanrl.data.replay_buffers import LazyTensorStorage, ReplayBuffer, Writer
from gleanrl.data.replay_buffers.writers.adapter import as_writer
from gleanrl.errors import ConformanceError, SchemaError
from gleanrl.testing.report import PartReport, expect, made, part_report

_CAPACITY = 10
_OWN_RULES = ("place", "behind its back", "failed load")
_SIZES = (3, 1, 4, 7, 12, 2)  # rows of the writes: some go around the end, and one is longer than the storage

Make = Callable[[], Writer]


def check_writer(make: Make, *, skip: Iterable[str] = ()) -> PartReport:
    """Check a writer with a buffer of ten rows, each of which holds ``t`` (int64) and ``("next", "reward")``.

    - `place`: the placement fits the storage: different slots, without a gap; a call changes nothing.
    - `index`: the index that a write returns leads to the records; it is -1 for records that aren't stored.
    - `behind its back`: it continues with the stored rows, although no call reports writes, clearings and loads to it.
    - `state`: a writer that loads a saved state continues with the same placements, and so does a copy.
    - `failed load`: an object that isn't a state raises a SchemaError and changes nothing.

    A writer by the protocol of other releases is checked against `index` and `state` only (see the page on writers).

    Args:
        make: makes the writer, a fresh one at each call.
        skip: names of rules to leave out.

    Returns:
        The rules that were checked, and the rules that weren't.

    Raises:
        ConformanceError: the first broken rule (also an AssertionError).
        InvalidArgumentError: `skip` names an unknown rule.
        InvalidTypeError: `make` doesn't return a writer.

    Examples:
        >>> from gleanrl.data.replay_buffers import RoundRobinWriter
        >>> check_writer(RoundRobinWriter).passed[:2]
        ('place', 'index')
    """
    first = made(lambda: as_writer(make()), Writer)
    unknown = (
        {}
        if first.unwrapped is first
        else dict.fromkeys(_OWN_RULES, "a writer of another release places by itself")
    )
    return part_report(type(first).__name__, RULES, lambda rule: make, skip, unknown)


def _rows(first: int, count: int) -> TensorDict:
    t = torch.arange(first, first + count)
    reward = (t * 7 % 5).float()[:, None]
    return TensorDict({"t": t, "next": TensorDict({"reward": reward}, [count])}, [count])


def _buffer(writer: Writer) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(_CAPACITY), writer=writer, batch_size=2)


def _written(buffer: ReplayBuffer, first: int = 0) -> list[list[int]]:
    """Write several times and return the indices."""
    found = []
    for size in _SIZES:
        found.append(buffer.extend(_rows(first, size)).tolist())
        first += size
    return found


def _check_placement(make: Make) -> None:
    writer, storage, first = make(), LazyTensorStorage(_CAPACITY), 0
    writer.register_storage(storage)
    for size in _SIZES:
        where = f"{size} rows to {len(storage)} of {_CAPACITY}"
        prepared = storage.prepare(_rows(first, size), single=False, dim_extend=0, where="check")
        version = storage.version
        placed = [writer.place(prepared), writer.place(prepared)]
        expect("place", where, storage.version == version, "an unchanged storage", storage)
        slots = [_slots(found) for found in placed]
        expect("place", where, slots[0] == slots[1], f"the same place again, {slots[0]}", slots[1])
        inside = len(set(slots[0])) == len(slots[0]) and all(0 <= slot < _CAPACITY for slot in slots[0])
        expect("place", where, inside, f"different slots in [0, {_CAPACITY})", slots[0])
        length, covered = placed[0].length, {*range(len(storage)), *slots[0]}
        expect("place", where, covered == {*range(length)}, f"length {length} without gaps", sorted(covered))
        if isinstance(placed[1], Placement):
            storage.write(prepared, placed[1])
        else:
            storage.write_selected(prepared, placed[1])
        first += size


def _slots(placed: Any) -> list[int]:
    if isinstance(placed, Placement):
        return [slot for start, stop in placed.spans() for slot in range(start, stop)]
    slots: list[int] = placed.slots.tolist()
    return slots


def _index(make: Make) -> None:
    buffer, first = _buffer(make()), 0
    for size in _SIZES:
        rows = _rows(first, size)
        _check_index("index", f"{size} rows", buffer, buffer.extend(rows), rows)
        first += size
    one = buffer.add(_rows(first, 1)[0])
    _check_index("index", "one record", buffer, torch.tensor([one]), _rows(first, 1))


def _check_index(rule: str, where: str, buffer: ReplayBuffer, index: torch.Tensor, rows: TensorDict) -> None:
    # A slot that the index names twice holds the later record.
    newest = dict(zip(index.tolist(), rows["t"][-len(index) :].tolist(), strict=True))
    newest.pop(-1, None)
    stored = buffer.storage.get([*newest])["t"].tolist() if newest else []
    expect(rule, where, stored == [*newest.values()], f"the records {[*newest.values()]}", stored)


def _behind(make: Make) -> None:
    # Users may write to, clear and load a buffer's storage directly, and no call tells the writer.
    buffer = _buffer(make())
    saved = _buffer(make())
    _written(saved)
    state, storage = saved.storage.state_dict(), buffer.storage
    changes: dict[str, Callable[[], None]] = {
        "a write": lambda: storage.set(slice(4), _rows(50, 4)),
        "clearing": storage.clear,
        "another write": lambda: storage.set(slice(6), _rows(60, 6)),
        "loading": lambda: storage.load_state_dict(state),
    }
    first = 100
    for name, change in changes.items():
        change()
        for size in (3, 5):
            rows, before = _rows(first, size), len(storage)
            index = buffer.extend(rows)
            _check_index("behind its back", name, buffer, index, rows)
            covered = {*range(before), *index[index >= 0].tolist()}
            fine = covered == {*range(len(storage))}
            expect("behind its back", name, fine, f"{len(storage)} rows without gaps", sorted(covered))
            first += size


def _state(make: Make) -> None:
    for written in (0, 2, 12):
        buffer, other = _buffer(make()), _buffer(make())
        if written:
            buffer.extend(_rows(0, written))
        other.load_state_dict(buffer.state_dict())
        copied = copy.deepcopy(buffer)
        expected = _written(buffer, 200)
        for how, one in (("loaded", other), ("a copy", copied)):
            got = _written(one, 200)
            expect("state", f"{how}, after {written} rows", got == expected, f"{expected}", got)


def _failed_load(make: Make) -> None:
    buffer, other = _buffer(make()), _buffer(make())
    for one in (buffer, other):
        one.extend(_rows(0, 12))
    for bad in (None, [1], 3):
        try:
            buffer.writer.load_state_dict(bad)
        except SchemaError:
            continue
        raise ConformanceError("failed load", repr(bad), "a SchemaError", "nothing")
    got, expected = _written(buffer, 300), _written(other, 300)
    expect("failed load", "the writes that follow", got == expected, f"{expected}", got)


RULES: dict[str, Callable[[Make], None]] = {
    "place": _check_placement,
    "index": _index,
    "behind its back": _behind,
    "state": _state,
    "failed load": _failed_load,
}
"""The rules by name, in the order of their checks."""
